"""Captures one forward as graph segments around eager breaks.

Some operators must not be captured: attention whose launch depends on the batch, a collective, a
host callback. ``@eager_break`` marks them. A capture that splits at breaks closes its graph there,
runs the operator eagerly, and opens the next graph, all in one ordinary run of the forward, without
tracing or torch.compile. The result is a tape of graphs and eager calls. Replaying the tape runs no
other Python of the model.

In a capture that does not split (a FULL graph), and outside captures, a marked function is an
ordinary function.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar, cast

import torch

from ostinato.compat import storage_number
from ostinato.errors import ConfigError, ReplayMismatchError, StaleGraphError
from ostinato.graphs.backends import Graph, GraphBackend
from ostinato.graphs.backends.base import OperatorObserver, replay_closed
from ostinato.graphs.capture.closing import close_each
from ostinato.graphs.capture.signature import TensorSpec, same_value
from ostinato.graphs.policy.counters import compilation_counter
from ostinato.graphs.thread_state import thread_variable
from ostinato.graphs.tree import leaves_with_path, map_tensors, tensors_in

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_breaks: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()

# Runs the breaks of an eager forward, if set: called with a break's function and arguments.
BreakWatch = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
_break_watch: ContextVar[BreakWatch | None] = thread_variable("break_watch", None)

_open_recording: ContextVar[Recording | None] = thread_variable("open_recording", None)


def eager_break(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function or operator that runs eagerly between two graph segments.

    Every replay calls it with the same tensors, at the same addresses, and with the other arguments
    it had at capture; it reads values that change from batch to batch from the forward context.
    Results that it writes into its arguments cost nothing. A tensor that it returns is copied to
    the address that the next segment reads.
    """

    if not callable(function):
        raise ConfigError(f"eager_break() marks a function, got {function!r}")

    @functools.wraps(function)
    def marked(*args: P.args, **kwargs: P.kwargs) -> R:
        recording = _open_recording.get()
        if recording is not None and recording.split_at_breaks:
            return recording.run_break(function, args, kwargs)
        watch = _break_watch.get()
        return function(*args, **kwargs) if watch is None else watch(function, args, kwargs)

    _breaks.add(marked)
    return marked


def is_eager_break(function: object) -> bool:
    """Whether ``eager_break`` made it."""
    return isinstance(function, types.FunctionType) and function in _breaks


@contextmanager
def watching_breaks(watch: BreakWatch) -> Iterator[None]:
    """Have ``watch`` run the eager breaks of forwards inside that are not recorded."""
    token = _break_watch.set(watch)
    try:
        yield
    finally:
        _break_watch.reset(token)


# Bound once: replays read it on every call. None outside recordings, and in their eager breaks.
open_recording = _open_recording.get


def is_recording() -> bool:
    """Whether this thread is inside a recording (and not in an eager break of one)."""
    return open_recording() is not None


class EagerCall:
    """A break on the tape: one call, and the addresses of its results."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        expected: list[Any],
    ) -> None:
        self._function = function
        self._args = args
        self._kwargs = kwargs
        # Per leaf returned: the tensor that the next segment reads, to copy into; the TensorSpec of
        # a result in an argument's memory, which must be there again; or a value.
        self._expected = expected

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What every replay calls it with."""
        return (*self._args, *self._kwargs.values())

    @property
    def name(self) -> str:
        return str(getattr(self._function, "__qualname__", repr(self._function)))

    @property
    def num_copies(self) -> int:
        """The number of results that are copied to the addresses the next segment reads."""
        return sum(isinstance(leaf, torch.Tensor) for leaf in self._expected)

    def replay(self) -> None:
        result = self._function(*self._args, **self._kwargs)
        returned = [leaf for _, leaf in leaves_with_path(result, "")]
        if len(returned) != len(self._expected):
            raise self._changed(f"{len(self._expected)} values", f"{len(returned)} values")
        for expected, value in zip(self._expected, returned, strict=True):
            if isinstance(expected, torch.Tensor) and isinstance(value, torch.Tensor):
                if expected.shape != value.shape or expected.dtype != value.dtype:
                    was, now = (f"{tuple(t.shape)} {t.dtype}" for t in (expected, value))
                    raise self._changed(was, now)
                expected.copy_(value)
            elif isinstance(expected, TensorSpec) and isinstance(value, torch.Tensor):
                if expected != TensorSpec.of(value):
                    raise self._changed("one part of its arguments", "another tensor")
            elif isinstance(value, torch.Tensor) or not same_value(expected, value):
                raise self._changed(repr(expected), repr(value))

    def _changed(self, was: str, now: str) -> ReplayMismatchError:
        return ReplayMismatchError(
            f"eager break {self.name} returned {was} at capture and {now} on replay; the graph "
            "after it was captured with the former, so only the contents of tensors that a break "
            "returns may change"
        )


