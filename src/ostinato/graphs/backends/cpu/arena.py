"""The CPU pool's memory: one growing range of addresses, shared by liveness.

The range is reserved once, as large as the machine's memory, and the system backs a page only when
it is first written. So the arena grows without moving, as captured addresses require, and costs no
more than its highest used byte.

A *strong* tensor reserves its block until the last reference to its storage is gone, as with the
CUDA caching allocator during a capture. A *weak* tensor is a view of the same bytes that reserves
nothing. Both keep the mapping alive, so a tensor never outlives its memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from bisect import insort
from collections import deque
from collections.abc import Sequence

import torch

from ostinato.errors import CaptureOutOfMemoryError
from ostinato.graphs.backends.alias import alias_of

# Kernels vectorise up to 64 bytes, which is also the length of a cache line.
_ALIGNMENT = 64
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0


class Arena:
    """First-fit allocation by address. Not thread-safe: one capture at a time uses it."""

    def __init__(self) -> None:
        self._mapping: mmap.mmap | None = _reserve(
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        )
        everything = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self._base = everything.data_ptr()
        self._limit = everything.numel()
        self._free: list[tuple[int, int]] = []  # (start, end) below the top, sorted, never adjacent
        self._top = 0
        # Python may drop a tensor, and so free a block, in the middle of an allocation.
        self._released: deque[tuple[int, int]] = deque()
        self._watches: dict[int, weakref.ref[ctypes.Array[ctypes.c_char]]] = {}
        self._unreserved: dict[tuple[int, int], torch.UntypedStorage] = {}
        self.peak_bytes = 0
        # Highest byte used since this was last set to 0.
        self.recent_peak_bytes = 0

    def strong_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Uninitialised memory for a tensor that looks like ``tensor``; reserves its block."""
        return self.strong(tensor.shape, tensor.stride(), tensor.dtype)

    def strong(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Uninitialised memory for a tensor of this shape, strides and type; reserves its block."""
        span = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        start, end = self._allocate(span * dtype.itemsize)
        block = self._block(start, end)
        self._watches[start] = weakref.ref(block, lambda _: self._released.append((start, end)))
        storage = torch.frombuffer(block, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=dtype).set_(storage, 0, shape, stride)

    def weak(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of the same bytes that does not reserve them.

        It covers its own block only: an operator that resizes its output gets an error instead of
        its neighbours' memory.
        """
        storage = tensor.untyped_storage()
        start = storage.data_ptr() - self._base
        key = (start, start + storage.nbytes())
        if key not in self._unreserved:
            block = self._block(*key)
            self._unreserved[key] = torch.frombuffer(block, dtype=torch.uint8).untyped_storage()
        return alias_of(tensor, self._unreserved[key], int(tensor.storage_offset()))

    def owns(self, tensor: torch.Tensor) -> bool:
        return self.contains(tensor.data_ptr())

    def contains(self, address: int) -> bool:
        return self._base <= address < self._base + self._limit

    @property
    def addresses(self) -> tuple[int, int]:
        """Its first address, and the end of its range."""
        return self._base, self._base + self._limit

    def _block(self, start: int, end: int) -> ctypes.Array[ctypes.c_char]:
        block = (ctypes.c_char * (end - start)).from_address(self._base + start)
        block._mapping = self._mapping  # type: ignore[attr-defined]  # keeps the memory alive
        return block

    def _allocate(self, num_bytes: int) -> tuple[int, int]:
        self._collect_released()
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        for index, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[index : index + 1] = [(start + size, end)] if end - start > size else []
                self.recent_peak_bytes = max(self.recent_peak_bytes, start + size)
                return start, start + size
        # Nothing fits: grow, starting at the last free range if it touches the top.
        start = self._top
        if self._free and self._free[-1][1] == self._top:
            start = self._free.pop()[0]
        if start + size > self._limit:
            self._insert_free(start, self._top)
            raise CaptureOutOfMemoryError(
                f"the graph pool needs {size:,} more bytes in addition to {start:,}, beyond the "
                f"machine's {self._limit:,}; capture smaller sizes"
            )
        self._top = start + size
        self.peak_bytes = max(self.peak_bytes, self._top)
        self.recent_peak_bytes = max(self.recent_peak_bytes, self._top)
        return start, self._top

    def _collect_released(self) -> None:
        while self._released:
            start, end = self._released.popleft()
            del self._watches[start]
            self._insert_free(start, end)

    def _insert_free(self, start: int, end: int) -> None:
        if start == end:
            return
        insort(self._free, (start, end))
        index = self._free.index((start, end))
        if index + 1 < len(self._free) and self._free[index + 1][0] == end:
            end = self._free.pop(index + 1)[1]
        if index and self._free[index - 1][1] == start:
            index -= 1
            start = self._free[index][0]
            self._free.pop(index + 1)
        self._free[index] = (start, end)

    def trim(self, keep: int) -> None:
        """Return pages above ``keep`` bytes to the system, unless a block reserves them."""
        self._collect_released()
        if self._free and self._free[-1][1] == self._top:
            self._top = self._free.pop()[0]
        keep = max(keep, self._top)
        start = -(-keep // mmap.PAGESIZE) * mmap.PAGESIZE
        end = -(-self.peak_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if end > start and self._mapping is not None:
            self._mapping.madvise(mmap.MADV_DONTNEED, start, end - start)
        self.peak_bytes = min(self.peak_bytes, keep)

    def close(self) -> None:
        """Release the memory; tensors that refer to it keep it alive. Allocates nothing."""
        self._mapping = None
        self._watches.clear()
        self._released.clear()
        self._unreserved.clear()
        self._free.clear()
        self._limit = self._top = self.peak_bytes = self.recent_peak_bytes = 0


def _reserve(num_bytes: int) -> mmap.mmap:
    """Reserve addresses, not memory. If address space is limited, reserve a smaller range."""
    smallest = 1 << 26
    while True:
        try:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            return mmap.mmap(-1, num_bytes, flags=flags)
        except (OSError, ValueError) as error:
            if num_bytes <= smallest:
                raise CaptureOutOfMemoryError(
                    f"cannot reserve {num_bytes:,} bytes of address space for the graph pool: "
                    f"{error}"
                ) from error
            num_bytes //= 2
