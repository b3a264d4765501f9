"""SwiftKV over several ranks: early layers sharded per model, late layers over all ranks.

The early layers of the *base* model are sharded over TP and split a batch's tokens over SP. The
early layers of the *shift* model are sharded over all ranks. The late layers run for few tokens,
which are not worth splitting: they are sharded over all ranks, and both models share them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ostinato.models.native.swiftkv.config import SwiftKVConfig
from ostinato.models.native.swiftkv.decoder import WithLateLayers
from ostinato.models.native.swiftkv.layers import LateLayers
from ostinato.models.weight_slot import WeightSlot
from ostinato.parallel.comm import Comm
from ostinato.parallel.rank_context import RankContext
from ostinato.parallel.rank_exchange import TensorExchange
from ostinato.parallel.sharded.sharded_decoder import ShardedDecoder
from ostinato.parallel.sharded.sharding import Shard, base_shard, sharded_slots, shift_shard


@dataclass(frozen=True, kw_only=True)
class LatePart:
    """A rank's part of the late layers, with its shard. Several models may share it."""

    layers: LateLayers
    shard: Shard

    def weight_slots(self) -> Iterator[WeightSlot]:
        return sharded_slots(self.layers.weight_slots(), self.shard)


class ShardedSwiftKV(WithLateLayers, ShardedDecoder):
    """One rank's part of a SwiftKV model; a ``CausalLM`` like ``SwiftKVDecoder``.

    ``late`` is None if there are no late layers. ``shard`` is the part of the early ones. After
    these, all tokens are on every rank.
    """

    def __init__(
        self,
        shard: Shard,
        late: LatePart | None,
        *,
        tensor: Comm,
        sequence: Comm,
        device: torch.device,
        dtype: torch.dtype,
        max_position: int | None = None,
    ) -> None:
        super().__init__(
            shard,
            tensor=tensor,
            sequence=sequence,
            device=device,
            dtype=dtype,
            max_position=max_position,
        )
        self._late_part = late
        self.add_late_layers(None if late is None else late.layers)

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield from super().weight_slots()
        if self._late_part is not None:
            yield from self._late_part.weight_slots()


def build_swiftkv_models(
    config: SwiftKVConfig,
    rank_context: RankContext,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_position: int | None = None,
) -> list[ShardedSwiftKV]:
    """The base model, and the shift model if the rank context has a threshold; uninitialised.

    The late layers use the shift group even without a shift model. The models share them, so count
    their parameters once.
    """
    layout, rank, comm_of = rank_context.layout, rank_context.rank, rank_context.comm_of
    base = base_shard(config.decoder, layout, rank)
    shift = shift_shard(config.decoder, layout, rank)
    late = None
    if config.late_layers:
        exchange = TensorExchange(comm_of(layout.shift_group))
        layers = LateLayers(
            config, shift.local_config, device=device, dtype=dtype, exchange=exchange
        )
        late = LatePart(layers=layers, shard=shift)

    def model(shard: Shard, tensor: tuple[int, ...], sequence: tuple[int, ...]) -> ShardedSwiftKV:
        return ShardedSwiftKV(
            replace(shard, num_layers=config.num_key_value_layers),
            late,
            tensor=comm_of(tensor),
            sequence=comm_of(sequence),
            device=device,
            dtype=dtype,
            max_position=max_position,
        )

    models = [model(base, layout.tensor_group(rank), layout.sequence_group(rank))]
    if rank_context.threshold:
        headless = replace(shift, config=replace(shift.config, tied_head=True))  # the base has one
        models.append(model(headless, layout.shift_group, (rank,)))
    return models
