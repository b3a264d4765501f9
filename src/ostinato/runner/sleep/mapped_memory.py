"""``MappedMemory``: a range of addresses that keeps its place while its memory comes and goes."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod

import torch


class MappedMemory(ABC):
    """Memory at one address for life; ``bytes`` is all of it, and must not be used while unmapped.

    Mapping or unmapping twice is harmless, so that what Ctrl-C interrupted can be done again.
    Tensors over ``bytes`` keep the addresses, and what is mapped there, after the object is gone.
    """

    bytes: torch.Tensor

    @abstractmethod
    def unmap(self) -> None:
        """Give the memory back, when the device has done all its work. What it held is lost."""

    @abstractmethod
    def map(self) -> None:
        """Have memory, filled with zeros. Raises MemoryError if there is none."""


class MappedHostMemory(MappedMemory):
    """Private pages of the host. Unmapped pages cost nothing; reading one gives zeros."""

    def __init__(self, num_bytes: int) -> None:
        # Shared ones, the default, would keep their pages.
        self._pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = torch.frombuffer(self._pages, dtype=torch.uint8)

    def unmap(self) -> None:
        self._pages.madvise(mmap.MADV_DONTNEED)

    def map(self) -> None:
        """Pages come back, as zeros, when they are first used."""
