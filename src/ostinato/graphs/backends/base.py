"""The protocol of a backend, and all that the rest of the package knows about the device.

The semantics are those of a CUDA graph on every device: fixed addresses, no Python and no control
flow on replay, no host reads, and memory that a later capture may reuse once nothing refers to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

import torch

from ostinato.errors import ReplayMismatchError
from ostinato.graphs.backends.graph_node import GraphNode, MemoryRange
from ostinato.graphs.backends.operator_log import OperatorLog
from ostinato.graphs.thread_state import thread_variable

T = TypeVar("T")


class Graph(Protocol):
    """Recorded work. The backend, not the graph, owns the pool's memory."""

    log: OperatorLog  # the memory that its operators were given

    @property
    def num_nodes(self) -> int | None:
        """Operations replayed (kernels on CUDA, operators on the CPU); None if unknown."""

    def nodes(self) -> Sequence[GraphNode] | None:
        """What is recorded, with all values that may be addresses; None if that is unknown."""

    def replay(self) -> None:
        """Run the recorded work on the current stream. Does not synchronise."""

    @property
    def executable_bytes(self) -> int:
        """Memory that the recording itself takes, beside the pool's; 0 once it is closed.

        CUDA's driver allocates it in chunks for several graphs, and the graph that needed a new
        chunk has all of it: only sums over many graphs mean something.
        """

    def close(self) -> None:
        """Release the recording. A closed graph must not be replayed."""


class OperatorObserver(Protocol):
    """Told of every operator of a recording, after it has run."""

    def saw(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        num_steps: int | None,
    ) -> None:
        """``func`` was called like this. ``result`` and arguments are where the graph has them.

        ``num_steps``: what the recording contains so far, if its graph can be replayed in steps.
        """

    def new_segment(self) -> None:
        """Another recording of the same capture begins."""


_unobserved: ContextVar[bool] = thread_variable("unobserved", False)
is_unobserved = _unobserved.get


def unobserved(run: Callable[[], T]) -> T:
    """Run what captures and eager code do differently on purpose: no observer is told of it."""
    token = _unobserved.set(True)
    try:
        return run()
    finally:
        _unobserved.reset(token)


class GraphBackend(Protocol):
    """Records on one device, into one memory pool shared by all its graphs.

    ``begin`` and ``end`` bracket one recording in the calling thread; recordings do not nest. When
    ``end`` returns, the recorded work has run exactly once (enqueued, on CUDA), so captured outputs
    hold real values on every backend.
    """

    device: torch.device
    # Generators that captured work may draw from: the device's default and any registered ones.
    generators: tuple[torch.Generator, ...]
    observer: OperatorObserver | None

    def capture_scope(self) -> AbstractContextManager[None]:
        """Context of an entire capture, including code that runs between two recordings."""

    def unguarded(self) -> AbstractContextManager[None]:
        """Captures inside skip the per-operator check, because a similar capture passed it.

        Forbidden operations still raise, but the error may not name the operator.
        """

    def begin(self) -> None: ...

    def end(self) -> Graph: ...

    def abort(self, error: BaseException) -> BaseException:
        """Drop the open recording after ``error``, and return the error to raise instead."""

    def follow_stream(self) -> bool:
        """Order the current stream after the pool's last use; return whether the stream changed."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory belongs to the pool."""

    def weak(self, tensor: torch.Tensor) -> torch.Tensor:
        """An alias that does not keep the pool's memory reserved; other tensors are returned as is.

        The alias is valid until the pool is closed, but a later capture may place other data there.
        """

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy the tensor into the pool's memory; for tensors computed between recordings."""

    def reserve(self, num_bytes: int) -> None:
        """Ensure that the pool has ``num_bytes`` of contiguous memory, if it is segmented."""

    def pool_bytes(self) -> int:
        """Memory the pool holds."""

    def workspace_bytes(self) -> int:
        """Memory of libraries' workspaces that the pool's graphs write to."""

    def untracked_bytes(self) -> int:
        """Memory in use on the device that torch's allocator does not know of, by any process."""

    def memory_ranges(self) -> list[MemoryRange]:
        """The pool's memory, its libraries' workspaces, and on CUDA all other memory of torch."""

    def find_memory(self, address: int) -> MemoryRange | None:
        """Memory that was allocated without torch, if the device knows of any at ``address``."""

    def release_unused(self) -> None:
        """Free memory that no graph needs, both the pool's and what warm-ups left, as far as the
        device allows."""

    def close(self) -> None:
        """Drop the pool. All its graphs must be closed."""


def replay_closed() -> None:
    """Replaces the replay of a closed graph."""
    raise ReplayMismatchError("this graph was closed; capture it again before replaying it")
