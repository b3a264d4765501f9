"""Ctrl-C at a chosen moment: a tracer raises as the n-th Python function of a call begins.

Signal handlers run there, so ``__exit__`` of a ``with`` block may end before its first instruction.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import format_exception
from types import FrameType
from typing import Any

import torch
import torch._dynamo  # captures heed it once it is imported
from torch.utils import _python_dispatch as python_dispatch
from torch.utils._python_dispatch import _len_torch_dispatch_stack, is_in_torch_dispatch_mode

from ostinato import ContextError, get_forward_context


class Interrupt(BaseException):
    """Like KeyboardInterrupt: no Exception."""


def interrupt_at(number: int, call: Callable[[], object]) -> BaseException | None:
    """Run ``call`` until the ``number``-th Python function begins; None if there are fewer.

    Returns the interrupt, or what an extension module made of it. It is an empty one where Python
    ignored it, as it does in finalisers.
    """
    left = number

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            sys.settrace(None)
            raise Interrupt

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupt as interrupt:
        return interrupt
    except Exception as error:
        if left >= 0:
            raise
        return error
    finally:
        sys.settrace(previous)
    return Interrupt() if left < 0 else None


def thread_state() -> dict[str, object]:
    """What an interrupted call must leave as it was."""
    try:
        context: object = get_forward_context()
    except ContextError:
        context = None
    return {
        "forward context": context,
        "grad": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "autocast's dtypes": (torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")),
        "autocast's cache": torch.is_autocast_cache_enabled(),
        "autocast's depth": (
            torch.autocast_increment_nesting(),
            torch.autocast_decrement_nesting(),
        ),
        "dispatch modes": (_len_torch_dispatch_stack(), is_in_torch_dispatch_mode()),
        "compiler": (
            torch._dynamo.eval_frame._stance.stance,
            python_dispatch._is_in_any_mode_without_ignore_compile_internals,
        ),
        "default device": torch.get_default_device(),
        "dispatch keys": (
            str(torch._C._dispatch_tls_local_include_set()),
            str(torch._C._dispatch_tls_local_exclude_set()),
        ),
        "collecting garbage": gc.isenabled(),
    }


def check_interrupts(call: Callable[[], object], numbers: range) -> int:
    """Interrupt ``call`` at each of ``numbers``, until it has fewer functions; count interrupts.

    The state of the thread must be as before, both while the error is held (as notebooks do) and
    when it has been dropped.
    """
    before, count = thread_state(), 0
    with finalisers_failing_silently():
        for number in numbers:
            interrupt = interrupt_at(number, call)
            if interrupt is None:
                break
            count += 1
            where = "".join(format_exception(interrupt)[-12:])
            _check_same(before, f"after an interrupt at function {number}:\n{where}")
            del interrupt
            _check_same(before, f"without the error of an interrupt at {number}:\n{where}")
    return count


def _check_same(before: dict[str, object], when: str) -> None:
    after = thread_state()
    changed = {name: (was, after[name]) for name, was in before.items() if after[name] != was}
    assert not changed, f"{changed} {when}"


@contextmanager
def finalisers_failing_silently() -> Iterator[None]:
    """Python ignores an interrupt in a finaliser, and only reports it."""
    previous, sys.unraisablehook = sys.unraisablehook, lambda report: None
    try:
        yield
    finally:
        gc.collect()
        sys.unraisablehook = previous
