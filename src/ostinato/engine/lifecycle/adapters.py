"""The adapters of an engine, by name: loaded, replaced and forgotten while requests run."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ostinato.errors import ConfigError
from ostinato.lora.adapter_slots import AdapterSlots, LoadedAdapter
from ostinato.lora.adapter_weights import AdapterWeights, Matrices
from ostinato.lora.peft_checkpoint import read_adapter
from ostinato.quoting import shown
from ostinato.runner.model_runner import ModelRunner


class EngineAdapters:
    """Names of adapters; ``runner`` owns their memory. If a method raises, nothing has changed.

    The exception is an interrupt in the middle of a replacement: the adapter is then unloaded.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        weights = runner.adapters
        self._slots = None if weights is None else AdapterSlots(weights.max_loras)

    @property
    def names(self) -> list[str]:
        """The loaded adapters, in the order of loading."""
        return [] if self._slots is None else self._slots.names

    def find(self, name: str) -> LoadedAdapter:
        """The adapter that a request asks for."""
        return self._enabled()[0].find(name)

    def load(self, name: str, path: str | Path, *, in_use: Collection[int]) -> None:
        """Read and check the adapter in ``path``, then write it to a slot not ``in_use``."""
        slots, weights = self._enabled()
        if not isinstance(name, str) or not name:
            raise ConfigError(f"the name of an adapter is a non-empty string, got {shown(name)}")
        slots.choose(name, in_use)  # raises if there is none, before anything is read
        self.put(name, read_adapter(Path(path).expanduser(), weights), in_use=in_use)

    def put(self, name: str, matrices: Matrices, *, in_use: Collection[int] = ()) -> None:
        """Write an adapter to a slot not ``in_use``."""
        slots, _ = self._enabled()
        slot = slots.choose(name, in_use)
        slots.vacate(slot)  # if the write is interrupted, no name stands for half an adapter
        self._runner.load_adapter(slot, matrices)
        slots.add(name, slot)
        self._runner.ledger.check()

    def unload(self, name: str) -> None:
        self._enabled()[0].remove(name)

    def _enabled(self) -> tuple[AdapterSlots, AdapterWeights]:
        weights = self._runner.adapters
        if self._slots is None or weights is None:
            raise ConfigError(
                "adapters are off; build the LLM with enable_lora=True, and max_loras for the "
                "number of adapters"
            )
        return self._slots, weights
