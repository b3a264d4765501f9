"""The CPU backend: CUDA-graph semantics without a GPU, by recording operators."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial

import torch

from ostinato import compat
from ostinato.errors import CaptureOutOfMemoryError
from ostinato.graphs.backends.ambient import (
    answering_as_a_capture,
    capture_ambient,
    compiled_functions_run_eagerly,
)
from ostinato.graphs.backends.base import OperatorObserver
from ostinato.graphs.backends.cpu.arena import Arena
from ostinato.graphs.backends.cpu.host_reads import host_reads_refused
from ostinato.graphs.backends.cpu.recorder import Recorder, Step, Verified
from ostinato.graphs.backends.graph_node import MemoryRange, RangeKind
from ostinato.graphs.backends.guard import (
    KnownOperators,
    compiler_error,
    keep_dynamo_out,
    source_of_error,
)
from ostinato.graphs.backends.operator_log import OperatorLog

# What torch allocates for an alias of memory, beside its Python object; resident set, torch 2.11.
_BYTES_PER_TENSOR = 350


class CpuGraph:
    """A list of calls on tensors at fixed addresses. A replay runs no Python of the model."""

    def __init__(self, steps: list[Step], arena_bytes: int, log: OperatorLog) -> None:
        self._steps = steps
        self.log = log
        self.arena_bytes = arena_bytes  # highest arena byte it uses

    @property
    def num_nodes(self) -> int:
        return len(self._steps)

    def nodes(self) -> None:
        return None  # the log has all that is recorded

    def replay(self) -> None:
        # Inference mode skips the autograd layer of every call. Autocast was applied when the
        # operators were recorded, so the caller's must not apply again.
        with compat.inference_mode(True):
            if torch.is_autocast_enabled("cpu"):
                with torch.autocast("cpu", enabled=False):
                    self._run()
            else:
                self._run()

    def _run(self) -> None:
        for step in self._steps:
            step()

    def replay_in_steps(self, after: Callable[[int], None]) -> None:
        """Replay, and call ``after`` behind each step with the number of steps so far."""
        with compat.inference_mode(True), torch.autocast("cpu", enabled=False):
            for count, step in enumerate(self._steps, 1):
                step()
                after(count)

    @property
    def executable_bytes(self) -> int:
        return sys.getsizeof(self._steps) + sum(map(_step_bytes, self._steps))

    def close(self) -> None:
        self._steps = []
        self.arena_bytes = 0


def _step_bytes(step: object) -> int:
    """Memory of one call: the objects that only it refers to, and torch's part of its tensors."""
    if isinstance(step, torch.Tensor):
        return sys.getsizeof(step) + _BYTES_PER_TENSOR
    parts: Iterable[object] = ()
    if isinstance(step, partial):
        parts = (*step.args, *step.keywords.values())
    elif isinstance(step, (list, tuple)):
        parts = step
    elif isinstance(step, dict):
        parts = step.values()
    elif not callable(step):
        return 0  # numbers and dtypes, which are shared
    return sys.getsizeof(step) + sum(map(_step_bytes, parts))


class CpuBackend:
    """Records into one arena. See ``GraphBackend`` for the contract."""

    def __init__(self, *, generators: Sequence[torch.Generator] = ()) -> None:
        self.device = torch.device("cpu")
        self._arena = Arena()
        self.generators = (torch.default_generator, *generators)
        self.observer: OperatorObserver | None = None
        self._verified: dict[Hashable, Verified] = {}
        self._known = KnownOperators()
        self._recorder: Recorder | None = None
        self._modes = ExitStack()
        self._graphs: weakref.WeakSet[CpuGraph] = weakref.WeakSet()

    @contextmanager
    def capture_scope(self) -> Iterator[None]:
        with capture_ambient(), compiled_functions_run_eagerly():
            yield

    def unguarded(self) -> AbstractContextManager[None]:
        return nullcontext()  # recording sees every operator anyway

    def begin(self) -> None:
        keep_dynamo_out()
        self._arena.recent_peak_bytes = 0
        self._recorder = Recorder(self._arena, self.generators, self._verified, self._known)
        self._recorder.observer = self.observer
        if self.observer is not None:
            self.observer.new_segment()
        self._modes = ExitStack()
        self._modes.enter_context(self._recorder)
        self._modes.enter_context(host_reads_refused())
        self._modes.enter_context(answering_as_a_capture())

    def end(self) -> CpuGraph:
        recorder = self._stop_recording()
        recorder.check_random_state()
        recorder.operators.finish()
        graph = CpuGraph(recorder.steps, self._arena.recent_peak_bytes, recorder.operators)
        self._graphs.add(graph)
        return graph

    def abort(self, error: BaseException) -> BaseException:
        if self._recorder is not None:
            self._stop_recording()
        if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
            source = source_of_error(error.__traceback__)
            return CaptureOutOfMemoryError(
                f"out of memory during a capture, at {source}: {error}; capture smaller sizes",
                source=source,
            )
        return compiler_error(error) or error

    def follow_stream(self) -> bool:
        return False  # work is complete when a call returns

    def owns(self, tensor: torch.Tensor) -> bool:
        return self._arena.owns(tensor)

    def weak(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._arena.weak(tensor) if self._arena.owns(tensor) else tensor

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == 0 or tensor.device.type != "cpu":
            return tensor
        return self._arena.strong_like(tensor).copy_(tensor)

    def reserve(self, num_bytes: int) -> None:
        pass  # the arena is contiguous and grows

    def pool_bytes(self) -> int:
        return self._arena.peak_bytes

    def workspace_bytes(self) -> int:
        return 0

    def untracked_bytes(self) -> int:
        return 0

    def memory_ranges(self) -> list[MemoryRange]:
        return [MemoryRange(*self._arena.addresses, RangeKind.POOL)]

    def find_memory(self, address: int) -> MemoryRange | None:
        return None

    def release_unused(self) -> None:
        self._arena.trim(max((graph.arena_bytes for graph in self._graphs), default=0))

    def close(self) -> None:
        self._verified.clear()
        self._arena.close()

    def _stop_recording(self) -> Recorder:
        assert self._recorder is not None
        self._modes.close()  # before `_recorder` is cleared: if interrupted, `abort` stops again
        recorder, self._recorder = self._recorder, None
        return recorder
