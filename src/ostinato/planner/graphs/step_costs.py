"""What steps of a model cost by their number of tokens: measured on its device, kept in a file."""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ostinato.errors import ConfigError
from ostinato.graphs.policy.descriptor import BatchDescriptor, Choice, Reason
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.sizes import check_positive_int
from ostinato.paths import writing
from ostinato.planner.communication import check_number
from ostinato.quoting import shown

if TYPE_CHECKING:
    from ostinato.config import EngineConfig
    from ostinato.llm import LLM
    from ostinato.runner.model_runner import ModelRunner

_UNREADABLE = (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError)

Points = tuple[tuple[int, float], ...]  # numbers of tokens, and seconds


@dataclass(frozen=True, kw_only=True)
class KindCosts:
    """Steps of one kind, decode or mixed: seconds through graphs and eagerly, by size.

    ``graph_seconds``: to capture a graph. ``graph_bytes``: of a graph, beside the pool.
    """

    replay: Points
    eager: Points
    graph_seconds: float
    graph_bytes: int

    def __post_init__(self) -> None:
        for name in ("replay", "eager"):
            points = getattr(self, name)
            sizes = [size for size, _ in points]
            if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
                raise ConfigError(
                    f"{name} needs measured sizes from 1 up, in ascending order; got {shown(sizes)}"
                )
            for _, seconds in points:
                check_number(f"seconds of {name}", seconds, above_zero=True)
        check_number("graph_seconds", self.graph_seconds)
        check_number("graph_bytes", self.graph_bytes)


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """The costs of a model on a device, and the limits of its steps.

    ``pool_bytes_per_token``: of the memory that graphs share, by the largest of them. ``model`` and
    ``machine``: what was measured, in words.
    """

    model: str
    machine: str
    max_num_seqs: int
    max_num_batched_tokens: int
    pool_bytes_per_token: float
    decode: KindCosts
    mixed: KindCosts

    def __post_init__(self) -> None:
        check_positive_int("max_num_seqs", self.max_num_seqs)
        check_positive_int("max_num_batched_tokens", self.max_num_batched_tokens)
        check_number("pool_bytes_per_token", self.pool_bytes_per_token)

    def write(self, path: Path) -> None:
        with writing(path):
            path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> StepCosts:
        """Read what ``write`` has written."""
        try:
            fields: Any = json.loads(path.read_text(encoding="utf-8"))
            for kind in ("decode", "mixed"):
                costs = fields[kind]
                for curve in ("replay", "eager"):
                    costs[curve] = tuple((int(n), float(seconds)) for n, seconds in costs[curve])
                fields[kind] = KindCosts(**costs)
            return cls(**fields)
        except _UNREADABLE as error:
            raise ConfigError(
                f"cannot read step costs from {str(path)!r}: {error!r}; measure them with "
                "`ostinato plan graphs --save-costs`"
            ) from error


def curve(points: Points) -> Callable[[int], float]:
    """The seconds between measured sizes by linear interpolation; beyond them as at the ends."""
    sizes = [size for size, _ in points]

    def seconds(num_tokens: int) -> float:
        index = bisect_left(sizes, num_tokens)
        if index == 0 or index == len(sizes):
            return points[min(index, len(sizes) - 1)][1]
        (before, low), (after, high) = points[index - 1], points[index]
        return low + (high - low) * (num_tokens - before) / (after - before)

    return seconds


def check_measurable(config: EngineConfig) -> None:
    """Raises ConfigError if an engine of ``config`` cannot run padding batches on its own."""
    if config.layout.world_size > 1 or config.data_parallel_lockstep:
        raise ConfigError(
            "the costs of steps are measured on one rank; measure without tensor_parallel_size, "
            "ulysses_sequence_parallel_size, decode_context_parallel_size and "
            "data_parallel_lockstep"
        )


@torch.inference_mode()
def measure(llm: LLM, *, repeats: int = 5) -> StepCosts:
    """Time padding batches of every captured size, and eager ones at powers of two.

    Attention of real tokens takes the same time in every size that holds them, so it is left out.
    Graphs of the plan that are not captured yet (``lazy_capture``) are captured first.
    """
    check_measurable(llm.config)
    runner = llm.engine.runner
    plan = runner.plan
    if not plan.mode.separate_routine() or plan.mode.mixed_mode() is CUDAGraphMode.NONE:
        raise ConfigError(
            "costs are measured for decode and mixed graphs, but graph mode "
            f"{plan.mode.name} does not have both; choose FULL_AND_PIECEWISE or FULL_AND_FULL"
        )
    if runner.needs_capture:
        llm.capture_graphs()
    replay: dict[bool, list[tuple[int, float]]] = {True: [], False: []}
    for entry in plan.entries:
        key = entry.descriptor
        if not key.has_lora and key.query_len in (None, 1):
            choice = Choice(
                mode=entry.mode,
                descriptor=key,
                reason=Reason.MIXED,
                uniform_decode=key.uniform,
                padded_num_reqs=key.num_reqs,
            )
            replay[key.uniform].append((key.num_tokens, _seconds(runner, choice, repeats)))
    for uniform, name in ((True, "decode"), (False, "mixed")):
        if not replay[uniform]:
            raise ConfigError(
                f"no sizes of {name} batches are captured, so their costs cannot be measured; "
                "leave capture_sizes and mixed_capture_sizes at their defaults"
            )
    eager = {
        uniform: tuple(
            (size, _seconds(runner, _eager_choice(size, uniform), repeats))
            for size in _powers_of_two(limit)
        )
        for uniform, limit in ((True, plan.max_num_seqs), (False, plan.max_num_batched_tokens))
    }
    decode, mixed = (
        KindCosts(
            replay=tuple(sorted(replay[uniform])),
            eager=eager[uniform],
            graph_seconds=_mean(runner, uniform, "seconds"),
            graph_bytes=int(_mean(runner, uniform, "executable_bytes")),
        )
        for uniform in (True, False)
    )
    largest = max(entry.descriptor.num_tokens for entry in plan.entries)
    device = runner.model.device
    return StepCosts(
        model=str(llm.config.model),
        machine=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        pool_bytes_per_token=runner.graph_memory.taken.pool / largest,
        decode=decode,
        mixed=mixed,
    )


def _eager_choice(num_tokens: int, uniform: bool) -> Choice:
    return Choice(
        mode=CUDAGraphMode.NONE,
        descriptor=BatchDescriptor.eager(num_tokens),
        reason=Reason.NOT_CAPTURED,
        uniform_decode=uniform,
        padded_num_reqs=num_tokens if uniform else None,
    )


def _powers_of_two(limit: int) -> Iterator[int]:
    size = 1
    while size < limit:
        yield size
        size *= 2
    yield limit


def _seconds(runner: ModelRunner, choice: Choice, repeats: int) -> float:
    """The median time of a padding batch, after one that is not timed."""
    runner.run_padding(choice)
    times = []
    for _ in range(repeats):
        _wait(runner.model.device)
        start = time.perf_counter()
        runner.run_padding(choice)
        _wait(runner.model.device)
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _mean(runner: ModelRunner, uniform: bool, name: str) -> float:
    reports = runner.capture_report.entries
    values: Sequence[float] = [
        getattr(each, name) for each in reports if each.entry.descriptor.uniform is uniform
    ]
    return sum(values) / max(len(values), 1)
