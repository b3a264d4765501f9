"""Progress bars of several threads, one of which was interrupted."""

from __future__ import annotations

import threading

import pytest
from interrupts import check_interrupts

from ostinato.progress import ProgressBar


@pytest.mark.parametrize("disable", [False, True], ids=["shown", "hidden"])
def test_an_interrupted_bar_does_not_hold_up_others(disable: bool) -> None:
    def count() -> None:
        for _ in ProgressBar(range(3), disable=disable, mininterval=0):
            pass

    def counted_elsewhere() -> bool:
        thread = threading.Thread(target=count, daemon=True)
        thread.start()
        thread.join(60)
        return not thread.is_alive()

    for number in range(200):
        if not check_interrupts(count, range(number, number + 1)):
            break
        assert counted_elsewhere(), f"after an interrupt at function {number}"
    assert number > 10
