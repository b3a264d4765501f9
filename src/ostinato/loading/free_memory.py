"""How much memory a device has free, and whether a model fits into it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ostinato.errors import ModelLoadError

FreeMemory = Callable[[torch.device], int | None]


def free_memory(device: torch.device) -> int | None:
    """The free bytes on ``device``; None if unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + cached
    meminfo = Path("/proc/meminfo")
    if device.type != "cpu" or not meminfo.is_file():
        return None
    for line in meminfo.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def check_fit(
    what: str,
    needed: int,
    device: torch.device,
    dtype: torch.dtype,
    free_memory: FreeMemory = free_memory,
) -> None:
    """Raise if ``what``, of ``needed`` bytes, does not fit into the free memory of ``device``."""
    free = free_memory(device)
    if free is not None and needed > free:
        raise ModelLoadError(
            f"{what} needs {needed / 2**30:.2f} GiB in {dtype}, and {device} has "
            f"{free / 2**30:.2f} GiB free; free some, use a smaller dtype or a smaller model"
        )
