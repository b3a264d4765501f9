"""Compiles kernels side by side, ahead of their first launch.

Triton compiles a kernel when it is first launched, and the launch waits: a model's fifty take half
a minute, on one core. Inside ``compiling_ahead`` launches run nothing and only ask for their
kernel. Threads compile them: MLIR, LLVM, ptxas and the C compiler run without the GIL, and what
holds it, the translation of a kernel's Python, is a tenth of the work.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from threading import Lock, Thread
from typing import Any

import torch

from ostinato.compat import build_launcher, cache_key, compile_mode, triton_compile_mode
from ostinato.ops.triton.launch import without_running
from ostinato.progress import ProgressBar

logger = logging.getLogger(__name__)

_MOST_THREADS = 16
_SHOWN_AFTER_S = 0.5  # kernels that are in Triton's cache on disk are there before that


@contextmanager
def triton_starting(device: torch.device) -> Iterator[None]:
    """Start Triton in a thread, beside what runs inside; it has started when this ends.

    Importing it, its driver, and a hash of its files for the keys of its cache take every process
    that launches a kernel a second. Only CUDA needs it.
    """
    if device.type != "cuda" or find_spec("triton") is None:
        yield
        return
    thread = Thread(target=_start_triton, name="start Triton")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _start_triton() -> None:
    try:
        runtime = import_module("triton.runtime")
        hash_files = cache_key.find()
        if hash_files is not None:
            hash_files()
        runtime.driver.active  # noqa: B018  the first access builds it
    except Exception as error:  # the first launch raises it
        logger.debug("Triton does not start: %s: %s", type(error).__name__, error)


def can_compile_ahead() -> bool:
    """Whether this Triton compiles in threads when told to; it must be installed."""
    return triton_compile_mode() is not None


@contextmanager
def compiling_ahead(*, show_progress: bool = False) -> Iterator[None]:
    """Inside, launches of this thread run nothing; their kernels are compiled until it ends.

    Later launches find them compiled. A kernel that does not compile is logged, and its launch
    raises. Raises ConfigError unless ``can_compile_ahead``.
    """
    threads = ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS), "compile")
    try:
        kernels = _Kernels(threads)
        with without_running(kernels.request):
            yield
        kernels.finish(show_progress=show_progress)
    finally:  # after an interrupt, wait only for what has begun
        threads.shutdown(cancel_futures=True)


class _Kernels:
    """The kernels that were asked for; the value of Triton's ``triton_compile_mode``."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._mode = triton_compile_mode() or compile_mode.refuse()
        self._threads = threads
        self._keys: set[str] = set()
        self._jobs: dict[Future[Any], tuple[str, Callable[[Any], None]]] = {}
        self._name = ""  # of the kernel that is being asked for
        self._launchers: defaultdict[str, Lock] = defaultdict(Lock)

    def request(self, kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        self._name = kernel.__name__
        before = self._mode.set(self)
        try:
            kernel.warmup(*arguments, grid=(1,), **constants)
        except Exception as error:
            _log_failure(self._name, error)
        finally:
            self._mode.reset(before)

    def submit(
        self, key: str, compile_kernel: Callable[[], Any], finish: Callable[[Any], None]
    ) -> None:
        """Triton calls it during ``request``, unless this process has the kernel."""
        if key not in self._keys:
            self._keys.add(key)
            self._jobs[self._threads.submit(self._compile, compile_kernel)] = self._name, finish

    def _compile(self, compile_kernel: Callable[[], Any]) -> Any:
        kernel = compile_kernel()
        with self._launchers[str(kernel.src.signature)]:  # the first builds it, others find it
            build_launcher(kernel)
        return kernel

    def finish(self, *, show_progress: bool) -> None:
        """Wait for all of them."""
        for job in ProgressBar(
            as_completed(self._jobs),
            desc="compiling kernels",
            total=len(self._jobs),
            disable=not show_progress,
            delay=_SHOWN_AFTER_S,
        ):
            name, finish = self._jobs[job]
            error = job.exception()
            if error is None:
                finish(job.result())
            else:
                _log_failure(name, error)


def _log_failure(name: str, error: BaseException) -> None:
    logger.warning(
        "%s could not be compiled ahead (%s: %s); it is compiled again when it is launched",
        name,
        type(error).__name__,
        error,
    )
