"""The part of a decoder's weights on one rank, and where to read it in a checkpoint.

A rank reads only its part. Attention is split by whole heads, in the order of a ``HeadLayout``;
feed-forward layers by their width, each expert of a mixture by its own; the embedding and the head
by the vocabulary. The first rank alone adds the biases of GEMMs that are summed over ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ostinato.errors import ConfigError
from ostinato.models.native.config.decoder_config import DecoderConfig, first_layers
from ostinato.models.native.config.experts_config import ExpertsConfig, ExpertsPart
from ostinato.models.native.weight_rows import WeightRows
from ostinato.models.weight_slot import WeightSlot
from ostinato.parallel.layout import ParallelLayout, vocabulary

_SUMMED = (("output",), ("down",))


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Part ``index`` of ``size`` of a decoder: these heads, in this order, in global numbers.

    ``num_layers``: only its first layers; None: all. ``config`` describes the whole decoder.
    ``experts``: these experts of each layer, whole; None: a part of the width of each expert.
    """

    config: DecoderConfig
    query_heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    index: int
    size: int
    num_layers: int | None = None
    experts: range | None = None

    def __post_init__(self) -> None:
        self.config.check_split(self.size, experts_whole=self.experts is not None)

    @property
    def local_config(self) -> DecoderConfig:
        """The config of the part as if it were a whole model."""
        return replace(
            first_layers(self.config, self.num_layers or self.config.num_layers),
            num_heads=len(self.query_heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=max(1, len(self.width)),
            experts=self._local_experts(),
            vocab_size=len(vocabulary(self.config.vocab_size, self.size, 0)),  # the largest part
        )

    def _local_experts(self) -> ExpertsConfig | None:
        experts = self.config.experts
        if experts is None:
            return None
        spread = self.experts is not None
        part = ExpertsPart(
            experts=self.experts or range(experts.num_experts),
            width=range(experts.width) if spread else self._share(experts.width),
            shared=self._share(experts.shared_width or 0),
            adds_biases=spread or self.index == 0,
        )
        return replace(experts, part=part)

    @property
    def vocabulary(self) -> range:
        """The tokens whose embeddings and logits are in this part."""
        return vocabulary(self.config.vocab_size, self.size, self.index)

    @property
    def width(self) -> range:
        return self._share(self.config.intermediate_size)

    def _share(self, size: int) -> range:
        part = size // self.size
        return range(self.index * part, (self.index + 1) * part)


def own_experts(num_experts: int, num_ranks: int, index: int) -> range:
    """The experts of every layer that rank ``index`` of ``num_ranks`` has."""
    share, rest = divmod(num_experts, num_ranks)
    if rest:
        raise ConfigError(
            f"{num_experts} experts cannot be spread evenly over {num_ranks} ranks; choose a "
            "number of ranks (tensor_parallel_size x data_parallel_size) that divides "
            f"{num_experts}, or leave out enable_expert_parallel"
        )
    return range(index * share, (index + 1) * share)


def base_shard(
    config: DecoderConfig, layout: ParallelLayout, rank: int, experts: range | None = None
) -> Shard:
    """A rank's part of the model for large batches, sharded over TP."""
    heads = layout.heads(config.num_heads, config.num_kv_heads)
    _, t = layout.coordinates(rank)
    return Shard(
        config=config,
        query_heads=tuple(heads.base_query_heads(t)),
        kv_heads=tuple(heads.base_kv_heads(t)),
        index=t,
        size=layout.tp,
        experts=experts,
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
