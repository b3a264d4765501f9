"""What a launch of a kernel depends on beside its tensors: facts about the device."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


@cache
def can_overlap(device: torch.device) -> bool:
    """Whether one kernel may begin before the last is done: from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def overlap(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch for a kernel that takes OVERLAP (programmatic dependent launch)."""
    return {"OVERLAP": True, "launch_pdl": True} if can_overlap(device) else {"OVERLAP": False}


@cache
def num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
