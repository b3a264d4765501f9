"""The rows of a checkpoint's tensors that a decoder, or a rank's part of one, reads, in order.

A part has some of the heads, of the width of the feed-forward layers and of the vocabulary. Rows of
queries and keys are read in the order in which RoPE pairs them here (``Rotary.head_rows``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ostinato.models.native.config.decoder_config import DecoderConfig
from ostinato.models.native.config.latent_config import LatentConfig
from ostinato.models.weight_slot import Role, WeightSlot

_BY_COLUMNS = (("output",), ("down",))  # their inputs are split, and their results summed


@dataclass(frozen=True, kw_only=True)
class WeightRows:
    """The rows of a decoder with ``config``: these heads in order, these ranges of the rest."""

    config: DecoderConfig
    query_heads: Sequence[int]
    kv_heads: Sequence[int]
    width: range
    vocabulary: range

    @classmethod
    def whole(cls, config: DecoderConfig) -> WeightRows:
        """All of them."""
        return cls(
            config=config,
            query_heads=range(config.num_heads),
            kv_heads=range(config.num_kv_heads),
            width=range(config.intermediate_size),
            vocabulary=range(config.vocab_size),
        )

    def place(self, slot: WeightSlot) -> WeightSlot:
        """``slot`` with the part of its tensor that it reads.

        The end of a longer target becomes zero: a vocabulary may not split evenly.
        """
        dim = 1 if slot.roles[:1] in _BY_COLUMNS else 0
        if not slot.roles or dim == slot.target.dim():  # a norm, or a bias that is added once
            return slot
        parts: list[range] = []
        start = 0
        for role in slot.roles:
            rows, size = self._rows(role)
            parts += [range(r.start + start, r.stop + start, r.step) for r in rows]
            start += size
        target, shape = slot.target, list(slot.shape)
        num_read = sum(map(len, parts))
        if num_read < target.shape[dim]:
            target[num_read:].zero_()
            target = target[:num_read]
        shape[dim] = start
        return slot._replace(target=target, shape=torch.Size(shape), parts=tuple(parts), dim=dim)

    def _rows(self, role: Role) -> tuple[Iterable[range], int]:
        """The part read of a tensor with only this role, and its length."""
        config = self.config
        if role == "vocabulary":
            return (self.vocabulary,), config.vocab_size
        if role in ("gate", "up", "down"):
            return (self.width,), config.intermediate_size
        if role == "sinks":  # one of each query head
            return _of_heads(self.query_heads, (range(1),), 1), config.num_heads
        if config.latent is not None:
            return self._latent_rows(role, config.latent)
        of_queries = role in ("query", "output")
        heads = self.query_heads if of_queries else self.kv_heads
        size = (config.num_heads if of_queries else config.num_kv_heads) * config.head_dim
        rotated = role in ("query", "key")
        order = config.rotary.head_rows if rotated else (range(config.head_dim),)
        return _of_heads(heads, order, config.head_dim), size

    def _latent_rows(self, role: Role, latent: LatentConfig) -> tuple[Iterable[range], int]:
        """The same with latent attention, where each query head has keys and values of its own."""
        nope = latent.qk_nope_head_dim
        if role == "query":  # without RoPE first, then with it
            rotated = shifted(self.config.rotary.head_rows, nope)
            order, size = (range(nope), *rotated), latent.query_dim
        elif role == "latent":  # projections from latent vectors to keys and values
            order, size = (range(nope + latent.v_head_dim),), nope + latent.v_head_dim
        else:
            assert role == "output", role
            order, size = (range(latent.v_head_dim),), latent.v_head_dim
        return _of_heads(self.query_heads, order, size), self.config.num_heads * size


def shifted(rows: Iterable[range], by: int) -> tuple[range, ...]:
    """``rows`` that begin this much later."""
    return tuple(range(part.start + by, part.stop + by, part.step) for part in rows)


def _of_heads(heads: Sequence[int], order: Sequence[range], head_dim: int) -> list[range]:
    """The rows of ``heads``, each in this ``order``; adjacent rows are read together."""
    row_ranges: list[range] = []
    for head in heads:
        for part in order:
            first = head * head_dim
            rows = range(first + part.start, first + part.stop, part.step)
            if (
                row_ranges
                and row_ranges[-1].stop == rows.start
                and row_ranges[-1].step == rows.step == 1
            ):
                rows = range(row_ranges.pop().start, rows.stop)
            row_ranges.append(rows)
    return row_ranges
