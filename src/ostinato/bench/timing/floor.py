"""The floor of a decode step: the bytes that it must read over the bandwidth of a plain read.

Every step reads all weights once, whatever the batch, and the keys and values of every sequence. A
step that reads them from memory cannot be faster; the distance to the floor shows what is left to
gain. Both numbers are measured, the bandwidth in the same run as the steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ostinato.attention.base import AttentionSpec
from ostinato.models.base import CausalLM
from ostinato.models.native.decoder import Decoder

# Far larger than any cache. Reading 4 GiB takes a millisecond on a GPU.
_CUDA_BYTES, _CPU_BYTES = 4 * 2**30, 256 * 2**20
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def measure_bandwidth(device: torch.device) -> dict[str, Any]:
    """Bytes per second of the fastest of several plain reads, each by its median.

    Allocates a large tensor, which stays in torch's cache until that is emptied.
    """
    num_bytes, repeats = (_CUDA_BYTES, 15) if device.type == "cuda" else (_CPU_BYTES, 5)
    # Noise, like weights: zeros are read a little faster.
    singles = torch.randn(num_bytes // 4, device=device)
    doubles = singles.view(torch.float64)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "sum, float32": lambda: singles.sum(),
        "sum, float64": lambda: doubles.sum(),
        "sums of rows, float32": lambda: singles.view(-1, 4096).sum(dim=1),
        "sums of rows, float64": lambda: doubles.view(-1, 8192).sum(dim=1),
        "largest of rows, int64": lambda: singles.view(torch.int64).view(-1, 8192).amax(dim=1),
    }
    rates = {}
    for name, way in ways.items():
        seconds = [_seconds(way, device) for _ in range(repeats + 1)][1:]  # the first one warms up
        rates[name] = num_bytes / statistics.median(seconds)
    best = max(rates, key=lambda name: rates[name])
    return {"bytes_per_s": rates[best], "way": best, "num_bytes": num_bytes, "ways": rates}


def _seconds(way: Callable[[], torch.Tensor], device: torch.device) -> float:
    if device.type == "cpu":
        started = time.perf_counter()
        way()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    way()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def weight_bytes(model: CausalLM, config: Any) -> int | None:
    """Bytes of weights that a decode step reads; None if that depends on the tokens.

    Counts every parameter once. An embedding table counts only if it is also the head, since a step
    looks up just one row of it per sequence. ``config`` is transformers': in a mixture of experts
    the weights that are read depend on the tokens.
    """
    if any((getattr(config, name, None) or 0) > 1 for name in _EXPERTS):
        return None
    module: Any = model.module
    tables = {
        id(part.weight): part.weight for part in module.modules() if isinstance(part, nn.Embedding)
    }
    linear = {id(part.weight) for part in module.modules() if isinstance(part, nn.Linear)}
    skipped = set(tables) - linear
    if isinstance(module, Decoder) and module.lm_head is None:  # the table is the head
        skipped = set()
    return sum(int(p.nbytes) for p in module.parameters() if id(p) not in skipped)


def kv_bytes(specs: Sequence[AttentionSpec], dtype: torch.dtype, context: range) -> float:
    """Bytes of keys and values that one sequence reads per step, averaged over ``context``.

    ``context``: the number of keys that each step attends to. A windowed layer reads at most its
    window.
    """
    total = 0.0
    for spec in specs:
        limit = spec.window if spec.window is not None else context[-1]
        keys = statistics.mean(min(count, limit) for count in context)
        total += keys * spec.num_kv_heads * spec.cached_dim * dtype.itemsize
    return total
