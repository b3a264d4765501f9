"""Where a ledger's graphs come from: a pool with its owners, or a graph that others captured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ostinato.errors import ConfigError
from ostinato.graphs.backends.cuda import memory_map, nodes
from ostinato.graphs.backends.graph_node import GraphNode, MemoryRange
from ostinato.graphs.backends.operator_log import OperatorLog
from ostinato.graphs.capture.pool import GraphPool
from ostinato.graphs.capture.segments import Tape
from ostinato.graphs.trust.ledger.ledger import HeldGraph, Ledger
from ostinato.graphs.trust.ledger.owners import (
    NamedMemory,
    NamesMemory,
    OwnedMemory,
    by_name,
    memory_of,
)
from ostinato.graphs.trust.ledger.resolver import ReadableGraph


def pool_ledger(pool: GraphPool, owners: Mapping[str, Any] | NamesMemory) -> Ledger:
    """The ledger of all graphs in ``pool``: of wrappers, managers and graphed callables.

    Make it right after the capture: the addresses that ``owners`` have now count as those that the
    graphs were captured with. Graphs captured later count from the next use of the ledger.

    Args:
        pool: The pool of the graphs.
        owners: By name: modules, tensors, containers of tensors, or objects with
            ``named_memory()``; or one such object.
    """
    return Ledger(PoolGraphs(pool, owners))


class PoolGraphs:
    """Lists the graphs of a pool, each with the memory that was named when it was first seen."""

    def __init__(self, pool: GraphPool, owners: Mapping[str, Any] | NamesMemory) -> None:
        self._pool = pool
        self._owners = by_name(owners)
        self._seen: WeakKeyDictionary[Tape, OwnedMemory] = WeakKeyDictionary()
        self._resolve: Callable[[], Iterable[NamedMemory]] = self._named_memory
        self._latest: OwnedMemory | None = None
        for _ in memory_of(self._owners):  # raises if an owner has none
            pass
        self()

    def __call__(self) -> list[HeldGraph]:
        tapes = [pair for owner in self._pool.owners for pair in owner.tapes()]
        if any(tape not in self._seen for _, tape in tapes):
            owned = OwnedMemory(self._resolve)
            if self._latest is not None and owned.same_as(self._latest):
                owned = self._latest
            self._latest = owned
            for _, tape in tapes:
                self._seen.setdefault(tape, owned)
        return [
            HeldGraph(name=name, capture=tape, owned=self._seen[tape], memory=self._pool.backend)
            for name, tape in sorted(tapes, key=lambda pair: pair[1].serial)
        ]

    def _named_memory(self) -> Iterator[NamedMemory]:
        yield from memory_of(self._owners)
        for owner in self._pool.owners:
            if isinstance(owner, NamesMemory):
                yield from owner.named_memory()


def inspect_graph(
    graph: torch.cuda.CUDAGraph,
    owners: Mapping[str, Any] | None = None,
    *,
    name: str = "graph",
) -> Ledger:
    """The ledger of a CUDA graph that was captured elsewhere; print it, or keep and check it.

    It shows kernels, copies and fills, the addresses in them, whose these are, and which are stale:
    memory of torch's allocator that is free. Called right after the capture, ``check()`` later
    also finds owners that have moved. It cannot refuse replays of a graph that is not ours.
    Operators were not seen, so memory behind tensor maps may be missing.

    Args:
        graph: Captured with ``torch.cuda.CUDAGraph(keep_graph=True)``.
        owners: By name: modules, tensors, containers of tensors, or objects with
            ``named_memory()``. None: addresses are shown without an owner.
        name: What messages call the graph.
    """
    if not isinstance(graph, torch.cuda.CUDAGraph):
        raise ConfigError(
            f"inspect_graph takes a torch.cuda.CUDAGraph, got a {type(graph).__name__}; for graphs "
            "of Ostinato call ledger() on what captured them"
        )
    return Ledger(OtherGraph(graph, by_name({} if owners is None else owners), name))


class OtherGraph:
    """Lists one graph that others captured; as a capture, it has one graph, which is itself."""

    def __init__(self, graph: torch.cuda.CUDAGraph, owners: Mapping[str, Any], name: str) -> None:
        self.log = OperatorLog("cuda", complete=False)
        self._nodes = _read(graph)
        self._memory = _MemoryAround(graph)
        owned = OwnedMemory(lambda: memory_of(owners))
        self._held = HeldGraph(name=name, capture=self, owned=owned, memory=self._memory)

    def __call__(self) -> list[HeldGraph]:
        return [self._held]

    @property
    def graphs(self) -> Sequence[ReadableGraph]:
        return [self]

    def nodes(self) -> list[GraphNode]:
        return self._nodes

    def refuse(self, why: str | None, by: object) -> None:
        """Has no effect: others replay it."""


class _MemoryAround:
    """The memory of the device, seen from one graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._pool = graph.pool()

    def memory_ranges(self) -> list[MemoryRange]:
        return memory_map.torch_memory(self._pool)

    def find_memory(self, address: int) -> MemoryRange | None:
        return nodes.mapped_memory(address)


def _read(graph: torch.cuda.CUDAGraph) -> list[GraphNode]:
    if not nodes.CAN_READ_NODES:
        raise ConfigError(
            "inspect_graph reads graphs through CUDA's Python bindings, which are missing: pip "
            "install cuda-bindings"
        )
    try:
        return nodes.read_nodes(graph)
    except RuntimeError as error:
        raise ConfigError(
            f"this graph cannot be read ({str(error).splitlines()[0]}); capture it with "
            "torch.cuda.CUDAGraph(keep_graph=True), and inspect it before reset()"
        ) from error
