"""Plants faults in a small model's graphs, one by one, and checks that ``verify`` names each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ostinato.config import GraphConfig
from ostinato.graphs.policy.descriptor import Reason
from ostinato.graphs.policy.modes import ModeName
from ostinato.graphs.trust.shadow.report import Cause, Mismatch
from ostinato.graphs.wrapper import CUDAGraphWrapper
from ostinato.llm import LLM
from ostinato.models.native.decoder import Decoder
from ostinato.runner.model_graphs import Forward
from ostinato.sampling_params import SamplingParams

_LOGGER = "ostinato.graphs.trust.shadow.shadow"
_STRENGTH = 2**-6  # of faults that mix rows
_MODES: tuple[ModeName, ...] = ("FULL_AND_FULL", "PIECEWISE")


# Memory that graphs still refer to. It is not freed: on a GPU, a graph that writes to memory that
# was given to other tensors would break them, and with them the process.
Kept = list[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class PlantedFault:
    """A fault, how it is planted in an ``LLM`` whose graphs are captured, and its cause.

    ``plant`` returns the memory that must outlive the ``LLM``.

    ``in_forward``: it is in the model's code, so that graphs are captured again and compared then.
    Otherwise it comes up in service. ``in_attention``: graphs that are split at attention do not
    contain it.
    """

    name: str
    cause: Cause
    plant: Callable[[LLM], Kept]
    in_forward: bool = False
    in_attention: bool = False


@dataclass(frozen=True, kw_only=True)
class FaultResult:
    """The outcome of one planted fault.

    ``mode``: of the graphs. ``mismatches``: what was reported. ``named``: every report names its
    cause. ``serves_on``: the requests ended, eagerly where a graph was quarantined.
    """

    fault: str
    mode: str
    mismatches: list[Mismatch]
    named: bool
    serves_on: bool

    @property
    def passed(self) -> bool:
        """Whether the fault was found, named, and survived."""
        return bool(self.mismatches) and self.named and self.serves_on


def _move_parameter(llm: LLM) -> Kept:
    """A reload that gives a parameter other memory."""
    model = llm.engine.model
    assert isinstance(model, Decoder), "the small model is"
    weight = next(each for each in model.layers[1].parameters() if each.dim() == 2)
    old = weight.data
    weight.data = old.flip(0).contiguous()
    return [old]


def _move_kv_cache(llm: LLM) -> Kept:
    """The cache of one layer is allocated again."""
    layers = llm.engine.runner.kv_cache.layers
    keys, values = layers[1]
    layers[1] = keys.clone(), values.clone()
    return [keys, values]


def _with_forward(change: Callable[[Forward], Forward]) -> Callable[[LLM], Kept]:
    """Replace the model's forward, and capture its graphs again."""

    def plant(llm: LLM) -> Kept:
        runner = llm.engine.runner
        wrapper = runner.graphs.piecewise
        assert isinstance(wrapper, CUDAGraphWrapper)
        wrapper.runnable = change(wrapper.runnable)
        runner.graphs.clear_graphs()
        runner.capture_model()
        return []

    return plant


def _bake_host_value(llm: LLM) -> Kept:
    """A number that the forward reads from Python changes after the capture."""
    value = [1.0]

    def change(forward: Forward) -> Forward:
        return lambda ids, positions: forward(ids, positions) + value[0]

    kept = _with_forward(change)(llm)
    value[0] = 2.0
    return kept


def _leak_padding(forward: Forward) -> Forward:
    """Every row gets a little of all rows' mean, padding included."""

    def leaking(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = forward(ids, positions)
        return hidden + _STRENGTH * hidden.nan_to_num().mean(0, keepdim=True)

    return leaking


def _mix_rows(forward: Forward) -> Forward:
    """Every row gets a little of the rows before it, and so nothing of the padding behind it."""

    def mixing(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = forward(ids, positions)
        return hidden + _STRENGTH * hidden.cumsum(0)

    return mixing


FAULTS = (
    PlantedFault(name="a moved parameter", cause=Cause.MOVED_MEMORY, plant=_move_parameter),
    PlantedFault(
        name="a stale KV pointer",
        cause=Cause.MOVED_MEMORY,
        plant=_move_kv_cache,
        in_attention=True,
    ),
    PlantedFault(name="a host value baked in", cause=Cause.HOST_VALUE, plant=_bake_host_value),
    PlantedFault(
        name="a padding leak",
        cause=Cause.PADDING,
        plant=_with_forward(_leak_padding),
        in_forward=True,
    ),
    PlantedFault(
        name="a kernel whose result depends on the batch",
        cause=Cause.BATCH,
        plant=_with_forward(_mix_rows),
        in_forward=True,
    ),
)


def self_test(
    device: str = "auto", *, dtype: str = "auto", modes: tuple[ModeName, ...] = _MODES
) -> list[FaultResult]:
    """Plant every fault in a small model with random weights, and report what ``verify`` found.

    ``device`` and ``dtype``: as for ``LLM``. ``modes``: the graph modes to try each of them in.
    """
    return [
        _try(fault, device, dtype, mode)
        for mode in modes
        for fault in FAULTS
        if not (fault.in_attention and mode == "PIECEWISE")
    ]


def _try(fault: PlantedFault, device: str, dtype: str, mode: ModeName) -> FaultResult:
    kept: Kept = []
    with (
        _expected_errors_unlogged(),
        LLM(
            model="tiny",
            random_weights=True,
            device=device,
            dtype=dtype,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=64,
            kv_cache_memory_bytes=2**22,
            graphs=GraphConfig(mode=mode, capture_sizes=[4, 8, 32]),
            verify="capture" if fault.in_forward else "sample:1",
            show_progress=False,
        ) as llm,
    ):
        kept += fault.plant(llm)
        prompts = [list(range(3 + number, 8 + 4 * number)) for number in range(3)]
        outputs = llm.generate(
            prompts, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        )
        mismatches = llm.verification.mismatches
        return FaultResult(
            fault=fault.name,
            mode=mode,
            mismatches=list(mismatches),
            named=all(each.finding.cause is fault.cause for each in mismatches),
            serves_on=all(len(each.outputs[0].token_ids) == 4 for each in outputs)
            and (not mismatches or llm.engine.runner.stats.eager[Reason.QUARANTINED] > 0),
        )


@contextmanager
def _expected_errors_unlogged() -> Iterator[None]:
    """Planted mismatches are results here, not errors."""
    logger = logging.getLogger(_LOGGER)
    outer, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = outer
