"""``uninterrupted``: Ctrl-C comes after the block, however that ends, and is never lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ostinato.ranks.watch.interrupts import uninterrupted


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """The signals that a handler of the user's has got."""
    numbers: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGINT, previous)


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def fail() -> None:
    raise ValueError("the block's own")


def run(*steps: Callable[[], object]) -> None:
    with uninterrupted():
        for step in steps:
            step()


def test_it_comes_after_the_block() -> None:
    done = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        run(press_ctrl_c, done.set)
    assert done.is_set()


def test_it_comes_after_a_block_that_fails() -> None:
    with pytest.raises(KeyboardInterrupt) as interrupt:
        run(press_ctrl_c, fail)
    assert isinstance(interrupt.value.__context__, ValueError)


def test_a_handler_of_the_users_is_called(handled: list[int]) -> None:
    num_inside: list[int] = []
    run(press_ctrl_c, lambda: num_inside.append(len(handled)))
    assert (num_inside, handled) == ([0], [signal.SIGINT])
    with pytest.raises(ValueError, match="the block's own"):
        run(press_ctrl_c, fail)
    assert handled == [signal.SIGINT] * 2


def test_a_second_one_is_not_deferred() -> None:
    before: Any = signal.getsignal(signal.SIGINT)
    done = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        run(press_ctrl_c, press_ctrl_c, done.set)
    assert not done.is_set()
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_defer_nothing(handled: list[int]) -> None:
    done = threading.Event()
    thread = threading.Thread(target=run, args=(done.set,))
    thread.start()
    thread.join()
    assert done.is_set()
    assert not handled
