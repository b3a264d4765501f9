"""An MLP whose batch size changes from call to call: the shortest use of graphed().

python examples/varying_batch_mlp.py
"""

import torch
from torch import nn

from ostinato import graphed

SIZES = [1, 2, 4, 8, 16]


def build(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10)]
    return nn.Sequential(*layers).to(device).eval()


def make_batch(rows: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    return (torch.randn(rows, 32, device=device),)


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    mlp = graphed(build(device), sizes=SIZES)
    for rows in (3, 16, 1, 7, 20):
        (x,) = make_batch(rows, device)
        print(f"batch of {rows:2} -> {tuple(mlp(x).shape)}")
    print(mlp.stats())


if __name__ == "__main__":
    main()
