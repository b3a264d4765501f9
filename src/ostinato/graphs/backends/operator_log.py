"""What a capture's operators touch: one source of the address ledger (``trust.ledger``).

A log holds, for every operator and every Triton kernel that was launched around the dispatcher, the
memory outside the pool that it was given, which may be none. References are weak: a log keeps no
memory alive, and can tell afterwards whether the memory was freed.

A *complete* log saw every operator. On CUDA, captures that are not watched operator by operator
(``GraphBackend.unguarded``) have an incomplete one, which holds only what cannot be read from the
captured graph itself: the memory behind tensor descriptors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ostinato.compat import storage_number
from ostinato.graphs.thread_state import thread_variable
from ostinato.graphs.tree import tensors_in


class Touched(NamedTuple):
    """A tensor given to an operator: its address, and its memory, which may be freed since."""

    address: int
    memory: StorageWeakRef

    @property
    def freed(self) -> bool:
        return bool(self.memory.expired())


class LoggedCall(NamedTuple):
    """An operator, the memory it was given, and its nodes in the graph.

    The nodes are ``first_node`` up to ``end_node``, if that is known (not None).
    """

    operator: str
    touched: tuple[Touched, ...]
    first_node: int | None
    end_node: int | None


class OperatorLog:
    """The log of one recording of work for ``device_type``.

    ``in_pool``: whether an address is the pool's, as far as known during the recording; such memory
    stays as long as the graphs do, and is left out. ``count_nodes`` returns the number of nodes
    recorded so far.
    """

    def __init__(
        self,
        device_type: str,
        *,
        complete: bool,
        in_pool: Callable[[int], bool] | None = None,
        count_nodes: Callable[[], int] | None = None,
    ) -> None:
        self.calls: list[LoggedCall] = []
        self.complete = complete
        self._device_type = device_type
        self._in_pool = in_pool or _nowhere
        self._count_nodes = count_nodes
        # By storage number. A weak reference keeps the number from being given out again.
        self._memory: dict[int, StorageWeakRef] = {}

    def num_nodes(self) -> int | None:
        return None if self._count_nodes is None else self._count_nodes()

    def note(self, operator: Any, given: Any, first_node: int | None) -> None:
        """Log a call that has just run; ``first_node``: ``num_nodes()`` before it."""
        end_node = self.num_nodes()
        if first_node is not None and first_node == end_node:
            return  # a view, or an allocation: nothing to replay
        touched = tuple(self._touched(given))
        if touched or first_node is not None:
            self.calls.append(LoggedCall(str(operator), touched, first_node, end_node))

    def note_launch(
        self, kernel: Any, tensors: Iterable[Any], described: Iterable[torch.Tensor]
    ) -> None:
        """Log a kernel that is about to be launched around the dispatcher, as one node.

        ``described``: tensors behind descriptors, whose addresses the graph does not show. An
        incomplete log takes nothing else, so that a launch costs no more than it must.
        """
        given = [*described, *tensors] if self.complete else described
        touched = tuple(self._touched(given))
        if touched:
            node = self.num_nodes()
            name = f"kernel {getattr(kernel, '__name__', kernel)}"
            end = None if node is None else node + 1
            self.calls.append(LoggedCall(name, touched, node, end))

    def _touched(self, given: Any) -> Iterator[Touched]:
        for tensor in tensors_in(given):
            if tensor.layout is not torch.strided or tensor.is_nested:
                continue
            if not tensor.dim() and tensor.device.type != self._device_type:
                continue  # a number from the host, which becomes a constant of the graph
            address = tensor.data_ptr()  # 0: it has no memory
            if address and not self._in_pool(address):
                storage = tensor.untyped_storage()
                number = storage_number(storage)
                if number not in self._memory:
                    self._memory[number] = StorageWeakRef(storage)
                yield Touched(address, self._memory[number])

    def finish(self) -> None:
        """Leave out memory that turned out to be the pool's. Nothing is logged afterwards."""
        calls, self.calls = self.calls, []
        for call in calls:
            outside = tuple(each for each in call.touched if not self._in_pool(each.address))
            if outside or call.first_node is not None:
                self.calls.append(call._replace(touched=outside))
        self._count_nodes, self._in_pool = None, _nowhere  # they refer to what was recorded
        used = {id(touched.memory) for call in self.calls for touched in call.touched}
        self._memory = {key: ref for key, ref in self._memory.items() if id(ref) in used}

    @property
    def has_freed(self) -> bool:
        """Whether any memory that it lists was freed since."""
        return any(memory.expired() for memory in self._memory.values())


_open_log: ContextVar[OperatorLog | None] = thread_variable("operator_log", None)


@contextmanager
def logging_to(log: OperatorLog) -> Iterator[None]:
    """Kernels launched inside, by this thread, are logged."""
    token = _open_log.set(log)
    try:
        yield
    finally:
        _open_log.reset(token)


# Bound once: every launch asks.
open_log = _open_log.get


def _nowhere(address: int) -> bool:
    return False
