"""Measures the GEMMs of a decode step that are not known yet, and remembers the fastest choices.

Decides what is compared, and amid which other GEMMs. How a time is taken is in
``ops.gemm.measuring``, what is known in ``ops.gemm.tuning``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from ostinato.ops.gemm import measuring
from ostinato.ops.gemm.measuring import StepGemm
from ostinato.ops.gemm.tile_config import (
    MAX_ROWS,
    GemmChoice,
    Gpu,
    LinearShape,
    candidates,
    gpu_of,
)
from ostinato.ops.gemm.tuning import Tuning, tuning
from ostinato.progress import ProgressBar

logger = logging.getLogger(__name__)

Weights = Mapping[LinearShape, Sequence[torch.Tensor]]
Measure = Callable[[Sequence[StepGemm]], float]
Compile = Callable[[Sequence[StepGemm]], Iterable[None]]


def tune_linears(
    weights: Weights,
    *,
    gpu: Gpu | None = None,
    known: Tuning | None = None,
    measure: Measure | None = None,
    compile_all: Compile | None = None,
    num_candidates: int = 5,
    again: bool = False,
    show_progress: bool = False,
) -> None:
    """Measure the shapes that are not known yet, and save the results. Not in a capture.

    ``again``: all but those of the shipped table, because a start compared few candidates.
    ``weights`` has the shapes in the order of a decode step, each with its weights in all layers,
    so that none is in the GPU's cache when it is used. The ``num_candidates`` most promising tile
    configs of a shape are compared with each other and with torch, amid the other GEMMs of the
    step: what a kernel prefetches, and the room it leaves on an SM, affect its neighbours.
    Synchronises.
    """
    known = tuning() if known is None else known
    gpu = gpu_of(torch.device("cuda", torch.cuda.current_device())) if gpu is None else gpu
    options: dict[str, list[StepGemm]] = {}
    for shape, each in weights.items():
        if not 1 <= shape.num_rows <= MAX_ROWS:
            continue  # always torch
        key = shape.key(gpu.name)
        is_known = known.is_shipped(key) if again else known.get(key) is not None
        if key not in options and not is_known:
            choices: list[GemmChoice] = [*candidates(shape, gpu)[:num_candidates], "torch"]
            options[key] = [StepGemm(shape, choice, each) for choice in choices]
    if not options:
        return
    if measure is None or compile_all is None:
        measure, compile_all = measuring.measure_step, measuring.compile_all
    every = [each for gemms in options.values() for each in gemms]
    compiled = compile_all(every)
    for _ in ProgressBar(compiled, "compiling GEMMs", len(every), disable=not show_progress):
        pass
    found: dict[str, GemmChoice] = {}
    failed: set[str] = set()
    for key, gemms in ProgressBar(options.items(), "measuring GEMMs", disable=not show_progress):
        before = [
            StepGemm(shape, found.get(shape.key(gpu.name)) or known.choice(shape, gpu), each)
            for shape, each in step_before(gemms[0].shape, weights).items()
        ]
        choice = choose(before, gemms, measure)
        found[key] = choice or "torch"
        if choice is None:
            failed.add(key)
    known.remember(found, unsaved=failed)


def step_before(shape: LinearShape, weights: Weights) -> Weights:
    """The GEMMs since the last one of ``shape``: those of a layer, in order, with as many rows.

    A head, which is not in every layer, follows a whole layer.
    """
    most = max(map(len, weights.values()))  # more than layers, if a layer has a shape twice
    layer = [
        each
        for each, of_layers in weights.items()
        if each.num_rows == shape.num_rows and 2 * len(of_layers) >= most
    ]
    if shape in layer:
        index = layer.index(shape)
        layer = layer[index + 1 :] + layer[:index]
    return {each: weights[each] for each in layer}


def choose(
    before: Sequence[StepGemm], options: Sequence[StepGemm], measure: Measure
) -> GemmChoice | None:
    """The choice among ``options`` that is fastest, each after the GEMMs ``before``.

    Options that do not run on this GPU are skipped. None if only torch runs: that tells more about
    a missing compiler or a full disk than about the GPU.
    """
    times: dict[GemmChoice, float] = {}
    problem: Exception | None = None
    for option in options:
        try:
            times[option.choice] = measure([*before, option])
        except Exception as error:  # too little shared memory, or a compiler error
            if option.choice == "torch":
                raise
            problem = error
            logger.debug("%s cannot use %s here: %s", option.shape, option.choice, error)
    if problem is not None and times.keys() <= {"torch"}:
        logger.warning(
            "torch runs %s in this process, because none of our kernels does (%s: %s); the next "
            "process will measure again",
            options[0].shape,
            type(problem).__name__,
            problem,
        )
        return None
    return min(times, key=times.__getitem__)
