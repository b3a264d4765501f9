"""What the graphs did: hits per key, tokens spent on padding, eager runs by reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ostinato.graphs.policy.descriptor import BatchDescriptor, Choice, Reason
from ostinato.graphs.policy.modes import CUDAGraphMode


@dataclass
class DispatchStats:
    """Counts of the choices that were run. Recording one costs two dictionary updates."""

    replays: Counter[BatchDescriptor] = field(default_factory=Counter)
    eager: Counter[Reason] = field(default_factory=Counter)
    replayed_tokens: int = 0
    padding_tokens: int = 0

    def record(self, choice: Choice, num_tokens: int) -> None:
        if choice.mode is CUDAGraphMode.NONE:
            self.eager[choice.reason] += 1
            return
        descriptor = choice.descriptor
        self.replays[descriptor] += 1
        self.replayed_tokens += num_tokens
        self.padding_tokens += descriptor.num_tokens - num_tokens

    @property
    def hits(self) -> int:
        """Batches that ran through a graph."""
        return self.replays.total()

    @property
    def misses(self) -> int:
        """Batches that ran eagerly."""
        return self.eager.total()

    @property
    def padding_fraction(self) -> float:
        """Share of the replayed rows that was padding."""
        total = self.replayed_tokens + self.padding_tokens
        return self.padding_tokens / total if total else 0.0

    def reset(self) -> None:
        self.replays.clear()
        self.eager.clear()
        self.replayed_tokens = self.padding_tokens = 0


@dataclass(frozen=True, kw_only=True)
class GraphedStats:
    """What a graphed callable did so far. ``str()`` of it is a small table."""

    graphs: int
    hits: int
    padding_rows: int
    padding_fraction: float
    eager_calls: dict[str, int]
    pool_bytes: int
    buffer_bytes: int
    capture_seconds: float

    def __str__(self) -> str:
        lines = [
            f"graphs captured   {self.graphs} in {self.capture_seconds:.3f} s",
            f"replays           {self.hits}",
            f"padding           {self.padding_rows} rows ({self.padding_fraction:.1%})",
            f"memory            {self.pool_bytes:,} B pool + {self.buffer_bytes:,} B buffers",
            f"eager calls       {sum(self.eager_calls.values())}",
        ]
        lines += [f"  {count:>6} x {reason}" for reason, count in self.eager_calls.items()]
        return "\n".join(lines)
