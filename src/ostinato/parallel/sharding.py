"""Which part of a decoder's weights a rank has, and where it stands in a checkpoint.

A rank reads only its part. Attention is cut by whole heads, in the order that a ``HeadLayout``
gives; feed-forward layers by their width; the embedding and the head by the vocabulary. Biases of
products that are summed over the ranks are added once, by the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ostinato.errors import ConfigError
from ostinato.models.native.decoder_config import DecoderConfig
from ostinato.models.weight_slot import WeightSlot
from ostinato.parallel.layout import ParallelLayout, vocabulary

_COLUMNS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
_ADDED_ONCE = ("self_attn.o_proj.bias", "mlp.down_proj.bias")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Part ``index`` of ``size`` of a decoder: these heads, in this order, in global numbers."""

    config: DecoderConfig
    query_heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    index: int
    size: int

    def __post_init__(self) -> None:
        width = self.config.intermediate_size
        if width % self.size:
            raise ConfigError(
                f"feed-forward layers of width {width} cannot be split evenly over {self.size} "
                f"ranks; choose a number of ranks that divides {width}"
            )

    @property
    def local_config(self) -> DecoderConfig:
        """The config of the part as if it were a model of its own."""
        return replace(
            self.config,
            num_heads=len(self.query_heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=self.config.intermediate_size // self.size,
            vocab_size=len(vocabulary(self.config.vocab_size, self.size, 0)),  # the largest part
        )

    @property
    def vocabulary(self) -> range:
        """The tokens whose embeddings and logits this part has."""
        return vocabulary(self.config.vocab_size, self.size, self.index)

    @property
    def width(self) -> range:
        part = self.config.intermediate_size // self.size
        return range(self.index * part, (self.index + 1) * part)


def base_shard(config: DecoderConfig, layout: ParallelLayout, rank: int) -> Shard:
    """A rank's part of the model for large batches: over TP."""
    heads = layout.heads(config.num_heads, config.num_kv_heads)
    _, t = layout.coordinates(rank)
    return Shard(
        config=config,
        query_heads=tuple(heads.base_query_heads(t)),
        kv_heads=tuple(heads.base_kv_heads(t)),
        index=t,
        size=layout.tp,
    )


def shift_shard(config: DecoderConfig, layout: ParallelLayout, rank: int) -> Shard:
    """A rank's part of the model for small batches: over all ranks, in the order of KV heads."""
    heads = layout.heads(config.num_heads, config.num_kv_heads)
    index = layout.shift_index(rank)
    return Shard(
        config=config,
        query_heads=tuple(heads.query_heads(index)),
        kv_heads=tuple(heads.kv_heads(index)),
        index=index,
        size=layout.world_size,
    )


def sharded_slots(slots: Iterable[WeightSlot], shard: Shard) -> Iterator[WeightSlot]:
    """``slots`` of a model built from ``shard.local_config``, with what each reads of its tensor.

    Fills the end of a vocabulary that is not even with zeros. Biases that another rank adds have
    nothing to read.
    """
    for slot in slots:
        if slot.name.endswith(_ADDED_ONCE):
            yield slot if shard.index == 0 else slot._replace(parts=())
            continue
        parts, dim, whole = _place(slot.name, shard)
        if parts is None:
            yield slot
            continue
        target, shape = slot.target, list(slot.shape)
        num_read = sum(map(len, parts))
        if num_read < target.shape[dim]:
            target[num_read:].zero_()
            target = target[:num_read]
        shape[dim] = whole
        yield WeightSlot(slot.name, target, torch.Size(shape), parts, dim)


def _place(name: str, shard: Shard) -> tuple[tuple[range, ...] | None, int, int]:
    """The stretches of a checkpoint's tensor, of which dimension, and how long that one is."""
    config = shard.config
    part, _, _ = name.rpartition(".")
    dim = 1 if name.endswith(_COLUMNS) else 0
    if part.endswith(("q_proj", "o_proj")):
        return _heads(shard.query_heads, config.head_dim), dim, config.num_heads * config.head_dim
    if part.endswith(("k_proj", "v_proj")):
        return _heads(shard.kv_heads, config.head_dim), 0, config.num_kv_heads * config.head_dim
    if part.endswith(("gate_proj", "up_proj", "down_proj")):
        return (shard.width,), dim, config.intermediate_size
    if part.endswith(("embed_tokens", "lm_head")):
        return (shard.vocabulary,), 0, config.vocab_size
    return None, 0, 0  # norms: every rank has them whole


def _heads(heads: Sequence[int], head_dim: int) -> tuple[range, ...]:
    """The rows of ``heads``; neighbours are read together."""
    stretches: list[range] = []
    for head in heads:
        rows = range(head * head_dim, (head + 1) * head_dim)
        if stretches and stretches[-1].stop == rows.start:
            rows = range(stretches.pop().start, rows.stop)
        stretches.append(rows)
    return tuple(stretches)
