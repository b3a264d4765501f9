"""``EngineLifecycle``: what an engine does between its requests, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike

from ostinato.config import EngineConfig
from ostinato.engine.lifecycle.sleep import EngineSleep
from ostinato.engine.lifecycle.weights import EngineWeights
from ostinato.engine.thread_use import ThreadUse, one_thread
from ostinato.errors import RequestError
from ostinato.models.given_tensors import NamedTensors
from ostinato.ranks.sharing import Sharing
from ostinato.ranks.watch.interrupts import uninterrupted
from ostinato.runner.model_runner import ModelRunner
from ostinato.scheduling.scheduler import Scheduler

_BUSY_CAPTURE = (
    "graphs cannot be captured while requests are unfinished: a capture uses their buffers"
)


class EngineLifecycle:
    """Prefixes forgotten, weights updated, memory released and restored, graphs dropped and
    captured.

    ``schedulers`` has that of each replica. ``check_open`` raises if the engine is closed;
    ``is_busy`` tells whether a request is unfinished, started or not. One thread at a time may use
    it (``use``), as the engine.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        schedulers: Sequence[Scheduler],
        *,
        sharing: Sharing,
        use: ThreadUse,
        check_open: Callable[[], None],
        is_busy: Callable[[], bool],
    ) -> None:
        self.use = use
        self._runner = runner
        self._schedulers = schedulers
        self._sharing = sharing
        self._check_open = check_open
        self._is_busy = is_busy
        self._weights = EngineWeights(config, runner)
        self._sleep = EngineSleep(config, runner, self._weights)
        self._lazy_capture = self._is_lazy = config.graphs.lazy_capture

    def check_awake(self) -> None:
        """Raises AsleepError while the engine is asleep."""
        self._sleep.check_awake()

    def check_ready(self) -> None:
        """Raises an error while the engine is asleep, or some weights are not whole."""
        self._sleep.check_awake()
        self._weights.check_whole()

    def _check_idle(self, why: str) -> None:
        """Raises RequestError, which begins with ``why``, while a request is unfinished."""
        if self._is_busy():
            raise RequestError(f"{why}; read open streams to their ends or close() them first")

    # --- weights and what depends on them ------------------------------------------------------

    @one_thread(is_part=True)
    def reset_prefix_cache(self) -> None:
        """Forget the cached prefixes of all replicas; requests go on."""
        self._check_open()
        self._sharing.call(self._forget_prefixes)

    def _forget_prefixes(self) -> None:
        for scheduler in self._schedulers:
            scheduler.reset_prefix_cache()

    @one_thread(is_part=True)
    def update_weights(
        self, weights: str | PathLike[str] | NamedTensors, *, keep_prefix_cache: bool
    ) -> None:
        """Overwrite weights of the model in place, while no request is unfinished.

        If all ranks run the script, only the ``weights`` of rank 0 are read.
        """
        self._check_open()
        self._sleep.check_awake()
        self._weights.check_supported()
        names = self._sharing.call(lambda: self._update_weights(weights, keep_prefix_cache))
        self._weights.note_written(names)

    def _update_weights(
        self, weights: str | PathLike[str] | NamedTensors, keep_prefix_cache: bool
    ) -> list[str]:
        self._check_idle(
            "weights cannot change while requests are unfinished: their keys and values are those "
            "of the old weights"
        )
        update = self._weights.prepare(weights)
        if not keep_prefix_cache:
            self._forget_prefixes()
        self._weights.write(update)
        self._runner.ledger.check()
        return list(update.names)

    # --- sleep ---------------------------------------------------------------------------------

    @one_thread(is_part=True)
    def sleep(self, level: int) -> None:
        """Release the KV cache, and the weights, on all ranks."""
        self._check_open()
        self._sleep.check_level(level)
        if self._sleep.level is None:
            with uninterrupted():  # or a step could run on memory that is not there
                self._sharing.call(lambda: self._release(level))
                self._sleep.note_asleep(level)

    def _release(self, level: int) -> None:
        self._check_idle(
            "the engine cannot sleep while requests are unfinished: their keys and values would be "
            "lost"
        )
        self._forget_prefixes()
        self._sleep.release(level)

    @one_thread(is_part=True)
    def wake(self) -> None:
        """Map the memory again, at the same addresses."""
        self._check_open()
        if self._sleep.level is not None:
            with uninterrupted():
                self._sharing.call(self._sleep.restore)
                self._sleep.note_awake()

    @property
    def sleep_level(self) -> int | None:
        """1 or 2 while asleep; None while awake."""
        return self._sleep.level

    # --- graphs --------------------------------------------------------------------------------

    @one_thread(is_part=True)
    def clear_graphs(self) -> None:
        """Drop all graphs and their memory, on all ranks; unfinished requests go on eagerly."""
        self._check_open()
        self._sharing.call(self._clear_graphs)

    def _clear_graphs(self) -> None:
        self._is_lazy = False  # not to bring back what was just dropped
        self._runner.clear_graphs()
        self._runner.ledger.check()

    @one_thread(is_part=True)
    def capture_graphs(self) -> int:
        """Capture the plan's missing graphs, on all ranks; returns the bytes it took on this."""
        self._check_open()
        self._sleep.check_awake()
        return self._sharing.call(self._capture_graphs)

    def _capture_graphs(self) -> int:
        self._check_idle(_BUSY_CAPTURE)
        self._is_lazy = self._lazy_capture
        taken = self._runner.capture_model()
        self._runner.ledger.check()
        return taken

    @one_thread(is_part=True)
    def capture_next(self) -> bool:
        """Capture the missing graph that most batches so far would have used, on all ranks.

        Returns whether there was one.
        """
        self._check_open()
        self._sleep.check_awake()
        return self._sharing.call(self._capture_next)

    def _capture_next(self) -> bool:
        self._check_idle(_BUSY_CAPTURE)
        found = self._runner.capture_next()
        self._runner.ledger.check()
        return found

    @property
    def captures_when_idle(self) -> bool:
        """Whether there are graphs to capture now that no request waits for (``lazy_capture``)."""
        return self._is_lazy and self._sleep.level is None and self._runner.needs_capture
