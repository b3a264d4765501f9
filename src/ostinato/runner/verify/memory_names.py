"""Names of the memory that graphs of a runner refer to, for reports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from ostinato.graphs.trust.shadow.memory_names import name_among, name_in_module
from ostinato.models.base import module_of
from ostinato.runner.model_graphs import ModelGraphs
from ostinato.runner.step_memory import StepMemory


class MemoryNames:
    """Called with an address, returns what lies there now: a parameter, a layer's keys, ..."""

    def __init__(self, memory: StepMemory, all_graphs: Sequence[ModelGraphs]) -> None:
        self._memory = memory
        self._all_graphs = all_graphs

    def __call__(self, address: int) -> str | None:
        for graphs in self._all_graphs:
            name = name_in_module(module_of(graphs.model), address)
            if name is not None:
                return name
        return name_among(self._named(), address)

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        memory = self._memory
        for number, pair in enumerate(memory.kv_cache.layers):
            for kind, tensor in zip(("keys", "values"), pair, strict=True):
                yield f"the {kind} of layer {number} (KV cache)", tensor
        owners: Iterable[object] = (memory.state, memory.state.sampling, memory.buffers)
        for owner in owners:
            for name, value in vars(owner).items():
                if isinstance(value, torch.Tensor):
                    yield f"{type(owner).__name__}.{name}", value
