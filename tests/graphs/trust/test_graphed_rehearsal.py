"""The runs that ``graphed()`` makes of a callable before its graphs are captured."""

from __future__ import annotations

import itertools

import pytest
import torch

from ostinato import CaptureError, graphed


@pytest.mark.parametrize("sizes", [[2], [2, 4]])
def test_warmups_run_before_each_capture(device: torch.device, sizes: list[int]) -> None:
    def num_runs(num_warmups: int) -> int:
        runs = itertools.count()

        def function(x: torch.Tensor) -> torch.Tensor:
            next(runs)
            return x * 2

        with graphed(function, sizes=sizes, num_warmups=num_warmups) as fast:
            fast(torch.randn(2, 3, device=device))
        return next(runs)

    assert [num_runs(count) - num_runs(0) for count in (1, 3)] == [len(sizes), 3 * len(sizes)]


def test_what_only_later_runs_write_is_put_back_too(device: torch.device) -> None:
    """The first run creates something for later runs, which then write elsewhere."""
    made: list[torch.Tensor] = []
    state = torch.zeros(3, device=device)

    def function(x: torch.Tensor) -> torch.Tensor:
        if made:
            state.add_(1)
        else:
            made.append(torch.ones(3, device=x.device))
        return x + made[0]

    with graphed(function, sizes=[2, 4]) as fast:
        for call in range(1, 4):
            x = torch.randn(2, 3, device=device)
            assert torch.equal(fast(x), x + 1)
            assert state.tolist() == [call] * 3


def test_a_write_of_the_first_call_alone_is_refused(device: torch.device) -> None:
    """Even if no result shows it: a capture undoes its writes, and the flag says it is done."""

    class Noting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("first", torch.zeros(3))
            self.is_noted = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.is_noted:
                self.first.copy_(x[0])
                self.is_noted = True
            return x + 1

    model = Noting().to(device)
    x = torch.rand(2, 3, device=device)
    with (
        graphed(model, sizes=[2]) as fast,
        pytest.raises(CaptureError, match="only the first call writes buffer 'first'"),
    ):
        fast(x)
    assert not model.is_noted


def test_a_result_of_another_structure_each_run_is_refused(device: torch.device) -> None:
    runs = itertools.count(1)
    with (
        graphed(lambda x: [x] * next(runs), sizes=[2]) as fast,
        pytest.raises(CaptureError, match="the structure of the result changes from run to run"),
    ):
        fast(torch.rand(2, 3, device=device))


def test_a_batch_that_never_changes_is_compared_three_times(device: torch.device) -> None:
    """It is the one of the capture, which proves little, but there may be no other."""
    runs = itertools.count()

    def function(x: torch.Tensor) -> torch.Tensor:
        next(runs)
        return x + 1

    with graphed(function, sizes=[2]) as fast:
        x = torch.rand(2, 3, device=device)
        counts = []
        for _ in range(5):
            assert torch.equal(fast(x), x + 1)
            counts.append(next(runs))
    assert [after - before for before, after in itertools.pairwise(counts)] == [2, 2, 1, 1]


def test_a_full_batch_is_compared_once_even_if_it_looks_like_padding(device: torch.device) -> None:
    """It has no padding rows that it could be taken for."""
    runs = itertools.count()

    def function(x: torch.Tensor) -> torch.Tensor:
        next(runs)
        return x + 1

    with graphed(function, sizes=[2]) as fast:
        x = torch.zeros(2, 3, device=device)
        fast(x + 1)
        fast(x)
        before = next(runs)
        for _ in range(3):
            assert torch.equal(fast(x), x + 1)
        assert next(runs) == before + 1
