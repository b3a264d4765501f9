"""The part of a decoder's weights on one rank, and where to read it in a checkpoint.

A rank reads only its part. Attention is split by whole heads, in the order of a ``HeadLayout``;
feed-forward layers by their width; the embedding and the head by the vocabulary. The first rank
alone adds the biases of GEMMs that are summed over ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ostinato.errors import ConfigError
from ostinato.models.native.config.decoder_config import DecoderConfig, first_layers
from ostinato.models.native.weight_rows import WeightRows
from ostinato.models.weight_slot import WeightSlot
from ostinato.parallel.layout import ParallelLayout, vocabulary

_SUMMED = (("output",), ("down",))


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Part ``index`` of ``size`` of a decoder: these heads, in this order, in global numbers.

    ``num_layers``: only its first layers; None: all. ``config`` describes the whole decoder.
    """

    config: DecoderConfig
    query_heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    index: int
    size: int
    num_layers: int | None = None

    def __post_init__(self) -> None:
        width = self.config.intermediate_size
        if width % self.size:
            raise ConfigError(
                f"feed-forward layers of width {width} cannot be split evenly over {self.size} "
                f"ranks; choose a number of ranks that divides {width}"
            )
        if self.size > 1 and self.config.qk_norm == "full":
            raise ConfigError(
                f"this model normalises queries and keys over all heads, which cannot be split "
                f"over {self.size} ranks; use ulysses_sequence_parallel_size without a shift "
                "threshold, or one rank"
            )

    @property
    def local_config(self) -> DecoderConfig:
        """The config of the part as if it were a whole model."""
        return replace(
            first_layers(self.config, self.num_layers or self.config.num_layers),
            num_heads=len(self.query_heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=self.config.intermediate_size // self.size,
            vocab_size=len(vocabulary(self.config.vocab_size, self.size, 0)),  # the largest part
        )

    @property
    def vocabulary(self) -> range:
        """The tokens whose embeddings and logits are in this part."""
        return vocabulary(self.config.vocab_size, self.size, self.index)

    @property
    def width(self) -> range:
        part = self.config.intermediate_size // self.size
        return range(self.index * part, (self.index + 1) * part)


def base_shard(config: DecoderConfig, layout: ParallelLayout, rank: int) -> Shard:
    """A rank's part of the model for large batches, sharded over TP."""
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
    """A rank's part of the model for small batches, sharded over all ranks by KV heads."""
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
    """``slots`` of a model built from ``shard.local_config``, each with its part of the tensor.

    Biases that another rank adds read nothing.
    """
    rows = WeightRows(
        config=shard.config,
        query_heads=shard.query_heads,
        kv_heads=shard.kv_heads,
        width=shard.width,
        vocabulary=shard.vocabulary,
    )
    for slot in slots:
        if slot.roles in _SUMMED and slot.target.dim() == 1:
            yield slot if shard.index == 0 else slot._replace(parts=())
        else:
            yield rows.place(slot)
