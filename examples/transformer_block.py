"""A transformer block with a cache that stays in place and a mask given as a dictionary entry.

Arguments can be nested, have their batch in any dimension, or be static: read in place.

    python examples/transformer_block.py
"""

import torch
import torch.nn.functional as F
from torch import nn

from ostinato import graphed

SIZES = [1, 2, 4, 8]
WIDTH, HEADS, CONTEXT = 64, 4, 12
BATCH_DIMS = {"cache": "static"}


class Block(nn.Module):
    """One token per row attends over a cache shared by all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(
        self, inputs: dict[str, torch.Tensor], cache: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        x, mask = inputs["hidden"], inputs["mask"]
        rows = x.shape[0]
        q = self.query(self.norm1(x)).view(rows, HEADS, 1, WIDTH // HEADS)
        k, v = (part.expand(rows, -1, -1, -1) for part in cache)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        x = x + self.out(attended.reshape(rows, WIDTH))
        x = x + self.mlp(self.norm2(x))
        return {"hidden": x, "norm": x.norm(dim=-1)}


def build(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return Block().to(device).eval()


def make_cache(device: torch.device) -> torch.Tensor:
    return torch.randn(2, 1, HEADS, CONTEXT, WIDTH // HEADS, device=device)


def make_batch(rows: int, device: torch.device) -> tuple[dict[str, torch.Tensor], ...]:
    mask = torch.zeros(rows, CONTEXT, device=device)
    return ({"hidden": torch.randn(rows, WIDTH, device=device), "mask": mask},)


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cache = make_cache(device)
    block = graphed(build(device), sizes=SIZES, batch_dims=BATCH_DIMS)
    for rows in (5, 1, 8, 3):
        result = block(*make_batch(rows, device), cache)
        print(
            f"batch of {rows} -> " + ", ".join(f"{k} {tuple(v.shape)}" for k, v in result.items())
        )
    print(block.stats())


if __name__ == "__main__":
    main()
