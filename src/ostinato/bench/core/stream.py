"""A stream of random batch sizes through one small transformer, one contestant per process.

Run as ``python -m ostinato.bench.core.stream NAME``; prints one JSON line. Processes are separate
so that one contestant's memory peak, compiled code and warm caches do not affect another.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ostinato.bench.models import Encoder
from ostinato.graphs.graphed import graphed
from ostinato.graphs.policy.sizes import padding_table

NUM_BATCHES = 1000
LARGEST = 64
TOKENS, WIDTH = 16, 512
SIZES = [1, 2, 4, *range(8, LARGEST + 1, 8)]

Model = Callable[[torch.Tensor], torch.Tensor]


def _eager(model: Model) -> Model:
    return model


def _compiled(model: Model) -> Model:
    # The documented way to run many shapes under CUDA graphs without hitting the recompile limit.
    return torch.compile(model, mode="reduce-overhead", dynamic=True)


def _make_graphed_callables(model: Model) -> Model:
    """torch's helper takes one shape per callable, so padding and selection are added here."""
    device = torch.device("cuda")
    callables: dict[int, Any] = {}
    for size in reversed(SIZES):
        sample = torch.zeros(size, TOKENS, WIDTH, device=device, dtype=torch.bfloat16)
        callables[size] = torch.cuda.make_graphed_callables(lambda x: model(x), (sample,))
    index = padding_table(SIZES)

    def run(x: torch.Tensor) -> Any:
        rows = x.shape[0]
        size = SIZES[index[rows]]
        padded = F.pad(x, (0, 0, 0, 0, 0, size - rows)) if size != rows else x
        return callables[size](padded)[:rows]

    return run


def _graphed(model: Model) -> Model:
    return graphed(model, sizes=SIZES)


def _graphed_compiled(model: Model) -> Model:
    """The compiler fuses the kernels, without its own graphs; ours replay the result."""
    return graphed(torch.compile(model, dynamic=True), sizes=SIZES)


CONTESTANTS: dict[str, Callable[[Model], Model]] = {
    "eager": _eager,
    "torch.compile(reduce-overhead)": _compiled,
    "make_graphed_callables": _make_graphed_callables,
    "graphed()": _graphed,
    "graphed(torch.compile())": _graphed_compiled,
}


def measure(name: str) -> dict[str, Any]:
    """Run one contestant in this process."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    model = Encoder(width=WIDTH).to(device, torch.bfloat16).eval().requires_grad_(False)
    sizes = random.Random(0)
    batches = [
        torch.randn(sizes.randint(1, LARGEST), TOKENS, WIDTH, device=device, dtype=torch.bfloat16)
        for _ in range(NUM_BATCHES)
    ]
    with torch.no_grad():
        expected = [model(batch).float() for batch in batches[:20]]
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

        start = time.perf_counter()
        run = CONTESTANTS[name](model)
        _run_all(run, batches)
        first_pass = time.perf_counter() - start
        errors = [
            ((run(batch).float() - want).norm() / want.norm()).item()
            for batch, want in zip(batches, expected, strict=False)
        ]
        passes = [_timed(run, batches) for _ in range(5)]
    return {
        "name": name,
        "total_s": sorted(passes)[len(passes) // 2],
        "first_1000_s": first_pass,
        "peak_mib": (torch.cuda.max_memory_reserved() - held) / 2**20,
        "max_relative_error": max(errors),
    }


def _run_all(run: Model, batches: list[torch.Tensor]) -> None:
    for batch in batches:
        run(batch)
    torch.cuda.synchronize()


def _timed(run: Model, batches: list[torch.Tensor]) -> float:
    start = time.perf_counter()
    _run_all(run, batches)
    return time.perf_counter() - start


def measure_all() -> list[dict[str, Any]]:
    """Every contestant, each in a separate process."""
    results = []
    for name in CONTESTANTS:
        command = [sys.executable, "-m", "ostinato.bench.core.stream", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"contestant {name!r} failed:\n{done.stderr[-2000:]}")
        results.append(json.loads(done.stdout.splitlines()[-1]))
    return results


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(sys.argv[1])) + "\n")
