"""RoPE and the norm before it, between the QKV GEMM and attention, with their torch reference.

Models pass a ``RotaryEmbedding`` to ``attend_qkv`` with the raw QKV. Backends that can apply
it on the way into the cache read its tensors; for all others ``apply`` uses torch operators.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


class RotaryEmbedding:
    """RoPE of one layer's queries and keys, and the norm before it if the layer has one.

    ``table`` [max_position, head_dim] float32: cosines of the head_dim / 2 pairs (i, i +
    head_dim / 2), then their sines. ``qk_norm`` [num_heads + num_kv_heads, head_dim]: the weight of
    an RMSNorm over each query and key head, with ``eps``. Both belong to the model and never
    change.

    The norm rounds to the dtype of the heads before and after the weight, as ``RMSNorm`` does on
    CUDA. RoPE is computed in float32 and rounded once.
    """

    # Not a dataclass: once per layer and capture, eager breaks search the fields of dataclasses for
    # the pool's tensors, and these are the model's.
    __slots__ = ("eps", "qk_norm", "table")

    def __init__(
        self, *, table: torch.Tensor, qk_norm: torch.Tensor | None = None, eps: float = 1e-6
    ) -> None:
        self.table = table
        self.qk_norm = qk_norm
        self.eps = eps

    def apply(
        self, qkv: torch.Tensor, positions: torch.Tensor, *, num_heads: int, num_kv_heads: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [T, heads, head_dim] of ``qkv`` [T, all heads * head_dim]."""
        head_dim = self.table.shape[1]
        heads = qkv.unflatten(-1, (-1, head_dim))
        queries_keys, value = heads.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
        if self.qk_norm is not None:
            queries_keys = F.rms_norm(queries_keys, (head_dim,), eps=self.eps) * self.qk_norm
        cos, signed_sin = angles_at(self.table, positions, torch.float32)
        rotated = rotate(queries_keys.float(), cos, signed_sin).to(qkv.dtype)
        query, key = rotated.split((num_heads, num_kv_heads), dim=1)
        return query, key, value


def angles_at(
    table: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines [T, 1, head_dim] of ``positions`` [T], as ``rotate`` takes them."""
    rows = table.index_select(0, positions).to(dtype).unsqueeze(1)
    cos, sin = rows.chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (i, i + head_dim / 2) of ``heads`` [T, H, head_dim] by its angle."""
    first, second = heads.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    return torch.addcmul(heads * cos, swapped, signed_sin)
