"""Tile configs for shapes that the shipped table does not have, against the best of many.

A layer's GEMMs run in the order of a decode step: with the configs that a first start measures,
with those that the model of the hardware chooses, with torch, and with the fastest of a random
sample of all configs.

    PYTHONPATH=src python benchmarks/untuned_shapes.py --output untuned.json
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ostinato.bench.timing.measure import machine
from ostinato.ops.gemm.measuring import StepGemm, compile_all, measure_step
from ostinato.ops.gemm.tile_config import (
    GemmChoice,
    Gpu,
    LinearShape,
    TileConfig,
    candidates,
    default_choice,
    gpu_of,
)
from ostinato.ops.gemm.tune_linears import Weights, choose, step_before, tune_linears
from ostinato.ops.gemm.tuning import Tuning

SHAPES = {  # hidden, queries, keys, MLP
    "phi-4-mini": (3072, 3072, 1024, 8192),
    "qwen2.5-7b": (3584, 3584, 512, 18944),
    "smollm3-3b": (2048, 2048, 512, 11008),
    "mistral-nemo-12b": (5120, 4096, 1024, 14336),
    "granite-3.3-2b": (2048, 2048, 512, 8192),
}
ROWS = (1, 4, 32)
SAMPLE = 14
LAYERS = 4

Choices = Mapping[LinearShape, GemmChoice]


def layer(hidden: int, queries: int, keys: int, mlp: int, rows: int) -> Weights:
    """QKV, output, gate and up, down, each with the weights of all layers."""
    gemms = (
        (queries + 2 * keys, hidden, True, False, False),
        (hidden, queries, False, False, True),
        (2 * mlp, hidden, True, True, False),
        (hidden, mlp, False, False, True),
    )
    weights = {}
    for n, k, *flags in gemms:
        shape = LinearShape(rows, n, k, torch.bfloat16, *flags)
        weights[shape] = [
            (torch.randn(n, k, device="cuda") / k**0.5).to(torch.bfloat16) for _ in range(LAYERS)
        ]
    return weights


def sampled_configs(rows: int) -> list[TileConfig]:
    if rows == 1:
        every = [
            TileConfig(n, k, warps, 1, 1, prefetch)
            for n, k, warps, prefetch in product(
                (1, 2, 4, 8), (512, 1024, 2048, 4096), (2, 4, 8), (0, 1)
            )
            if 512 * warps <= n * k <= 16384
        ]
    else:
        every = [
            TileConfig(*config)
            for config in product(
                (16, 32, 64, 128), (64, 128, 256), (4, 8), (3, 4, 6), (1, 2, 4), (0, 2)
            )
        ]
    return random.sample(every, SAMPLE)


def best_choices(weights: Weights, begin: Choices, gpu: Gpu) -> Choices:
    """The fastest of a sample, GEMM by GEMM, each amid the best of the others so far."""
    best = dict(begin)
    options = {
        shape: [
            StepGemm(shape, choice, each)
            for choice in dict.fromkeys(
                [*sampled_configs(shape.num_rows), *candidates(shape, gpu), begin[shape], "torch"]
            )
        ]
        for shape, each in weights.items()
    }
    for _ in compile_all([gemm for gemms in options.values() for gemm in gemms]):
        pass
    for shape, gemms in options.items():
        before = [
            StepGemm(other, best[other], each)
            for other, each in step_before(shape, weights).items()
        ]
        best[shape] = choose(before, gemms, measure_step) or "torch"
    return best


def time_layer(weights: Weights, choices: Choices) -> float:
    """Microseconds."""
    step = [StepGemm(shape, choices[shape], each) for shape, each in weights.items()]
    return median(measure_step(step) for _ in range(5))


def measure(name: str, rows: int, gpu: Gpu) -> dict[str, Any]:
    weights = layer(*SHAPES[name], rows)
    with tempfile.TemporaryDirectory() as directory:
        known = Tuning(Path(directory) / "linear.json", {})
        begin = time.perf_counter()
        tune_linears(weights, gpu=gpu, known=known)
        seconds = time.perf_counter() - begin
    chosen = {shape: known.choice(shape, gpu) for shape in weights}
    best = best_choices(weights, chosen, gpu)
    model = {shape: default_choice(shape, gpu) for shape in weights}
    row = {
        "shape": name,
        "rows": rows,
        "chosen_us": time_layer(weights, chosen),
        "best_us": time_layer(weights, best),
        "model_us": time_layer(weights, model),
        "torch_us": time_layer(weights, dict.fromkeys(weights, "torch")),
        "tuning_s": seconds,
    }
    return {**row, "over_best": row["chosen_us"] / row["best_us"] - 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    random.seed(0)
    gpu = gpu_of(torch.device("cuda", 0))
    rows = []
    for num_rows, name in product(ROWS, SHAPES):
        rows.append(measure(name, num_rows, gpu))
        print(rows[-1], flush=True)
    if options.output is not None:
        result = {
            "command": "python benchmarks/untuned_shapes.py",
            "machine": machine(),
            "rows": rows,
        }
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
