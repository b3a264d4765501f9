"""A ledger as text: a summary, and the nodes of every graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ostinato.graphs.trust.ledger.owners import MemoryKind
from ostinato.graphs.trust.ledger.records import GraphRecord, NodeRecord

_MOST_NODES = 40
_NAME_WIDTH = 48


def ledger_table(graphs: Sequence[GraphRecord]) -> str:
    """One paragraph per graph: what it holds, then its nodes with named or stale addresses."""
    if not graphs:
        return "no graphs"
    return "\n".join(line for graph in graphs for line in _graph_lines(graph))


def _graph_lines(graph: GraphRecord) -> Iterator[str]:
    kinds = Counter(node.kind for node in graph.nodes)
    nodes = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()) or "no nodes"
    held = graph.count()
    addresses = ", ".join(f"{held[kind]} {kind.value}" for kind in MemoryKind if held[kind])
    yield f"{graph.name}: {nodes}; addresses: {addresses or 'none'}"
    shown = [node for node in graph.nodes if _is_shown(node)]
    for node in shown[:_MOST_NODES]:
        yield from _node_lines(node)
    if len(shown) > _MOST_NODES:
        yield f"  ... and {len(shown) - _MOST_NODES} more nodes (graphs() has them all)"


def _is_shown(node: NodeRecord) -> bool:
    return any(
        each.name or each.stale or each.kind is MemoryKind.UNKNOWN for each in node.addresses
    )


def _node_lines(node: NodeRecord) -> Iterator[str]:
    yield f"  {node}"
    for each in node.addresses:
        if each.kind in (MemoryKind.POOL, MemoryKind.WORKSPACE):
            continue
        stale = f"  STALE: {each.stale}" if each.stale else ""
        yield f"    {each.owner:{_NAME_WIDTH}} {each.address:#x}  {each.where}{stale}"