class Tape:
    """Captured work: graphs, and the eager calls between them, in order."""

    def __init__(self, steps: list[Graph | EagerCall]) -> None:
        self._steps = steps
        self.has_breaks = any(isinstance(step, EagerCall) for step in steps)
        # Its serial among the captures of its pool, and the serials of captures inside it.
        self.serial = 0
        self.log: OperatorObserver | None = None  # what the pool's observer saw
        self.inner = range(0)
        self._refusals: dict[object, str] = {}  # by who found it
        self.replay: Callable[[], None] = self._usual_replay()

    def _usual_replay(self) -> Callable[[], None]:
        # A single graph, the common case, is replayed without a loop.
        return self._steps[0].replay if len(self._steps) == 1 else self._replay_all

    def _replay_all(self) -> None:
        for step in self._steps:
            step.replay()

    @property
    def steps(self) -> Sequence[Graph | EagerCall]:
        """Graphs, and the eager calls between them, in order."""
        return self._steps

    @property
    def graphs(self) -> list[Graph]:
        return [step for step in self._steps if not isinstance(step, EagerCall)]

    @property
    def num_nodes(self) -> int | None:
        counts = [graph.num_nodes for graph in self.graphs]
        return None if None in counts else sum(cast(list[int], counts))

    @property
    def num_copies(self) -> int:
        """The number of eager results that each replay copies for the next graph."""
        return sum(step.num_copies for step in self._steps if isinstance(step, EagerCall))

    def refuse(self, why: str | None, by: object) -> None:
        """From now on, every replay raises with ``why``; None: it may run, as far as ``by`` knows.

        ``by``: who found the reason. Of several, each must take its own back.
        """
        self._refusals.pop(by, None)
        if why is not None:
            self._refusals[by] = why
        if self._steps:  # it is not closed
            reasons = list(self._refusals.values())
            stale = functools.partial(_raise_stale, reasons)
            self.replay = stale if reasons else self._usual_replay()

    def close(self) -> None:
        self.replay = replay_closed
        try:
            close_each(graph.close for graph in self.graphs)
        finally:
            self._steps = []


def _raise_stale(reasons: list[str]) -> None:
    raise StaleGraphError(reasons[0])


class Recording:
    """The capture in progress."""

    def __init__(self, backend: GraphBackend, *, split_at_breaks: bool) -> None:
        self.split_at_breaks = split_at_breaks
        self._backend = backend
        self._steps: list[Graph | EagerCall] = []
        self._kept_things: dict[Hashable, Any] = {}

    def kept(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result of ``make`` on the first call with ``key``, held until the recording ends.

        For scratch memory that several captured calls share: while it is held, no later tensor of
        the recording, in any segment, is placed on it. Tensors of other graphs of the pool may be,
        so each replay must write it before reading it.
        """
        if key not in self._kept_things:
            self._kept_things[key] = make()
        kept: T = self._kept_things[key]
        return kept

    def record(self, run: Callable[[], T], join: Callable[[], None] | None = None) -> T:
        """Record one call of ``run``, and then of ``join``; drop the recording if one raises."""
        # No `with` block: a signal handler can keep one from being left, and the capture open.
        token = _open_recording.set(self)
        try:
            self._backend.begin()
            output = run()
            if join is not None:
                join()
            self._close_segment(last=True)
            return output
        except BaseException as error:
            raised = self._backend.abort(error)
            for graph in Tape(self._steps).graphs:
                graph.close()
            if raised is error:
                raise
            raise raised from error
        finally:
            _open_recording.reset(token)
            self._kept_things.clear()

    def run_break(self, function: Callable[..., R], args: tuple[Any, ...], kwargs: Any) -> R:
        """Close the current segment, run ``function`` eagerly, open the next segment."""
        self._close_segment(last=False)
        token = _open_recording.set(None)  # separate captures are legal inside a break
        try:
            result = function(*args, **kwargs)
        finally:
            _open_recording.reset(token)
        weak = self._backend.weak
        result, expected = self._kept(result, args, kwargs)
        fixed_args, fixed_kwargs = map_tensors(weak, args), map_tensors(weak, dict(kwargs))
        self._steps.append(EagerCall(function, fixed_args, fixed_kwargs, expected))
        self._backend.begin()
        return result

    def _kept(self, result: R, args: tuple[Any, ...], kwargs: Any) -> tuple[R, list[Any]]:
        """The result of a break at fixed addresses, and what it must return on replay."""
        if result is None:  # breaks that write into their arguments
            return result, [None]
        borrowed = {
            storage_number(tensor.untyped_storage()) for tensor in tensors_in((args, kwargs))
        }
        weak, adopt = self._backend.weak, self._backend.adopt

        def in_place(tensor: torch.Tensor) -> bool:
            return storage_number(tensor.untyped_storage()) in borrowed

        def expect(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return TensorSpec.of(leaf) if in_place(leaf) else weak(leaf)

        result = map_tensors(lambda tensor: tensor if in_place(tensor) else adopt(tensor), result)
        return result, [expect(leaf) for _, leaf in leaves_with_path(result, "")]

    def finish(self) -> Tape:
        tape = Tape(self._steps)
        compilation_counter.num_cudagraph_captured += len(tape.graphs)
        return tape

    def _close_segment(self, *, last: bool) -> None:
        graph = self._backend.end()
        # Two breaks in a row, or one at either end, have an empty graph beside them.
        if graph.num_nodes == 0 and (self._steps or not last):
            graph.close()
            return
        self._steps.append(graph)
