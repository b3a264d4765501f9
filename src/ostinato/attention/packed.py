"""Attention over packed sequences, without a KV cache: for models that read a text once.

The tokens of all sequences lie in one row, and a sequence sees only itself: all of it, what is
before, or a window on both sides. As at ``attend``, a piecewise graph breaks here and the batch is
in the forward context, as ``attn_metadata``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.nn.functional as F

from ostinato import compat
from ostinato.graphs.capture.context import get_forward_context
from ostinato.graphs.capture.segments import eager_break
from ostinato.graphs.tree import holds_no_tensors

_FLASH_TYPES = (torch.bfloat16, torch.float16)
_FLASH_ALIGNMENT, _FLASH_LARGEST = 8, 256  # of heads
_FLASH_CHIPS = (8, 0)  # and later ones


@holds_no_tensors
@dataclass(frozen=True, kw_only=True)
class PackedSpec:
    """One attention layer: ``scale`` multiplies scores.

    A query at position p sees the keys at positions p - left to p + right; None: all on that side.
    """

    scale: float
    left: int | None = None
    right: int | None = None

    @property
    def is_causal(self) -> bool:
        """Whether a query sees all keys before it and none after."""
        return self.left is None and self.right == 0


class PackedBatch:
    """The sequences of one batch, of ``lengths`` tokens each. Rows after them are padding."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = list(lengths)
        self.num_tokens = sum(self.lengths)
        self.max_len = max(self.lengths)
        starts = list(accumulate(self.lengths, initial=0))
        # And the end. From pageable memory: staged at once, so the host does not wait for a GPU.
        self.starts = torch.tensor(starts, dtype=torch.int32).to(device, non_blocking=True)
        self._masks: dict[tuple[int, PackedSpec], torch.Tensor] = {}

    def attend(
        self,
        spec: PackedSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attention of one layer, from [T, heads, dim] each into ``out``; padding becomes 0."""
        out[self.num_tokens :].zero_()
        if _has_flash(query, value):
            out[: self.num_tokens] = self._flash(spec, query, key, value)[: self.num_tokens]
            return
        start = 0
        for length, group in groupby(self.lengths):  # neighbours of one length run as a batch
            count = sum(1 for _ in group)
            rows = slice(start, start + count * length)
            attended = F.scaled_dot_product_attention(
                _batched(query[rows], count),
                _batched(key[rows], count),
                _batched(value[rows], count),
                attn_mask=self._mask(spec, length),
                is_causal=spec.is_causal,
                scale=spec.scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            out[rows] = attended.transpose(1, 2).flatten(0, 1)
            start = rows.stop

    def _flash(
        self, spec: PackedSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        attended: torch.Tensor = compat.flash_attention(
            query,
            key,
            value,
            self.starts,
            self.starts,
            self.max_len,
            self.max_len,
            0.0,  # dropout
            spec.is_causal,
            False,
            scale=spec.scale,
            window_size_left=-1 if spec.left is None else spec.left,
            window_size_right=-1 if spec.right is None else spec.right,
        )[0]
        return attended

    def _mask(self, spec: PackedSpec, length: int) -> torch.Tensor | None:
        """Which keys each query of a sequence sees; None: all, or all before it if causal."""
        reach = max(length - 1, 0)
        left = reach if spec.left is None else spec.left
        right = reach if spec.right is None else spec.right
        if spec.is_causal or (left >= reach and right >= reach):
            return None
        if (length, spec) not in self._masks:
            positions = torch.arange(length, device=self.starts.device)
            ahead = positions - positions[:, None]
            self._masks[length, spec] = (ahead >= -left) & (ahead <= right)
        return self._masks[length, spec]


def _batched(states: torch.Tensor, count: int) -> torch.Tensor:
    """[count * length, heads, dim] -> [count, heads, length, dim]"""
    return states.view(count, -1, *states.shape[1:]).transpose(1, 2)


def _has_flash(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether torch's flash attention takes these heads."""
    head_dim = query.shape[2]
    return (
        query.is_cuda
        and query.dtype in _FLASH_TYPES
        and head_dim == value.shape[2]
        and head_dim % _FLASH_ALIGNMENT == 0
        and head_dim <= _FLASH_LARGEST
        and compat.flash_attention is not None
        and torch.cuda.get_device_capability(query.device) >= _FLASH_CHIPS
    )


def attend_packed(
    spec: PackedSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Attention of one layer for the ``PackedBatch`` in the forward context.

    [T, heads, dim] -> [T, heads, value_dim]; keys and values may have fewer heads than queries.
    """
    out = query.new_empty((*query.shape[:2], value.shape[2]))
    _attend_into(spec, query, key, value, out)
    return out


@eager_break
def _attend_into(
    spec: PackedSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
) -> None:
    batch: Any = get_forward_context().attn_metadata
    batch.attend(spec, query, key, value, out)
