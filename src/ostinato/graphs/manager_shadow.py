"""``verify`` of a manager: batches that run through their graph and eagerly, for ``Shadow``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch

from ostinato.errors import BatchError, ConfigError
from ostinato.graphs.capture.output_buffers import OutputBuffers
from ostinato.graphs.capture.pool import GraphPool
from ostinato.graphs.capture.segments import Tape
from ostinato.graphs.policy.descriptor import BatchDescriptor, Reason
from ostinato.graphs.policy.dispatch import Dispatcher
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.plan import PlanEntry
from ostinato.graphs.policy.verify import VerifyPolicy
from ostinato.graphs.prepared_batch import PreparedBatch, prepared, run_prepared
from ostinato.graphs.tree import leaves_with_path, without_padding
from ostinato.graphs.trust.effects import EffectsProbe
from ostinato.graphs.trust.ledger.owners import NamesMemory, by_name, memory_of
from ostinato.graphs.trust.shadow.call_log import CallLogging
from ostinato.graphs.trust.shadow.memory_names import name_among
from ostinato.graphs.trust.shadow.memory_part import (
    GeneratorPart,
    MemoryPart,
    StepPart,
    read_parts,
    write_parts,
)
from ostinato.graphs.trust.shadow.report import VerifyReport
from ostinato.graphs.trust.shadow.schedule import ShadowSchedule
from ostinato.graphs.trust.shadow.shadow import Shadow, ShadowedStep
from ostinato.quoting import shown


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Which batches of a manager are compared with eager runs, and what only their runner knows.

    ``policy``: "capture", "sample:RATE" or "capture,sample:RATE".

    ``poison(batch, num_tokens)`` writes other valid contents into the batch's padding rows, those
    from ``num_tokens`` on; they are put back. None: what padding does to real rows is not seen.
    ``trial(entry, num_tokens)`` prepares a batch of ``num_tokens`` that is padded to the entry's
    size, for the comparison at capture. None: ``prepare`` does, without padding.
    ``writes(batch, num_tokens)`` lists the memory that the forward writes for the real rows, and
    that outlives it: it is compared, and put back before the batch runs again. None: all memory
    that torch's operators write is copied whole, and compared unless ``poison`` is given.

    ``owners``: whose memory the forward uses, by name, for reports; as in ``ledger``. ``agree``:
    whether its argument is true on any of the ranks that run the batch together; None: one rank.
    """

    policy: str
    poison: Callable[[PreparedBatch[Any], int], None] | None = None
    trial: Callable[[PlanEntry, int], PreparedBatch[Any]] | None = None
    writes: Callable[[PreparedBatch[Any], int], Iterable[MemoryPart]] | None = None
    owners: Mapping[str, Any] | NamesMemory | None = None
    agree: Callable[[bool], bool] | None = None

    def __post_init__(self) -> None:
        VerifyPolicy.parse(self.policy)
        for name in ("poison", "trial", "writes", "agree"):
            hook = getattr(self, name)
            if hook is not None and not callable(hook):
                raise ConfigError(f"VerifyOptions.{name} must be a function, got {shown(hook)}")
        if self.owners is not None:
            by_name(self.owners)


@runtime_checkable
class HasTapes(Protocol):
    """A forward with one tape for each PIECEWISE batch: a wrapper."""

    def tape_of(self, descriptor: BatchDescriptor) -> Tape | None: ...


@dataclass(frozen=True, kw_only=True)
class BatchRun:
    """A ``batch`` of ``num_tokens`` in the padded shape of ``entry``, and what runs it.

    An ``entry`` of mode NONE runs eagerly.
    """

    forward: Callable[[Any], Any]
    entry: PlanEntry
    batch: PreparedBatch[Any]
    num_tokens: int

    def __post_init__(self) -> None:
        if not isinstance(self.batch, PreparedBatch):
            raise BatchError(
                f"the batch is a {type(self.batch).__name__}; pass an "
                "ostinato.PreparedBatch(inputs=...) with the inputs of the forward"
            )
        self.check_rows(self.num_tokens, self.entry.descriptor.num_tokens)

    @staticmethod
    def check_rows(num_tokens: int, size: int) -> None:
        """Raise unless a batch that is padded to ``size`` can have ``num_tokens``."""
        if not 1 <= num_tokens <= size:
            raise BatchError(
                f"{num_tokens} rows were requested from a graph of {size}; ask for 1 to {size}"
            )

    @property
    def is_full(self) -> bool:
        return self.entry.mode is CUDAGraphMode.FULL

    @property
    def tape(self) -> Tape | None:
        """What it replays under PIECEWISE, if that is one tape and all of the forward."""
        forward, key = self.forward, self.entry.descriptor
        return forward.tape_of(key) if isinstance(forward, HasTapes) else None

    def under(self, mode: CUDAGraphMode) -> Any:
        """Run the forward under ``mode``; returns the output without padding."""
        output = run_prepared(self.forward, self.batch, self.entry, mode)
        return without_padding(output, self.entry.descriptor.num_tokens, self.num_tokens)


