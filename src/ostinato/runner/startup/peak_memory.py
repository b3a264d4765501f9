"""The most memory that tensors made inside a block take at a time, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ostinato.compat import TorchDispatchMode
from ostinato.graphs.tree import tensors_in


class Peak:
    """Measured when the block has ended."""

    num_bytes = 0


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measure the memory of tensors that the block makes, beyond what is there before it."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        peak.num_bytes = torch.cuda.max_memory_allocated(device) - before
        return
    with _LiveMemory() as live:
        yield peak
    peak.num_bytes = live.peak


class _LiveMemory(TorchDispatchMode):
    """Counts the bytes of the storages that operators make, until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports torch._dynamo on the first call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given:
                self._count(storage.nbytes())
                weakref.finalize(storage, self._count, -storage.nbytes())
        return result

    def _count(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
