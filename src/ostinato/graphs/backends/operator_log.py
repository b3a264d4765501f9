"""What a capture's operators touch: one source of the address ledger (``trust.ledger``).

A log holds, for every operator and every Triton kernel that was launched around the dispatcher, the
memory outside the pool that it was given. References are weak: a log keeps no memory alive, and can
tell afterwards whether the memory was freed.

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
    """The log of one recording. ``count_nodes`` returns the number of nodes recorded so far."""

    def __init__(self, *, complete: bool, count_nodes: Callable[[], int] | None = None) -> None:
        self.calls: list[LoggedCall] = []
        self.complete = complete
        self._count_nodes = count_nodes
        # By storage number. A weak reference keeps the number from being given out again.
        self._memory: dict[int, StorageWeakRef] = {}
        self._made: set[int] = set()  # by operators of this recording: the pool's
        self._references: tuple[StorageWeakRef, ...] = ()  # once finished

    def num_nodes(self) -> int | None:
        return None if self._count_nodes is None else self._count_nodes()

    def note(self, operator: Any, given: Any, made: Any, first_node: int | None) -> None:
        """Log a call that has just run; ``first_node``: ``num_nodes()`` before it."""
        end_node = self.num_nodes()
        tensors = [*filter(_has_address, tensors_in(given))]
        references = [self._reference(tensor) for tensor in tensors]
        known = {number for number, _ in references}
        for tensor in filter(_has_address, tensors_in(made)):
            number, _ = self._reference(tensor)
            if number not in known:  # it is no view of an argument
                self._made.add(number)
        if first_node is not None and first_node == end_node:
            return  # a view, or an allocation: nothing to replay
        touched = tuple(
            Touched(tensor.data_ptr(), memory)
            for tensor, (number, memory) in zip(tensors, references, strict=True)
            if number not in self._made
        )
        if touched:
            self.calls.append(LoggedCall(str(operator), touched, first_node, end_node))

    def note_launch(
        self, kernel: Any, tensors: Iterable[Any], described: Iterable[torch.Tensor]
    ) -> None:
        """Log a kernel that is about to be launched around the dispatcher, as one node.

        ``described``: tensors behind descriptors, whose addresses the graph does not show. An
        incomplete log takes nothing else, so that a launch costs no more than it must.
        """
        given = [*described, *tensors] if self.complete else described
        touched = tuple(
            Touched(tensor.data_ptr(), self._reference(tensor)[1])
            for tensor in filter(_has_address, tensors_in(given))
        )
        if touched:
            node = self.num_nodes()
            name = f"kernel {getattr(kernel, '__name__', kernel)}"
            end = None if node is None else node + 1
            self.calls.append(LoggedCall(name, touched, node, end))

    def _reference(self, tensor: torch.Tensor) -> tuple[int, StorageWeakRef]:
        storage = tensor.untyped_storage()
        number = storage_number(storage)
        if number not in self._memory:
            self._memory[number] = StorageWeakRef(storage)
        return number, self._memory[number]

    def finish(self, in_pool: Callable[[int], bool]) -> None:
        """Drop the pool's memory from the log: it stays as long as the graphs do."""
        self._memory.clear()
        self._made.clear()
        self._count_nodes = None
        calls, self.calls = self.calls, []
        for call in calls:
            outside = tuple(each for each in call.touched if not in_pool(each.address))
            if outside:
                self.calls.append(call._replace(touched=outside))
        every = (touched.memory for call in self.calls for touched in call.touched)
        self._references = tuple({id(memory): memory for memory in every}.values())

    @property
    def has_freed(self) -> bool:
        """Whether any memory that it lists was freed since."""
        return any(memory.expired() for memory in self._references)


_open_log: ContextVar[OperatorLog | None] = ContextVar("ostinato_operator_log", default=None)


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


def _has_address(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.numel() == 0:
        return False
    # A number from the host, which becomes a constant of the graph, has no dimension.
    return tensor.device.type != "meta" and (tensor.dim() > 0 or tensor.device.type != "cpu")
