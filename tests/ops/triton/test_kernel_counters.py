"""Counters of split kernels: zero for every launch, and never shared between launches."""

from __future__ import annotations

import pytest
import torch

from ostinato import GraphPool
from ostinato.errors import CaptureError
from ostinato.graphs.capture.segments import Recording, eager_break, open_recording
from ostinato.ops.triton.counters import SLAB_SIZE, CounterSlabs, take_counters

CPU = torch.device("cpu")


def places(tensor: torch.Tensor) -> set[int]:
    return set(range(tensor.data_ptr(), tensor.data_ptr() + 4 * tensor.shape[0], 4))


def test_eager_launches_share_none_and_inherit_no_dirt(device: torch.device) -> None:
    first = take_counters(device, 5)
    second = take_counters(device, 7)
    assert not places(first) & places(second)
    for _ in range(20):  # memory of aborted launches
        take_counters(device, 5).fill_(3)
        assert take_counters(device, 5).tolist() == [0] * 5


@pytest.mark.parametrize("counts", [[1, 33, 32, 7] * 4, [SLAB_SIZE, 1, SLAB_SIZE - 5, 4, 3]])
def test_launches_of_a_recording_have_disjoint_aligned_zeros(counts: list[int]) -> None:
    slabs = CounterSlabs(CPU)
    taken = [slabs.take(count) for count in counts]
    assert [len(each) for each in taken] == counts
    assert not any(each.any() for each in taken)
    assert all(each.data_ptr() % 16 == 0 for each in taken)  # one compiled kernel serves them all
    assert len(set.union(*map(places, taken))) == sum(counts)


def test_a_launch_larger_than_a_slab_has_one_of_its_own() -> None:
    slabs = CounterSlabs(CPU)
    small, large, after = slabs.take(3), slabs.take(2 * SLAB_SIZE), slabs.take(3)
    assert len(large) == 2 * SLAB_SIZE
    assert not places(large) & (places(small) | places(after))


def current_recording() -> Recording:
    recording = open_recording()
    assert recording is not None
    return recording


def test_what_a_recording_keeps_is_the_same_in_all_its_segments_and_no_other(
    pool: GraphPool, device: torch.device
) -> None:
    x = torch.ones(4, device=device)
    kept: list[torch.Tensor] = []

    @eager_break
    def between() -> None:
        assert open_recording() is None

    def forward() -> torch.Tensor:
        for _ in range(2):
            kept.append(current_recording().kept("scratch", lambda: torch.zeros_like(x)))
        between()
        kept.append(current_recording().kept("scratch", lambda: torch.zeros_like(x)))
        kept.append(current_recording().kept("other", lambda: torch.zeros_like(x)))
        return x * 2

    pool.capture(forward, split_at_breaks=True)
    assert kept[0] is kept[1] is kept[2] is not kept[3]
    pool.capture(forward, split_at_breaks=True)
    assert kept[4] is not kept[0]


def test_no_later_tensor_is_placed_on_what_a_recording_keeps(
    pool: GraphPool, device: torch.device
) -> None:
    x = torch.ones(4, device=device)
    zeroed: list[int] = []

    def forward() -> torch.Tensor:
        scratch = current_recording().kept("scratch", lambda: torch.zeros_like(x))
        zeroed.append(scratch.data_ptr())
        del scratch
        for _ in range(8):
            later = x + 1
            assert later.data_ptr() != zeroed[-1]
        return later * 2

    captured = pool.capture(forward)
    pool.replay(captured.tape)
    assert captured.output.tolist() == [4.0] * 4


def test_a_recording_that_failed_keeps_nothing(pool: GraphPool, device: torch.device) -> None:
    x = torch.ones(4, device=device)
    made: list[int] = []

    def forward(fails: bool) -> torch.Tensor:
        current_recording().kept("scratch", lambda: made.append(1) or torch.zeros_like(x))
        if fails:
            raise CaptureError("on purpose")
        return x * 2

    with pytest.raises(CaptureError, match="on purpose"):
        pool.capture(lambda: forward(True))
    pool.capture(lambda: forward(False))
    assert len(made) == 2
