"""Names all memory that the graphs of a runner refer to, for their ledger."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ostinato.graphs.trust.ledger.owners import MemoryKind, NamedMemory, module_memory
from ostinato.models.base import CausalLM
from ostinato.runner.step_memory import StepMemory


class RunnerMemory:
    """The weights of ``models``, with their adapters, and the ``memory`` of a step.

    ``models`` is the runner's list, which is empty once that is closed.
    """

    def __init__(self, models: Sequence[CausalLM], memory: StepMemory) -> None:
        self._models = models
        self._memory = memory

    def named_memory(self) -> Iterator[NamedMemory]:
        for number, model in enumerate(self._models):
            yield from module_memory(model.module, "small-batch model: " if number else "")
            if model.adapters is not None:
                for name, tensor in model.adapters.named_tensors():
                    yield NamedMemory(MemoryKind.STATE, f"adapters' {name}", tensor)
        yield from self._memory.named_memory()
