"""Process-wide counts of compilations and captures, with an assertion helper for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

from ostinato.errors import ConfigError


@dataclass
class CompilationCounter:
    """Counts since the process started. Profiling runs are excluded: see ``paused``."""

    num_models_seen: int = 0
    num_graphs_seen: int = 0
    num_piecewise_graphs_seen: int = 0  # splitting operators included
    num_piecewise_capturable_graphs_seen: int = 0  # splitting operators excluded
    num_backend_compilations: int = 0
    num_inductor_compiles: int = 0
    num_eager_compiles: int = 0
    num_gpu_runner_capture_triggers: int = 0
    num_cudagraph_captured: int = 0

    def clone(self) -> CompilationCounter:
        """A snapshot of the current counts."""
        return replace(self)

    @contextmanager
    def expect(self, **deltas: int) -> Iterator[None]:
        """Fail unless each named field grows by exactly its delta inside the block."""
        known = {field.name for field in fields(self)}
        unknown = sorted(set(deltas) - known)
        if unknown:
            raise ConfigError(f"no such counter: {unknown}; known: {sorted(known)}")
        before = self.clone()
        yield
        wrong = [
            f"{name}: was {getattr(before, name)}, is {getattr(self, name)}, "
            f"expected {getattr(before, name) + delta} (+{delta})"
            for name, delta in deltas.items()
            if getattr(self, name) - getattr(before, name) != delta
        ]
        if wrong:
            raise AssertionError("counters differ: " + "; ".join(wrong))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the block out of the counts (used for profiling runs)."""
        before = self.clone()
        try:
            yield
        finally:
            for field in fields(self):
                setattr(self, field.name, getattr(before, field.name))


compilation_counter = CompilationCounter()
