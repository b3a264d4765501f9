"""What a layer with latent attention has around the cache: a norm, RoPE, and two projections.

Backends that can apply norm and RoPE on the way into the cache read the tensors of a
``LatentEmbedding``; for all others ``apply`` uses torch operators. See ``attention.latent``.
"""

from __future__ import annotations

import torch

from ostinato.attention.rope import angles_at, rotate
from ostinato.ops.norm import Norm, rms_norm


class LatentEmbedding:
    """RoPE of one layer's queries and of its key, the norm of its latent vector, and ``up``.

    ``table`` [max_position, rope_dim] float32, as in ``RotaryEmbedding``; ``norm`` [rank]; ``up``
    [heads, nope_dim + value_dim, rank]: projections of a latent vector to every head's key, without
    RoPE, and to its value. All belong to the model and never change. RoPE is computed in float32
    and rounded once.
    """

    # Not a dataclass, as ``RotaryEmbedding``.
    __slots__ = ("norm", "table", "up")

    def __init__(self, *, table: torch.Tensor, norm: Norm, up: torch.Tensor) -> None:
        self.table = table
        self.norm = norm
        self.up = up

    @property
    def rank(self) -> int:
        return self.up.shape[2]

    def apply(
        self, query: torch.Tensor, compressed: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries with RoPE [T, heads, nope_dim + rope_dim], and rows of the cache.

        ``query`` and ``compressed`` [T, rank + rope_dim] are as in ``attend_latent``.
        """
        rank, nope = self.rank, query.shape[2] - self.table.shape[1]
        cos, signed_sin = angles_at(self.table, positions, torch.float32)

        def rotated(heads: torch.Tensor) -> torch.Tensor:
            return rotate(heads.float(), cos, signed_sin).to(heads.dtype)

        latent = rms_norm(compressed[:, :rank], *self.norm)
        key = rotated(compressed[:, None, rank:]).squeeze(1)
        query = torch.cat((query[..., :nope], rotated(query[..., nope:])), dim=2)
        return query, torch.cat((latent, key), dim=1)


def absorb(query: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Queries without RoPE [T, heads, nope_dim] in the space of latent vectors, [T, heads, rank].

    Their scores with latent vectors are those with the keys that ``up`` makes of these.
    """
    return torch.bmm(query.transpose(0, 1), up[:, : query.shape[2]]).transpose(0, 1)


def absorbed_query(query: torch.Tensor, up: torch.Tensor, rope_dim: int) -> torch.Tensor:
    """Queries with RoPE [T, heads, nope_dim + rope_dim] as rows of the cache take them."""
    nope = query.shape[2] - rope_dim
    return torch.cat((absorb(query[..., :nope], up), query[..., nope:]), dim=2)


def write_values(mixed: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> None:
    """The latent result of attention [T, heads, rank] as values, to ``out`` [T, heads, value_dim].

    ``out`` is where the next GEMM reads it, so there is no copy.
    """
    torch.bmm(mixed.transpose(0, 1), to_values(up, out.shape[2]), out=out.transpose(0, 1))


def to_values(up: torch.Tensor, value_dim: int) -> torch.Tensor:
    """The projections to values [heads, rank, value_dim]."""
    return up[:, up.shape[1] - value_dim :].transpose(1, 2)
