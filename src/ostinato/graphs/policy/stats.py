"""The statistics of ``graphed()``; the counts come from ``DispatchStats``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GraphedStats:
    """The statistics of a graphed callable so far. ``str()`` returns a small table.

    ``graphs``: captured. ``hits``: calls that were replayed. ``padding_rows``: in replays, and as
    ``padding_fraction`` of all replayed rows. ``eager_calls``: by reason. ``pool_bytes`` and
    ``buffer_bytes``: memory of graphs and of static inputs. ``capture_seconds``: in total.
    """

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
