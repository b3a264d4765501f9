"""``EngineWeights``: new weights for an engine's model, and what runs only if they are whole."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike

from ostinato.config import EngineConfig
from ostinato.errors import ConfigError, ModelLoadError
from ostinato.loading.update import (
    WeightUpdate,
    check_can_discard,
    check_can_update,
    prepare_update,
    weight_names,
)
from ostinato.models.given_tensors import NamedTensors
from ostinato.quoting import listed
from ostinato.runner.model_runner import ModelRunner


class EngineWeights:
    """Updates the weights that ``runner`` runs; knows which an interrupted update left half new."""

    def __init__(self, config: EngineConfig, runner: ModelRunner) -> None:
        self._config = config
        self._runner = runner
        self._half_written: set[str] = set()
        self._discarded: set[str] = set()

    def check_supported(self) -> None:
        """Raises ConfigError if this engine's weights cannot be updated."""
        check_can_update(self._runner.models)
        if self._config.enable_expert_parallel and self._config.world_size > 1:
            raise ConfigError(
                "update_weights does not support enable_expert_parallel: no rank has all experts "
                "to check; build a new LLM from the new checkpoint"
            )

    def check_can_discard(self) -> None:
        """Raises ConfigError if the weights could not be written again."""
        self.check_supported()
        check_can_discard(self._runner.models)

    def check_whole(self) -> None:
        """Raises ModelLoadError while some weights are half written or discarded."""
        if self._discarded:
            raise ModelLoadError(
                "sleep(level=2) discarded the weights, and these are not written yet: "
                f"{listed(sorted(self._discarded))}; call update_weights with them"
            )
        if self._half_written:
            raise ModelLoadError(
                "an update of the weights was interrupted, so some are old and some are new: "
                f"{listed(sorted(self._half_written))}; call update_weights with all of them again"
            )

    def prepare(self, weights: str | PathLike[str] | NamedTensors) -> WeightUpdate:
        """Check new weights. Changes nothing."""
        return prepare_update(self._runner.models, weights)

    def write(self, update: WeightUpdate) -> None:
        """Overwrite the weights in place, on all ranks."""
        self._half_written |= update.names
        self._runner.write_weights(update)
        self._half_written -= update.names

    def note_written(self, names: Iterable[str]) -> None:
        """These weights are whole, on all ranks."""
        self._discarded.difference_update(names)

    def discard(self) -> None:
        """Nothing runs until all weights have been written."""
        self._discarded |= weight_names(self._runner.models)
