"""``LifecycleCalls``: the calls of an ``LLM`` between requests, with their help."""

from __future__ import annotations

from abc import abstractmethod
from os import PathLike
from typing import Literal

from ostinato.engine.lifecycle.lifecycle import EngineLifecycle
from ostinato.engine.thread_use import ThreadUse, one_thread
from ostinato.models.given_tensors import NamedTensors


class LifecycleCalls:
    """Prefixes, weights, sleep and graphs of a model that generates."""

    @property
    @abstractmethod
    def use(self) -> ThreadUse:
        """Tracks which thread is in the engine."""

    @property
    @abstractmethod
    def _lifecycle(self) -> EngineLifecycle:
        """The engine's; raises for a model that does not generate."""

    @one_thread("LLM.reset_prefix_cache")
    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, of all replicas; later prompts are computed from scratch.

        Unfinished requests go on with their keys and values. Blocks that they complete from now on
        may be reused.
        """
        self._lifecycle.reset_prefix_cache()

    @one_thread("LLM.update_weights")
    def update_weights(
        self,
        weights: str | PathLike[str] | NamedTensors,
        *,
        keep_prefix_cache: bool = False,
    ) -> None:
        """Overwrite weights of the model in place, all or some; graphs stay valid.

        ``weights``: pairs of a checkpoint name and a tensor, on any device and in any float dtype;
        a mapping from one to the other, such as a ``state_dict``; or the path of a safetensors file
        or directory. Tensors of a mapping or a list are read where they are; those of any other
        iterable are first copied to host memory, all of them, because it may reuse their memory.

        Names, shapes, dtypes and values are checked as a checkpoint's are. If this raises
        ``ModelLoadError``, ``ConfigError`` or ``RequestError``, or the iterable raises, nothing has
        changed. If it is interrupted while it writes, requests are refused until the same weights
        are written again.

        No request may be unfinished. Cached prefixes are forgotten, unless ``keep_prefix_cache``:
        keys and values of the old weights are then reused. Adapters stay as they are, and so do the
        weights of draft models. All ranks and replicas are updated; under ``torchrun`` every rank
        makes the call, and the weights of rank 0 are read.
        """
        self._lifecycle.update_weights(weights, keep_prefix_cache=keep_prefix_cache)

    @one_thread("LLM.sleep")
    def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Release the memory of the KV cache and the weights; ``wake`` brings it back.

        Level 1 keeps the weights in host memory, where they are anyway on the CPU. Level 2 discards
        them: after ``wake``, requests are refused until ``update_weights`` has written all of them.
        Cached prefixes are forgotten. Graphs, buffers, adapters and draft models keep their memory.

        Needs ``enable_sleep_mode``. No request may be unfinished; until ``wake``, requests and
        updates raise ``AsleepError``. Sleeping twice at the same level is harmless. If this raises
        ``SleepError``, host memory has no room, and the engine is awake. On several ranks, all
        sleep.
        """
        self._lifecycle.sleep(level)

    @one_thread("LLM.wake")
    def wake(self) -> None:
        """Map the memory again at the same addresses, so that every graph stays valid.

        The KV cache is empty. If this raises ``SleepError``, the device has no room: the engine is
        still asleep, has lost nothing, and ``wake`` may be called again. Waking an engine that is
        awake is harmless.
        """
        self._lifecycle.wake()

    @property
    def sleep_level(self) -> int | None:
        """1 or 2 while asleep; None while awake."""
        return self._lifecycle.sleep_level

    @one_thread("LLM.clear_graphs")
    def clear_graphs(self) -> None:
        """Drop all graphs and free their memory; every step runs eagerly until they are captured.

        Unfinished requests go on.
        """
        self._lifecycle.clear_graphs()

    @one_thread("LLM.capture_graphs")
    def capture_graphs(self) -> int:
        """Capture the graphs of the plan that do not exist; returns the bytes it took.

        After ``clear_graphs``, all of them. No request may be unfinished.
        """
        return self._lifecycle.capture_graphs()

    @one_thread("LLM.capture_next")
    def capture_next(self) -> bool:
        """Capture one missing graph, that for the most batches so far; whether there was one.

        For ``GraphConfig(lazy_capture=True)``, whenever there is time. No request may be
        unfinished. A graph that cannot be captured is logged, and its batches go on to run eagerly;
        on several ranks it raises ``CaptureError``.
        """
        return self._lifecycle.capture_next()
