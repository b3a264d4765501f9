"""``EngineSleep``: whether an engine is asleep, and what it does then."""

from __future__ import annotations

from ostinato.config import EngineConfig
from ostinato.engine.lifecycle.weights import EngineWeights
from ostinato.errors import AsleepError, ConfigError, SleepError
from ostinato.quoting import said, shown
from ostinato.runner.model_runner import ModelRunner

LEVELS = (1, 2)


class EngineSleep:
    """Releases the memory of ``runner``, and has it back. ``level`` is None while awake."""

    def __init__(self, config: EngineConfig, runner: ModelRunner, weights: EngineWeights) -> None:
        self._is_enabled = config.enable_sleep_mode
        self._runner = runner
        self._weights = weights
        self.level: int | None = None

    def check_awake(self) -> None:
        """Raises AsleepError while the memory is released."""
        if self.level is not None:
            raise AsleepError(f"the engine is asleep (level {self.level}); call wake() first")

    def check_level(self, level: int) -> None:
        """Raises an error if the engine cannot sleep at ``level``."""
        if not self._is_enabled:
            raise ConfigError("sleep() needs an LLM built with enable_sleep_mode=True")
        if type(level) is not int or level not in LEVELS:
            raise ConfigError(
                f"level must be 1 (weights are kept in host memory) or 2 (they are discarded), got "
                f"{shown(level)}"
            )
        if level == 2:
            self._weights.check_can_discard()
        if self.level not in (None, level):
            raise AsleepError(
                f"the engine is asleep at level {self.level}; call wake() before sleep({level})"
            )

    def release(self, level: int) -> None:
        """Release the memory, on all ranks."""
        self.note_asleep(level)  # before any of it is gone
        error = self._runner.sleep(keep_weights=level == 1)
        if error is not None:
            self.note_awake()
            raise SleepError(
                f"the engine cannot sleep: {said(error)}; it stays awake. Free host memory, or "
                "use sleep(level=2), which keeps no copy of the weights"
            ) from error

    def note_asleep(self, level: int) -> None:
        """The memory is released. Every rank that runs the script knows it."""
        self.level = level
        if level == 2:
            self._weights.discard()

    def restore(self) -> None:
        """Map the memory again, on all ranks."""
        error = self._runner.wake()
        if error is not None:
            raise SleepError(
                f"the engine cannot wake: {said(error)}; it stays asleep and has lost nothing. "
                "Free memory of the device, then call wake() again"
            ) from error
        self._runner.ledger.check()

    def note_awake(self) -> None:
        self.level = None
