"""Measures a GEMM on the GPU under the conditions of a decode step.

In a CUDA graph, launches follow each other, each with the weights of another layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from ostinato.ops.linear import Gemm, Norm, run_kernel, torch_linear
from ostinato.ops.tile_config import GemmChoice, LinearShape, row_class

_MEASURED_ROWS = {1: 1, 16: 8, 32: 32, 64: 64}  # by row class


def measure_linear(
    shape: LinearShape, choice: GemmChoice, weights: Sequence[torch.Tensor], *, launches: int = 24
) -> float:
    """Microseconds per GEMM, from a CUDA graph of at least ``launches`` over the weights."""
    device = weights[0].device
    rows = _MEASURED_ROWS[row_class(shape.num_rows)]
    generator = torch.Generator(device=device).manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device, dtype=shape.dtype, generator=generator)

    inputs = [draw(rows, shape.k) for _ in range(4)]
    norm_weight = draw(shape.k) if shape.norm else None
    residual = draw(rows, shape.outputs) if shape.residual else None
    rounds = -(-launches // len(weights))
    run = _runner(shape, choice, norm_weight, residual)

    def run_all() -> None:
        for turn in range(rounds * len(weights)):
            run(inputs[turn % len(inputs)], weights[turn % len(weights)])

    return time_in_graph(run_all, device) / (rounds * len(weights))


def _runner(
    shape: LinearShape,
    choice: GemmChoice,
    norm_weight: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    norm = None if norm_weight is None else Norm(norm_weight, 1e-5)

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        gemm = Gemm(x, weight, norm=norm, gated=shape.gated, residual=residual)
        return torch_linear(gemm) if choice == "torch" else run_kernel(choice, gemm)

    return run


def time_in_graph(run: Callable[[], Any], device: torch.device, *, replays: int = 9) -> float:
    """Median microseconds of replaying a graph of ``run``. Synchronises."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()  # compiles, and lets libraries allocate their workspaces
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
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
