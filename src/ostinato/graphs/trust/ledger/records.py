"""What a ledger says: graphs, their nodes, the addresses these hold, and which are stale."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from ostinato.graphs.trust.ledger.owners import MemoryKind, owner_label


@dataclass(frozen=True, slots=True)
class HeldAddress:
    """An address in a node. ``where``: in which parameter, or that an operator was given it.

    ``address``, and whose it is: ``kind`` and ``name`` (empty for the pool and for unknown memory).
    ``stale``: why it must not be used any more; None if it may.
    """

    address: int
    where: str
    kind: MemoryKind
    name: str = ""
    stale: str | None = None

    @property
    def owner(self) -> str:
        """Kind and name, as messages show them."""
        return owner_label(self.kind.value, self.name)


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One node of a graph: its ``index`` (None: unknown), ``kind`` and ``name``.

    ``piece``: the number of its piece, if eager breaks split the graph; None otherwise.

    ``operator``: what put it there, if that was seen. ``addresses``: what it holds.
    ``hides_addresses``: a parameter may be a tensor map, so there may be more.
    """

    index: int | None
    kind: str
    name: str
    operator: str | None
    addresses: tuple[HeldAddress, ...]
    hides_addresses: bool = False
    piece: int | None = None

    def __str__(self) -> str:
        number = "a node" if self.index is None else f"node {self.index}"
        if self.piece is not None:
            number = f"{number} of piece {self.piece}"
        operator = f", of {self.operator}" if self.operator not in (None, self.name) else ""
        return f"{number} ({_short(self.name)}{operator})"


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """One captured call, by ``name``, with its ``nodes``: of all pieces, if there are several."""

    name: str
    nodes: tuple[NodeRecord, ...]

    def count(self) -> Counter[MemoryKind]:
        """How many different addresses it holds, by what they are for."""
        held = {each.address: each.kind for node in self.nodes for each in node.addresses}
        return Counter(held.values())


class StaleAddress(NamedTuple):
    """An address that a ``graph`` holds and must not use: in which ``node``, and ``why``.

    ``owner``: whose memory it was. ``node`` is None if it is known only that another graph of the
    same kind holds the address.
    """

    graph: str
    node: NodeRecord | None
    owner: str
    address: int
    why: str

    def __str__(self) -> str:
        node = "a node that cannot be read" if self.node is None else str(self.node)
        return f"{self.graph}, {node}: {self.owner} at {self.address:#x} is {self.why}"


def _short(name: str) -> str:
    return name if len(name) <= 60 else f"{name[:57]}..."
