"""Times the kernels of a mixture of experts: one layer's router, experts and combine.

The shape is that of Qwen3-30B-A3B. Four layers with their own weights run in one CUDA graph, so
that no weight is left in L2 from the previous replay. The floor is what must be read: the weights
of the experts that were chosen, over 4.39 TB/s; and for large batches what must be computed, over
790 TFLOP/s.

    PYTHONPATH=src python benchmarks/experts_kernels.py
    PYTHONPATH=src python benchmarks/experts_kernels.py --profile 4   # kernel by kernel
    PYTHONPATH=src python benchmarks/experts_kernels.py --sweep 32    # other tile configs
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from itertools import product
from typing import Any

import torch

from ostinato.ops.experts import expert_kernels
from ostinato.ops.experts.expert_kernels import down_row, expert_parts, gate_up_row
from ostinato.ops.experts.expert_tiles import ExpertTiles
from ostinato.ops.experts.experts import Mixture
from ostinato.ops.experts.routing import RouterOptions
from ostinato.ops.gemm.linear import Norm
from ostinato.ops.norm import add_rms_norm
from ostinato.ops.triton.compile_ahead import compiling_ahead
from ostinato.ops.triton.counters import shared_counters

NUM_TOKENS = (1, 4, 16, 32, 64, 256, 2048, 8192)
LAYERS = 4
BANDWIDTH, FLOPS = 4.39e12, 790e12
FUSED_NORM_ROWS = 64  # a decode step's router applies the norm itself


class Layers:
    """Mixtures with random weights, run one after another as a model would."""

    def __init__(self, experts: int, top_k: int, hidden: int, width: int) -> None:
        self.hidden, self.width, self.top_k = hidden, width, top_k
        self.norm = Norm(_draw(hidden, scale=1.0), 1e-6)
        self.mixtures = [
            Mixture(
                options=RouterOptions(top_k=top_k),
                router=_draw(experts, hidden),
                gate_up=_draw(experts, 2 * width, hidden),
                down=_draw(experts, hidden, width),
                load=torch.zeros(experts, device="cuda", dtype=torch.int64),
            )
            for _ in range(LAYERS)
        ]

    def run(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        norm = self.norm if x.shape[0] <= FUSED_NORM_ROWS else None
        for mixture in self.mixtures:
            if x.shape[0] == 1:
                x = down_row(gate_up_row(x, mixture, slots, norm), x)
            else:
                parts = expert_parts(x, mixture, slots, norm)
                _, x = add_rms_norm(parts, x, self.norm.weight, self.norm.eps)
        return x

    def bytes_read(self) -> float:
        """Of one layer, on average, in the run since ``load`` was last zero."""
        chosen = sum(int((mixture.load > 0).sum()) for mixture in self.mixtures) / LAYERS
        return chosen * 3 * self.hidden * self.width * 2

    def flops(self, num_tokens: int) -> float:
        return num_tokens * self.top_k * 6 * self.hidden * self.width


def _draw(*shape: int, scale: float = 0.02) -> torch.Tensor:
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(0.0, scale)


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), shared_counters(torch.device("cuda", 0)):
        run()
    return graph


def microseconds(graph: torch.cuda.CUDAGraph, repeats: int = 15) -> float:
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / LAYERS)
    return statistics.median(times)


def profile(run: Callable[[], object]) -> None:
    """Kernel by kernel, eagerly; overlap makes some look longer than they are."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    with torch_profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(5):
            run()
        torch.cuda.synchronize()
    print(recorded.key_averages().table(sort_by="cuda_time_total", row_limit=12))


def sweep(layers: Layers, x: torch.Tensor, slots: torch.Tensor) -> None:
    """The layer's time with other tile configs of one GEMM, the other one's as they are."""
    chosen = expert_kernels.expert_tiles
    block_m = expert_kernels.block_rows(x.shape[0] * layers.top_k, 128)
    tried: list[tuple[bool, ExpertTiles]] = []
    for gated, block_n, block_k, num_warps in product(
        (True, False), (32, 64, 128, 256), (64, 128), (4, 8)
    ):
        bytes_per_k = 2 * ((2 if gated else 1) * block_n + block_m)
        for room in (48, 72, 110, 200):
            stages = min(room * 1024 // (block_k * bytes_per_k), 7)
            config = ExpertTiles(block_n, block_k, num_warps, stages, 2)
            accumulators = (2 if gated else 1) * block_n * block_m // (32 * num_warps)
            if stages >= 2 and accumulators <= 128 and (gated, config) not in tried:
                tried.append((gated, config))

    def use(which: bool, config: ExpertTiles) -> None:
        def tiles(*args: Any, gated: bool, **options: Any) -> ExpertTiles:
            return config if gated is which else chosen(*args, gated=gated, **options)

        expert_kernels.expert_tiles = tiles

    with compiling_ahead(show_progress=True):
        for each in tried:
            use(*each)
            layers.run(x, slots)
    times = []
    for each in tried:
        use(*each)
        layers.run(x, slots)
        graph = captured(lambda: layers.run(x, slots))
        microseconds(graph, 2)
        times.append((microseconds(graph, 7), each))
    expert_kernels.expert_tiles = chosen
    for which in (True, False):
        print("gate and up" if which else "down", f"BLOCK_M {block_m}")
        ranked = sorted((time, config) for time, (gated, config) in times if gated is which)
        for time, config in ranked[:6]:
            print(f"  {time:9.1f} us  {config}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", type=int, help="a number of tokens to profile, and no table")
    parser.add_argument("--sweep", type=int, help="a number of tokens to try tile configs for")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    layers = Layers(experts=128, top_k=8, hidden=2048, width=768)
    only = arguments.profile or arguments.sweep
    sizes = NUM_TOKENS if only is None else (only,)
    inputs = {size: (_draw(size, 2048, scale=1.0), torch.arange(size).cuda()) for size in sizes}
    if arguments.sweep is not None:
        sweep(layers, *inputs[arguments.sweep])
        return
    with compiling_ahead():
        for x, slots in inputs.values():
            layers.run(x, slots)
    print(
        f"{'tokens':>6} {'us/layer':>9} {'floor us':>9} {'TB/s':>6} {'TFLOP/s':>8} {'of floor':>8}"
    )
    for size, (x, slots) in inputs.items():
        for mixture in layers.mixtures:
            assert mixture.load is not None
            mixture.load.zero_()
        layers.run(x, slots)
        num_bytes = layers.bytes_read()
        if arguments.profile is not None:
            profile(lambda x=x, slots=slots: layers.run(x, slots))
            continue
        graph = captured(lambda x=x, slots=slots: layers.run(x, slots))
        microseconds(graph, 3)
        took = microseconds(graph)
        floor = max(num_bytes / BANDWIDTH, layers.flops(size) / FLOPS) * 1e6
        rate, flops = num_bytes / took / 1e6, layers.flops(size) / took / 1e6
        print(f"{size:6} {took:9.1f} {floor:9.1f} {rate:6.2f} {flops:8.1f} {floor / took:8.0%}")


if __name__ == "__main__":
    main()
