"""FULL and PIECEWISE graphs of the same model, nested: the context decides which one runs.

A FULL wrapper holds the whole model, PIECEWISE wrappers hold its blocks. Each acts only when the
forward context asks for its mode, so they are independent. They share one memory pool.

    python examples/nested_wrappers.py
"""

import torch
from torch import nn

from ostinato import (
    BatchDescriptor,
    CUDAGraphMode,
    CUDAGraphOptions,
    CUDAGraphWrapper,
    GraphPool,
    compilation_counter,
    set_forward_context,
)

WIDTH, LAYERS = 32, 4


def build(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*blocks).to(device).eval()


def wrap(blocks: nn.Sequential, pool: GraphPool) -> CUDAGraphWrapper[torch.Tensor]:
    """Wrap the pieces, then the whole. Only the first piece collects garbage before capture."""
    pieces = [
        CUDAGraphWrapper(
            block,
            CUDAGraphMode.PIECEWISE,
            pool=pool,
            cudagraph_options=CUDAGraphOptions(
                gc_disable=index > 0, weak_ref_output=index == len(blocks) - 1
            ),
        )
        for index, block in enumerate(blocks)
    ]

    def forward(x: torch.Tensor) -> torch.Tensor:
        for piece in pieces:
            x = piece(x)
        return x

    return CUDAGraphWrapper(forward, CUDAGraphMode.FULL, pool=pool)


def run(
    model: CUDAGraphWrapper[torch.Tensor], mode: CUDAGraphMode, x: torch.Tensor
) -> torch.Tensor:
    with torch.no_grad(), set_forward_context(mode, BatchDescriptor(x.shape[0])):
        return model(x)


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.randn(4, WIDTH, device=device)  # the caller keeps the input at one address
    with GraphPool(device, lazy_capture=True) as pool:
        model = wrap(build(device), pool)
        for mode in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
            before = compilation_counter.num_cudagraph_captured
            for _ in range(3):
                x.copy_(torch.randn(4, WIDTH, device=device))
                expected = run(model, CUDAGraphMode.NONE, x)
                equal = torch.equal(run(model, mode, x), expected)
            graphs = compilation_counter.num_cudagraph_captured - before
            print(f"{mode.name:9} graphs captured: {graphs}  equal to eager: {equal}")


if __name__ == "__main__":
    main()
