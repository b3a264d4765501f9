"""Attention that must not be captured, between graphs of everything else.

This attention reads the lengths of the requests on the host, which no graph can do. Marked with
``@eager_break`` it runs eagerly between two graph segments, and reads whatever changes from batch
to batch from the forward context. It writes its result in place, so nothing is copied.

    python examples/eager_break.py
"""

import torch
import torch.nn.functional as F
from torch import nn

from ostinato import (
    CUDAGraphMode,
    compilation_counter,
    eager_break,
    get_forward_context,
    graphed,
    set_forward_context,
)

WIDTH, LAYERS = 32, 3
SIZES = [4, 8, 16]


@eager_break
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    """Causal attention within each request; the rows of a request are contiguous."""
    lengths: list[int] = get_forward_context().attn_metadata
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        parts = (tensor[None, None, rows] for tensor in (q, k, v))
        out[rows] = F.scaled_dot_product_attention(*parts, is_causal=True)[0, 0]
        start += length
    out[start:].zero_()  # padding rows


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        attended = torch.empty_like(x)
        attention(q, k, v, attended)
        return x + F.silu(self.out(attended))


def build(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(LAYERS))).to(device).eval()


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = graphed(build(device), sizes=SIZES, mode="piecewise")
    before = compilation_counter.num_cudagraph_captured
    for lengths in ([3, 2], [8], [1, 1, 1, 1], [5, 5, 2]):
        x = torch.randn(sum(lengths), WIDTH, device=device)
        with torch.no_grad(), set_forward_context(CUDAGraphMode.NONE, attn_metadata=lengths):
            difference = (model(x) - model.unwrap()(x)).abs().max().item()
        print(f"requests of {lengths} tokens: differs from eager by {difference:.1e}")
    captured = compilation_counter.num_cudagraph_captured - before
    print(f"{captured} graphs = {len(SIZES)} sizes x ({LAYERS} attention calls + 1)")
    print(model.stats())


if __name__ == "__main__":
    main()
