"""What one rank knows about the others: its position, and the groups it can use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from ostinato.parallel.agreement import check_same
from ostinato.parallel.comm import Comm, NoComm
from ostinato.parallel.layout import ParallelLayout

# Returns the group of these ranks, in this order, as seen by the calling rank.
CommOf: TypeAlias = Callable[[Sequence[int]], Comm]


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """One rank of a layout. ``everyone`` is the group of all ranks, in order, for CPU tensors.

    There may be several replicas of the layout: ``rank`` is the rank in this one, and ``everyone``
    the ranks of all. ``is_whole``: the model is not split. ``threshold`` is the largest batch that
    the shift model runs; 0 if there is no shift model. ``spreads_experts``: each rank has some of
    the experts, of all ranks of all replicas; ``replicas`` is the group of the ranks with this rank
    in each of them, for tensors on the device. ``communicator_bytes``: memory of the device that
    connecting to the others took.
    """

    layout: ParallelLayout
    rank: int
    device: torch.device
    comm_of: CommOf
    everyone: Comm
    threshold: int = 0
    is_whole: bool = False
    spreads_experts: bool = False
    replicas: Comm = field(default_factory=NoComm)
    communicator_bytes: int = 0

    def check_same(self, name: str, value: str) -> None:
        """Raise on every rank unless ``value`` is the same on all. ``name`` is for the error."""
        check_same(self.everyone, name, value)

    def any(self, value: bool) -> bool:
        """Whether ``value`` is true on any rank, returned on every rank."""
        return bool(self.everyone.all_gather(torch.tensor([int(value)])).any())

    def least(self, value: int) -> int:
        """The smallest ``value`` of all ranks, returned on every rank."""
        return int(self.everyone.all_gather(torch.tensor([value])).min())
