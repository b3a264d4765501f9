"""Measures GEMMs on the GPU under the conditions of a decode step.

In a CUDA graph, launches follow each other in the order of a step, each turn with the weights of
another layer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from statistics import median
from typing import Any, NamedTuple

import torch

from ostinato.ops.gemm.linear import Gemm, Norm, run_kernel, torch_linear
from ostinato.ops.gemm.tile_config import GemmChoice, LinearShape, row_class
from ostinato.ops.triton.counters import shared_counters

_MEASURED_ROWS = {1: 1, 8: 4, 16: 16, 32: 32, 64: 64}  # by row class
_COLD_BYTES = 200 << 20  # of weights between two uses of one: several times the L2 of a GPU
_MOST_TURNS = 24


class StepGemm(NamedTuple):
    """A GEMM of a decode step, with its weights in all layers."""

    shape: LinearShape
    choice: GemmChoice
    weights: Sequence[torch.Tensor]


def measure_step(step: Sequence[StepGemm]) -> float:
    """Microseconds of the GEMMs of ``step``, run one after the other. Synchronises."""
    runs = [_runner(gemm) for gemm in step]
    num_bytes = sum(gemm.weights[0].nbytes for gemm in step)
    turns = min(max(2, _COLD_BYTES // num_bytes), _MOST_TURNS)

    def run_all() -> None:
        for turn in range(turns):
            for gemm, run in zip(step, runs, strict=True):
                run(gemm.weights[turn % len(gemm.weights)])

    return time_in_graph(run_all, step[0].weights[0].device) / turns


def compile_all(gemms: Sequence[StepGemm]) -> Iterator[None]:
    """Run each once, on several threads: most of a kernel's compilation needs no Python.

    Yields whenever one is done. Those that fail do so again when they are measured. Not for torch,
    whose libraries take a workspace for every thread.
    """

    def compile_one(gemm: StepGemm) -> None:
        if gemm.choice != "torch":
            with suppress(Exception):
                _runner(gemm)(gemm.weights[0])

    with ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as threads:
        yield from threads.map(compile_one, gemms)


def _runner(step_gemm: StepGemm) -> Callable[[torch.Tensor], torch.Tensor]:
    """The GEMM as a function of the weight."""
    shape, choice, weights = step_gemm
    device = weights[0].device
    generator = torch.Generator(device=device).manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device, dtype=shape.dtype, generator=generator)

    rows = _MEASURED_ROWS[row_class(shape.num_rows)]
    x = draw(rows, shape.k)
    norm = Norm(draw(shape.k), 1e-5) if shape.norm else None
    residual = draw(rows, shape.outputs) if shape.residual else None

    def run(weight: torch.Tensor) -> torch.Tensor:
        gemm = Gemm(x, weight, norm=norm, gated=shape.gated, residual=residual)
        return torch_linear(gemm) if choice == "torch" else run_kernel(choice, gemm)

    return run


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all measurements: cuBLAS keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream(device)


def time_in_graph(run: Callable[[], Any], device: torch.device, *, replays: int = 9) -> float:
    """Median microseconds of replaying a graph of ``run``. Synchronises."""
    stream = _side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()  # compiles, and lets libraries allocate their workspaces
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # As in a step: a memset before each split-K launch would keep it from starting early.
        with shared_counters(device):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        times: list[float] = []
        for turn in range(replays + 2):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            graph.replay()
            end.record(stream)
            stream.synchronize()
            if turn >= 2:
                times.append(begin.elapsed_time(end) * 1e3)
    return median(times)
