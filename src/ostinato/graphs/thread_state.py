"""Leaves a thread as it was found when a call raises, even if a signal handler made it raise.

``with`` blocks restore what they changed, but not if Ctrl-C arrives at the moment one is left: then
``__exit__`` ends before its first instruction. Autograd would stay off, Python's garbage collector
too, or every later operator would meet the guard of a capture that has ended. So calls that change
such state note it when they begin (``leaving_as_found``), and put it back if they raise.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import _GeneratorContextManager, contextmanager
from contextvars import ContextVar, copy_context
from typing import Any, ParamSpec, TypeVar

import torch

from ostinato import compat

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_variables: list[tuple[ContextVar[Any], Any]] = []  # with their defaults


def thread_variable(name: str, default: T) -> ContextVar[T]:
    """A context variable that ``leaving_as_found`` puts back."""
    variable = ContextVar(f"ostinato_{name}", default=default)
    _variables.append((variable, default))
    return variable


def _nothing() -> None: ...


class SharedSwitch:
    """A switch of the whole process, on while any thread holds it.

    Holds of several threads may overlap in any order: the first calls ``turn_on``, the last
    ``turn_off``, which must bear that ``turn_on`` failed, and that it is called twice.
    """

    def __init__(
        self, turn_on: Callable[[], None] = _nothing, turn_off: Callable[[], None] = _nothing
    ) -> None:
        self._turn_on = turn_on
        self._turn_off = turn_off
        self._lock = threading.Lock()
        self._held: set[object] = set()

    @property
    def num_holds(self) -> int:
        return len(self._held)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the switch on inside."""
        hold = object()
        _holds.set((*_holds.get(), (self, hold)))
        try:
            with self._lock:
                self._held.add(hold)
                if len(self._held) == 1:
                    self._turn_on()
            yield
        finally:
            self.release(hold)
            _holds.set(tuple(each for each in _holds.get() if each[1] is not hold))

    def release(self, hold: object) -> None:
        """End a hold. Doing so twice is harmless."""
        with self._lock:
            if hold in self._held:
                if len(self._held) == 1:
                    self._turn_off()
                self._held.discard(hold)


_holds: ContextVar[tuple[tuple[SharedSwitch, object], ...]] = ContextVar(
    "ostinato_holds", default=()
)
_entered_for_good: list[Any] = []
# Functions that leave a block when what their frame refers to is dropped.
_RESTORING = {
    function.__code__
    for block in (_GeneratorContextManager, torch.inference_mode)
    for function in (block.__enter__, block.__exit__)
}


def _end_interrupted_blocks(error: BaseException) -> None:
    """Drop the frames that were to leave a ``with`` block: what they refer to leaves it then.

    That is a generator, or torch's guard, and would otherwise happen when the error is dropped.
    """
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code in _RESTORING:
            traceback.tb_frame.clear()
        traceback = traceback.tb_next


class AutogradState:
    """Whether this thread recorded gradients when it was built: what a replay changes."""

    __slots__ = ("_grad", "_inference")

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()

    def restore(self, error: BaseException) -> None:
        """Put it back after ``error``."""
        _end_interrupted_blocks(error)
        if torch.is_inference_mode_enabled() != self._inference:
            # There is no setter: enter a block that is never left.
            block = torch.inference_mode(self._inference)
            block.__enter__()
            _entered_for_good.append(block)
        if torch.is_grad_enabled() != self._grad:
            torch.set_grad_enabled(self._grad)


class _AutocastState:
    """This thread's autocast when it was built."""

    __slots__ = ("_caching", "_depth", "_devices")

    def __init__(self) -> None:
        self._devices = [
            (each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each))
            for each in ("cpu", "cuda")
        ]
        self._caching = torch.is_autocast_cache_enabled()
        self._depth = _autocast_depth()

    def restore(self) -> None:
        for device_type, enabled, dtype in self._devices:
            torch.set_autocast_enabled(device_type, enabled)
            torch.set_autocast_dtype(device_type, dtype)
        torch.set_autocast_cache_enabled(self._caching)
        for _ in range(_autocast_depth() - self._depth):
            torch.autocast_decrement_nesting()
        if self._depth == 0:
            torch.clear_autocast_cache()


def _autocast_depth() -> int:
    """The number of autocast blocks this thread is in. Leaving the outermost clears the cache."""
    try:
        return torch.autocast_increment_nesting() - 1
    finally:
        torch.autocast_decrement_nesting()


class _ThreadState:
    """The state of this thread when it was built: what a capture or a step may change."""

    __slots__ = ("_autocast", "_autograd", "_context", "_modes")

    def __init__(self) -> None:
        self._context = copy_context()
        self._autograd = AutogradState()
        self._autocast = _AutocastState()
        self._modes = compat.dispatch_modes(), compat.function_modes()

    def restore(self, error: BaseException) -> None:
        dispatch_modes, function_modes = self._modes
        self._autograd.restore(error)
        _leave(compat.dispatch_modes, dispatch_modes, compat.pop_dispatch_mode)
        if not dispatch_modes:
            compat.reset_mode_flags()
        _leave(compat.function_modes, function_modes, compat.pop_function_mode)
        self._end_holds()
        for variable, default in _variables:
            variable.set(self._context.get(variable, default))
        self._autocast.restore()

    def _end_holds(self) -> None:
        found = self._context.get(_holds, ())
        for each in _holds.get():
            if each not in found:
                switch, hold = each
                switch.release(hold)
        _holds.set(found)


def _leave(modes: Callable[[], list[Any]], found: list[Any], pop: Callable[[], object]) -> None:
    """Leave the modes that are not among those ``found``."""
    for mode in reversed([each for each in modes() if each not in found]):
        try:
            mode.__exit__(KeyboardInterrupt, None, None)
        except Exception:  # a part of that was done when it was interrupted
            if modes()[-1:] == [mode]:
                pop()


def leaving_as_found(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate ``function`` so that it leaves its thread as it found it if it raises.

    That is: autograd, inference mode, autocast, torch's modes, and our own scopes.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        found = _ThreadState()
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            found.restore(error)
            raise

    return wrapped
