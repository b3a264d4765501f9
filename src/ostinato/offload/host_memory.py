"""Host memory that a GPU can copy from at the speed of the bus, while it computes."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from functools import partial
from typing import Any

import torch

from ostinato.errors import ModelLoadError
from ostinato.graphs.backends.cuda.device import capture_device


def host_memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Uninitialised bytes in pages of their own, pinned if ``device`` is a GPU.

    Not torch's pinned memory: that rounds every size up to a power of 2.
    """
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block = (ctypes.c_char * num_bytes).from_buffer(pages)
    memory = torch.frombuffer(block, dtype=torch.uint8)
    if device.type == "cuda":
        _pin(block, pages, memory.data_ptr(), device)
    return memory


def _pin(block: Any, pages: mmap.mmap, address: int, device: torch.device) -> None:
    """Pin ``pages`` until the last tensor in ``block`` is gone."""
    if hasattr(mmap, "MADV_DONTFORK"):  # a write after a fork would move the page elsewhere
        pages.madvise(mmap.MADV_DONTFORK)
    runtime: Any = torch.cuda.cudart()
    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.cuda.device(index):
        status = int(runtime.cudaHostRegister(address, len(pages), 0))
    if status:
        raise ModelLoadError(
            f"{len(pages) / 2**30:.2f} GiB of host memory cannot be pinned for {device} (CUDA "
            f"error {status}); offload fewer layers, or free some memory"
        )
    # Not during a capture, which it would break; until then it keeps the pages.
    unpin = partial(_unpin, runtime, address, pages)
    finalizer = weakref.finalize(block, capture_device(torch.device("cuda", index)).dispose, unpin)
    finalizer.atexit = False


def _unpin(runtime: Any, address: int, pages: mmap.mmap) -> None:
    assert not pages.closed
    runtime.cudaHostUnregister(address)
