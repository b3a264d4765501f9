"""The norm and RoPE between the GEMMs of latent attention and the cache, with a torch reference.

Backends that can apply them on the way into the cache read the tensors of a ``LatentEmbedding``;
for all others ``apply`` uses torch operators. See ``attention.latent``.
"""

from __future__ import annotations

import torch

from ostinato.attention.rope import angles_at, rotate
from ostinato.ops.norm import Norm, rms_norm


class LatentEmbedding:
    """RoPE of one layer's queries and of its key, and the norm of its latent vector.

    ``table`` [max_position, rope_dim] float32, as in ``RotaryEmbedding``; ``norm`` [rank]. Both
    belong to the model and never change. RoPE is computed in float32 and rounded once.
    """

    # Not a dataclass, as ``RotaryEmbedding``.
    __slots__ = ("norm", "table")

    def __init__(self, *, table: torch.Tensor, norm: Norm) -> None:
        self.table = table
        self.norm = norm

    def apply(
        self,
        query: torch.Tensor,
        rope_query: torch.Tensor,
        compressed: torch.Tensor,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [T, heads, rank + rope_dim] and keys [T, 1, rank + rope_dim].

        ``query`` [T, heads, rank], ``rope_query`` [T, heads, rope_dim], ``compressed`` [T, rank +
        rope_dim].
        """
        rank = query.shape[2]
        cos, signed_sin = angles_at(self.table, positions, torch.float32)

        def rotated(heads: torch.Tensor) -> torch.Tensor:
            return rotate(heads.float(), cos, signed_sin).to(heads.dtype)

        latent = rms_norm(compressed[:, :rank], *self.norm).unsqueeze(1)
        key = torch.cat((latent, rotated(compressed[:, rank:].unsqueeze(1))), dim=2)
        return torch.cat((query, rotated(rope_query)), dim=2), key
