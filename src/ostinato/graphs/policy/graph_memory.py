"""Bytes that graphs take, by what takes them: measured, estimated, and the two compared."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field

MOST_OFF_BYTES = 32 * 2**20
MOST_OFF_FRACTION = 0.1


@dataclass(frozen=True, kw_only=True)
class GraphMemory:
    """What takes memory when graphs are captured, in bytes.

    ``pool``: tensors inside the graphs, which all graphs share. ``executable``: the graphs
    themselves, nodes and parameters. ``buffers``: outputs of FULL graphs. ``workspaces``: scratch
    memory of libraries that graphs call. ``communicator``: buffers for collectives, taken when the
    ranks connect. ``driver``: the rest, such as code of kernels that a capture loads. It is what
    the device has less than before: it includes what other processes take in the meantime.
    """

    pool: int = 0
    executable: int = 0
    buffers: int = 0
    workspaces: int = 0
    communicator: int = 0
    driver: int = 0

    @property
    def total(self) -> int:
        return sum(astuple(self))

    def with_more(self, more: GraphMemory) -> GraphMemory:
        """This and what further graphs took, whose buffers are the same ones."""
        each = {name: count + getattr(more, name) for name, count in vars(self).items()}
        return GraphMemory(**each | {"buffers": max(self.buffers, more.buffers)})

    def __str__(self) -> str:
        parts = [f"{name} {in_words(count)}" for name, count in vars(self).items() if count]
        return f"{in_words(self.total)} ({', '.join(parts) or 'nothing'})"


@dataclass(frozen=True, kw_only=True)
class GraphMemoryReport:
    """The memory of an engine's graphs: ``estimated`` before their capture, and ``taken`` since.

    ``budget``: the most that was allowed (``graph_memory``); None: no limit. ``dropped_decode``
    and ``dropped_mixed``: sizes that were left out of the plan for it, in numbers of tokens.
    """

    estimated: GraphMemory = field(default_factory=GraphMemory)
    taken: GraphMemory = field(default_factory=GraphMemory)
    budget: int | None = None
    dropped_decode: tuple[int, ...] = ()
    dropped_mixed: tuple[int, ...] = ()

    @property
    def is_as_estimated(self) -> bool:
        """Whether both totals differ by at most 32 MiB or a tenth of what was taken.

        Leaves out ``driver``, which cannot be estimated.
        """
        return abs(self._more_than_estimated) <= self._most_off

    @property
    def is_within_estimate(self) -> bool:
        """Whether the graphs took no more than that. Taking less is normal in a process that
        captured graphs before: its libraries' workspaces exist, and CUDA's driver kept memory.
        """
        return self._more_than_estimated <= self._most_off

    @property
    def _more_than_estimated(self) -> int:
        return self.taken.total - self.taken.driver - self.estimated.total

    @property
    def _most_off(self) -> float:
        return max(MOST_OFF_BYTES, MOST_OFF_FRACTION * (self.taken.total - self.taken.driver))


def in_words(num_bytes: int) -> str:
    """The amount for people: "1.5 MiB"."""
    unit, size = ("MiB", 2**20) if abs(num_bytes) >= 2**20 else ("KiB", 2**10)
    return f"{num_bytes / size:.1f} {unit}"
