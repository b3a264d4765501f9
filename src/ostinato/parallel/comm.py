"""Collectives of one group of ranks: the protocol, the group of one, and a recorder.

A ``Comm`` is passed explicitly; nothing here is global. It knows its size and its index, and
nothing about layouts: group membership and order are decided elsewhere. ``distributed.py`` connects
processes, ``loopback.py`` threads of one process.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ostinato.errors import BatchError


class Comm(Protocol):
    """One group of ranks in an explicit order; ``index`` is this rank's position in it.

    All members call the same collectives in the same order, with tensors of the same shape, dtype
    and device type. Arguments may be strided. A result may share memory with the argument (a group
    of one moves nothing), but never with another rank's. On CUDA the work is ordered by the current
    stream, and nothing is read back to the host.
    """

    @property
    def size(self) -> int:
        """The number of ranks in the group."""

    @property
    def index(self) -> int:
        """This rank's position in the group's order, 0 to size - 1."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Replace ``tensor`` by the sum over the group, in place, and return it."""

    def all_gather(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """The members' tensors, concatenated along ``dim`` in group order."""

    def all_to_all(self, tensor: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        """Exchange parts: part j of ``split_dim`` goes to member j.

        Received parts are concatenated along ``concat_dim`` in group order. ``split_dim`` must be a
        multiple of the group's size.
        """


def equal_parts(tensor: Tensor, parts: int, dim: int) -> list[Tensor]:
    """Views of ``parts`` equal parts of ``tensor`` along ``dim``."""
    length = tensor.shape[dim]
    if length % parts:
        raise BatchError(
            f"cannot split dimension {dim} of a tensor of shape {list(tensor.shape)} into {parts} "
            f"equal parts, one per rank: {length} is not a multiple of {parts}; pad it first"
        )
    step = length // parts
    return [tensor.narrow(dim, part * step, step) for part in range(parts)]


class NoComm:
    """The group of one rank. Every collective returns its argument unchanged."""

    size = 1
    index = 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = 0) -> Tensor:
        return tensor

    def all_to_all(self, tensor: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        return tensor
