"""A communicator that lists what it is asked for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.parallel.comm import Comm


class CommCall(NamedTuple):
    """One collective as this rank called it: its name and its argument."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class RecordingComm:
    """Forwards to ``inner``, and lists the calls in ``calls``.

    It sees calls, not replays: a graph that contains a collective is listed once, at its capture.
    """

    def __init__(self, inner: Comm) -> None:
        self.inner = inner
        self.calls: list[CommCall] = []

    @property
    def size(self) -> int:
        return self.inner.size

    @property
    def index(self) -> int:
        return self.inner.index

    def _record(self, name: str, tensor: Tensor) -> None:
        self.calls.append(CommCall(name, tuple(tensor.shape), tensor.dtype))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self._record("all_reduce", tensor)
        return self.inner.all_reduce(tensor)

    def all_gather(self, tensor: Tensor, dim: int = 0) -> Tensor:
        self._record("all_gather", tensor)
        return self.inner.all_gather(tensor, dim)

    def all_to_all(self, tensor: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        self._record("all_to_all", tensor)
        return self.inner.all_to_all(tensor, split_dim, concat_dim)