@dataclass(frozen=True, kw_only=True)
class BothWays:
    """A batch that can run both ways, with what a graph does with it.

    ``replay`` returns its output. ``tape``: what it replays; None: more than one, or only a part
    of the forward. ``buffers``: the graph copies its output there; None: it stays in place.
    """

    run: BatchRun
    replay: Callable[[], Any]
    tape: Tape | None
    buffers: OutputBuffers | None

    def eager(self) -> Any:
        """Run it eagerly; returns the output without padding."""
        if self.buffers is None:
            return self.run.under(CUDAGraphMode.NONE)
        run = self.run
        output = run_prepared(run.forward, run.batch, run.entry, CUDAGraphMode.NONE)
        self.buffers.copy_in(output, run.entry.descriptor.num_tokens)
        return self.buffers.views(run.num_tokens)


class ManagerShadow:
    """Compares batches as ``options`` say, and has graphs that differ run eagerly."""

    def __init__(self, options: VerifyOptions, dispatcher: Dispatcher, pool: GraphPool) -> None:
        self.report = VerifyReport()
        self._options = options
        self._policy = VerifyPolicy.parse(options.policy)
        self._schedule = ShadowSchedule(self._policy)
        self._dispatcher = dispatcher
        self._pool = pool
        self._shadow = Shadow(
            pool, name_of=_Names(options.owners), agree=options.agree, report=self.report
        )

    @classmethod
    def of(
        cls, verify: str | VerifyOptions, dispatcher: Dispatcher, pool: GraphPool
    ) -> ManagerShadow | None:
        """``verify``: a policy, or options with one. None if it is "off"."""
        options = verify if isinstance(verify, VerifyOptions) else VerifyOptions(policy=verify)
        return cls(options, dispatcher, pool) if VerifyPolicy.parse(options.policy) else None

    def takes(self, entry: PlanEntry) -> bool:
        """Whether the next batch of the service, which runs as ``entry``, is compared; counts it.

        Mode NONE: it runs eagerly.
        """
        return self._schedule.takes(None if entry.mode is CUDAGraphMode.NONE else entry)

    def try_graphs(
        self,
        entries: Iterable[PlanEntry],
        forward: Callable[[Any], Any],
        prepare: Callable[[PlanEntry], PreparedBatch[Any]],
        both_ways: Callable[[BatchRun], BothWays],
    ) -> None:
        """Compare each of ``entries`` that is captured, if at all at capture; leaves no effects."""
        trial = self._options.trial
        for entry in entries if self._policy.at_capture else ():
            for num_tokens in self._trial_sizes(entry):
                if entry in self._dispatcher.captured:  # it has not differed yet
                    make = prepare if trial is None else _with_tokens(trial, num_tokens)
                    batch = prepared(make, entry)
                    run = BatchRun(forward=forward, entry=entry, batch=batch, num_tokens=num_tokens)
                    self.run(both_ways(run), at_capture=True)

    def _trial_sizes(self, entry: PlanEntry) -> Sequence[int]:
        """Tokens of the batches to compare: most padding first, then none."""
        key, plan = entry.descriptor, self._dispatcher.plan
        if self._options.trial is None:
            return [key.num_tokens]
        query_len = plan.query_len_of(key) if key.uniform else 1
        sizes = plan.decode_sizes_for(query_len) if key.uniform else plan.mixed_sizes
        smaller = max((size for size in sizes if size < key.num_tokens), default=0)
        return sorted({smaller + query_len, key.num_tokens})

    @torch.no_grad()
    def run(self, both: BothWays, *, at_capture: bool = False) -> Any:
        """Run a batch both ways, and quarantine its graph if it differs; returns its output."""
        outputs: list[Any] = []
        try:
            parts = self._parts(both)
        except torch.OutOfMemoryError:
            if self._options.agree is not None:
                raise  # the other ranks are waiting
            self.report.num_skipped += 1
            return both.replay()
        before = read_parts(parts) if at_capture else {}
        found = "at capture" if at_capture else f"step {self._schedule.num_steps}"
        mismatch = self._shadow.run(self._step(both, parts, outputs), found)
        if at_capture:
            write_parts(parts, before)
        self._schedule.note(both.run.entry, differs=mismatch is not None)
        if mismatch is not None:
            self._dispatcher.mark_refused(both.run.entry, Reason.QUARANTINED)
        return outputs[0]

    def _step(self, both: BothWays, parts: Sequence[StepPart], outputs: list[Any]) -> ShadowedStep:
        entry = both.run.entry

        def eager(
            *, other_padding: bool = False, logging: CallLogging | None = None
        ) -> Mapping[str, torch.Tensor]:
            if other_padding:
                self._poison(both.run)
            with logging or nullcontext():
                output = both.eager()
            return _tensors(output)

        def replay() -> Mapping[str, torch.Tensor]:
            outputs.append(both.replay())
            return _tensors(outputs[-1])

        return ShadowedStep(
            graph=f"{entry.mode.name} graph of {entry.descriptor.describe()}",
            tape=both.tape,
            eager=eager,
            replay=replay,
            parts=parts,
            rows={entry.descriptor.num_tokens: slice(both.run.num_tokens)},
        )

    def _poison(self, run: BatchRun) -> None:
        padded = run.num_tokens < run.entry.descriptor.num_tokens
        if padded and self._options.poison is not None:
            self._options.poison(run.batch, run.num_tokens)

    def _parts(self, both: BothWays) -> list[StepPart]:
        """What the forward changes, and what ``_poison`` does."""
        parts: list[StepPart] = [GeneratorPart(each) for each in self._pool.generators]
        if self._options.writes is not None:
            parts += _checked(self._options.writes(both.run.batch, both.run.num_tokens))
        else:
            forward = partial(both.run.under, CUDAGraphMode.NONE)
            written, compared = self._written_by(forward), self._options.poison is None
            parts += _whole("memory {} that the forward writes", written, compared=compared)
        poisoned = self._written_by(lambda: self._poison(both.run))
        return [*parts, *_whole("input {}", poisoned, compared=False)]

    def _written_by(self, run: Callable[[], Any]) -> Iterable[torch.Tensor]:
        """The storages that a run, which is undone, writes."""
        probe = EffectsProbe()
        try:
            with self._pool.backend.capture_scope(), probe:
                run()
        finally:
            probe.restore()
        return probe.written.values()


