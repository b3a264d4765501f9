"""The CPU pool's address range, on a system that limits address space."""

from __future__ import annotations

import mmap

import pytest
import torch

from ostinato import GraphPool
from ostinato.errors import CaptureOutOfMemoryError
from ostinato.graphs.backends.cpu.arena import Arena

SMALLEST = 1 << 26


class LimitedSystem:
    """Refuses ranges of more than ``most`` bytes, and records what was requested."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int, error: Exception) -> None:
        self.asked: list[int] = []
        reserve = mmap.mmap

        def limited(fileno: int, length: int, **options: int) -> mmap.mmap:
            self.asked.append(length)
            if length > most:
                raise error
            return reserve(fileno, length, **options)

        monkeypatch.setattr(mmap, "mmap", limited)


@pytest.mark.parametrize("error", [OSError("Cannot allocate memory"), ValueError("too large")])
def test_no_address_space_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    system = LimitedSystem(monkeypatch, 0, error)
    with pytest.raises(CaptureOutOfMemoryError) as raised:
        GraphPool("cpu")
    last = system.asked[-1]
    assert str(raised.value) == (
        f"cannot reserve {last:,} bytes of address space for the graph pool: {error}"
    )
    assert raised.value.__cause__ is error
    assert SMALLEST // 2 < last <= SMALLEST
    assert all(size > SMALLEST for size in system.asked[:-1])


def test_a_limited_system_gives_a_smaller_range(monkeypatch: pytest.MonkeyPatch) -> None:
    system = LimitedSystem(monkeypatch, SMALLEST, OSError("Cannot allocate memory"))
    arena = Arena()
    first, *_, last = system.asked
    assert first > SMALLEST >= last
    assert system.asked == [first // 2**halved for halved in range(len(system.asked))]
    block = arena.strong((last // 64 * 64,), (1,), dtype=torch.uint8)
    block[-1] = 7
    assert block[-1].item() == 7
