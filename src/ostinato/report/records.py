"""The values of a run report. Plain dataclasses: what is in the file is what is here."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was decided at the start. ``changed_because``: why the mode is not the requested one."""

    requested_mode: str
    mode: str
    changed_because: str | None
    attention: str | None
    decode_sizes: list[int]
    mixed_sizes: list[int]
    num_graphs: int
    capture_s: float
    max_num_seqs: int
    max_num_batched_tokens: int
    num_kv_blocks: int | None
    block_size: int | None


@dataclass(frozen=True, kw_only=True)
class GraphRow:
    """One entry of the capture plan, and its graphs. ``name``: of its picture.

    ``replays``, and ``padding_tokens`` in these. ``run_s``: seconds of ``timed_runs`` steps that
    were timed from end to end. ``capture_s``: how long its capture took.

    ``num_bytes``: what its capture added to the memory of all graphs; they share it, so most add
    little. ``bytes_by_kind``: its bytes by what holds them, where that is known. ``idle_s``:
    seconds since the last replay; None: none yet. ``error``: why it has no graph, if its capture
    failed.
    """

    name: str
    mode: str
    kind: str
    num_tokens: int
    num_reqs: int | None
    num_loras: int
    replays: int
    padding_tokens: int
    timed_runs: int
    run_s: float
    num_bytes: int
    bytes_by_kind: dict[str, int] = field(default_factory=dict)
    capture_s: float
    idle_s: float | None
    error: str | None

    @property
    def padding_fraction(self) -> float:
        """The fraction of all replayed rows that was padding."""
        total = self.replays * self.num_tokens
        return self.padding_tokens / total if total else 0.0


@dataclass(frozen=True, kw_only=True)
class EagerRow:
    """Steps that ran eagerly for one ``reason``, ``explanation`` in words; times as of graphs."""

    reason: str
    explanation: str
    steps: int
    timed_runs: int = 0
    run_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory over time, one list for each quantity, one element for each sample.

    The quantities are those of ``MemorySample``.
    """

    at_s: list[float]
    kv_blocks: list[int]
    graph_bytes: list[int]
    free_bytes: list[int | None]
    num_running: list[int]
    num_waiting: list[int]


@dataclass(frozen=True, kw_only=True)
class PictureNode:
    """A node of a graph: ``kind`` and full ``name``; ``operator``: what put it there, if seen.

    ``role``: what colour it gets. ``owners``: the named memory that it holds.
    """

    kind: str
    name: str
    label: str
    operator: str | None
    role: str
    owners: list[str]


@dataclass(frozen=True, kw_only=True)
class PictureGroup:
    """Nodes of one layer, or between two eager breaks: ``title``, and ``nodes`` by number.

    ``repeat``: how many groups in a row have the same kernels; ``nodes`` are the first one's.
    """

    title: str
    repeat: int
    nodes: list[int]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A captured graph. ``is_split``: eager work runs between its groups."""

    name: str
    num_nodes: int
    is_split: bool
    groups: list[PictureGroup]


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """All graphs. ``nodes``: every different one, which graphs refer to by number."""

    nodes: list[PictureNode]
    graphs: list[Picture]


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """What an engine and its graphs did from its start until ``created``, in UTC.

    Made by ``LLM.report()``. ``write`` it to a file, read that with ``read_report``, and turn
    either into a page with ``report_page``. It holds no text or token of any request. On several
    ranks: of rank 0; KV blocks and sequences are those of all replicas.

    ``model``, ``task``, ``environment``: what ran, and where. ``plan``: decided at the start.
    ``graphs``, ``eager``: a row for each key, and for each reason to run eagerly.
    ``replayed_tokens``: through graphs, and ``padding_tokens`` beside them. ``graph_bytes``:
    memory of all graphs; ``memory``: over time. ``pictures``: the nodes of the graphs.
    ``num_compared``, ``mismatches``: by ``verify``.
    """

    created: str
    model: str
    task: str
    environment: dict[str, str]
    plan: Plan
    graphs: list[GraphRow]
    eager: list[EagerRow]
    replayed_tokens: int
    padding_tokens: int
    graph_bytes: int
    memory: Memory
    pictures: Pictures
    num_compared: int
    mismatches: list[str]