def _with_tokens(
    trial: Callable[[PlanEntry, int], PreparedBatch[Any]], num_tokens: int
) -> Callable[[PlanEntry], PreparedBatch[Any]]:
    return lambda entry: trial(entry, num_tokens)


class _Names:
    """Names the memory at an address."""

    def __init__(self, owners: Mapping[str, Any] | NamesMemory | None) -> None:
        self._owners = {} if owners is None else by_name(owners)

    def __call__(self, address: int) -> str | None:
        return name_among(memory_of(self._owners), address)


def _checked(parts: Iterable[MemoryPart]) -> list[MemoryPart]:
    """What ``writes`` listed; each part has a name of its own."""
    listed = list(parts)
    for part in listed:
        if not isinstance(part, MemoryPart):
            raise ConfigError(f"writes() must list ostinato.MemoryPart, got {shown(part)}")
    twice = [name for name, count in Counter(part.name for part in listed).items() if count > 1]
    if twice:
        raise ConfigError(
            f"writes() lists {len(listed)} parts, of which several are named {twice[0]!r}; give "
            "each a name of its own"
        )
    return listed


def _whole(name: str, tensors: Iterable[torch.Tensor], *, compared: bool) -> Iterator[MemoryPart]:
    for number, tensor in enumerate(tensors):
        yield MemoryPart(name=name.format(number), tensor=tensor, compared=compared)


def _tensors(output: Any) -> dict[str, torch.Tensor]:
    leaves = leaves_with_path(output, "the output")
    return {path: leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}
