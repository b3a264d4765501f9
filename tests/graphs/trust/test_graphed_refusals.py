"""What ``graphed()`` refuses on a first or later call, with a message that says why."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from ostinato import graphed
from ostinato.errors import BatchError, CaptureError
from ostinato.graphs.policy.descriptor import Reason


def test_arguments_that_contain_themselves_are_refused(device: torch.device) -> None:
    x = torch.randn(2, 3, device=device)
    circle: list[Any] = [x]
    circle.append(circle)
    with graphed(lambda batch: batch[0] * 2, sizes=[2]) as fast:
        with pytest.raises(BatchError, match="an argument contains itself, or is nested too"):
            fast(circle)
        fast([x])
        with pytest.raises(BatchError, match="argument 'batch' contains itself, or is nested too"):
            fast(circle)
        assert torch.equal(fast([x]), x * 2)


def test_keys_that_look_alike_are_refused(device: torch.device) -> None:
    """In another order, their tensors would change places without notice."""

    class Key:
        def __repr__(self) -> str:
            return "key"

    first, second = Key(), Key()
    x = torch.randn(2, 3, device=device)
    match = r"there are 2 arguments 'batch\[key\]': keys of a dict look alike"
    with graphed(lambda batch: batch[first] * 2, sizes=[2]) as fast:
        with pytest.raises(BatchError, match=match):
            fast({first: x, second: x.clone()})
        fast({first: x})
        with pytest.raises(BatchError, match="different structure"):
            fast({first: x, second: x.clone()})
        assert torch.equal(fast({first: x}), x * 2)


def test_arguments_that_cannot_be_rebuilt_are_refused(device: torch.device) -> None:
    class Two(tuple[torch.Tensor, torch.Tensor]):
        def __new__(cls, first: torch.Tensor, second: torch.Tensor) -> Two:
            return super().__new__(cls, (first, second))

    x = torch.randn(2, 3, device=device)
    with graphed(lambda two: two[0] + two[1], sizes=[2]) as fast:
        with pytest.raises(BatchError, match=r"a Two cannot be rebuilt .*'second'.*use a plain"):
            fast(Two(x, x))
        assert torch.equal(fast((x, x)), x + x)


def test_arguments_of_another_structure_are_refused(device: torch.device) -> None:
    x = torch.randn(2, 3, device=device)
    with graphed(lambda batch: batch[0] * 2, sizes=[2]) as fast:
        fast([x])
        with pytest.raises(BatchError) as error:
            fast([x, x])
        assert str(error.value) == (
            "the arguments have a different structure than at capture: ['batch[0]', 'batch[1]'] "
            "instead of ['batch[0]']"
        )
        assert torch.equal(fast([x]), x * 2)


def test_a_first_batch_that_requires_grad_is_refused(device: torch.device) -> None:
    x = torch.randn(2, 3, device=device, requires_grad=True)
    with graphed(lambda x: x * 2, sizes=[2]) as fast:
        with pytest.raises(BatchError, match=r"argument 'x' requires grad.*torch\.no_grad\(\)"):
            fast(x)
        with torch.no_grad():
            assert torch.equal(fast(x), x * 2)


def test_results_of_another_structure_are_refused(device: torch.device) -> None:
    with graphed(lambda x: (x, x) if len(x) == 4 else x, sizes=[4]) as fast:
        fast(torch.randn(4, 3, device=device))
        with pytest.raises(BatchError, match="structure for a batch of 4 than for one of 2"):
            fast(torch.randn(2, 3, device=device))


def test_results_that_follow_the_batch_in_another_dimension_are_refused(
    device: torch.device,
) -> None:
    with graphed(lambda x: x.T if len(x) == 3 else x, sizes=[4]) as fast:
        for rows in (4, 2):
            x = torch.randn(rows, 4, device=device)
            assert torch.equal(fast(x), x)
        with pytest.raises(BatchError, match="of 3 rows follows the batch in other dimensions"):
            fast(torch.randn(3, 4, device=device))


@pytest.mark.parametrize("eager_fallback", [False, True])
def test_what_rounding_could_explain_is_refused_in_the_end(
    device: torch.device, eager_fallback: bool
) -> None:
    """Eight calls return the eager result and are compared again; the ninth decides."""

    def depends_on_rows(x: torch.Tensor) -> torch.Tensor:
        return x + 1e-3 * len(x)

    with graphed(depends_on_rows, sizes=[4], eager_fallback=eager_fallback) as fast:
        for _ in range(8):
            x = torch.rand(2, 3, device=device) + 1
            assert torch.equal(fast(x), depends_on_rows(x))
        assert fast.stats().eager_calls == {Reason.UNVERIFIED.value: 8}
        x = torch.rand(2, 3, device=device) + 1
        if not eager_fallback:
            with pytest.raises(BatchError, match=r"the result.*as in 8 calls before"):
                fast(x)
            return
        for _ in range(2):
            assert torch.equal(fast(x), depends_on_rows(x))
        eager = {Reason.UNVERIFIED.value: 8, Reason.DIFFERS_FROM_EAGER.value: 2}
        assert fast.stats().eager_calls == eager


def test_a_callable_that_calls_its_graphed_self_is_refused(device: torch.device) -> None:
    fast = graphed(lambda x: fast(x) * 2, sizes=[4])
    for call in (fast, fast.capture):
        with pytest.raises(CaptureError, match=r"calls itself; call unwrap\(\)"):
            call(torch.randn(3, 2, device=device))


def test_a_large_batch_may_be_split_by_its_callable(device: torch.device) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if len(x) <= 4 else torch.cat([fast(x[:4]).clone(), fast(x[4:])])

    fast = graphed(function, sizes=[4])
    x = torch.randn(11, 2, device=device)
    for _ in range(2):
        assert torch.equal(fast(x), x * 2)
    assert fast.stats().hits == 6


@pytest.mark.parametrize("rows", [1, 4])
def test_work_of_another_thread_is_found_out(device: torch.device, rows: int) -> None:
    """No capture sees it. Its result is right for the batch of the capture, and for no other."""

    def function(x: torch.Tensor) -> torch.Tensor:
        done: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: done.append(x * 2))
        thread.start()
        thread.join()
        return done[0] + 1

    with graphed(function, sizes=[4]) as fast:
        x = torch.randn(rows, 2, device=device)
        for _ in range(2):
            assert torch.equal(fast(x), x * 2 + 1)
        with pytest.raises(BatchError, match=r"output.* differs from an eager call"):
            fast(x + 1)


def test_an_attribute_that_is_not_there_is_named() -> None:
    fast = graphed(lambda x: x * 2, sizes=[2])
    assert fast.__name__ == "<lambda>"
    message = "neither GraphedCallable nor its function has an attribute 'nothing'"
    with pytest.raises(AttributeError, match=message):
        _ = fast.nothing


@pytest.mark.slow
def test_a_model_that_calls_it_cannot_be_exported(device: torch.device) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return fast(x) + 1

    x = torch.randn(2, 3, device=device)
    with graphed(lambda x: x * 2, sizes=[2]) as fast:
        fast(x)
        with pytest.raises(CaptureError, match=r"graph the result: graphed\(torch\.compile"):
            torch.export.export(Model(), (x,), strict=False)
        assert torch.equal(fast(x), x * 2)


@pytest.mark.parametrize("dtype", [torch.uint4, torch.float4_e2m1fn_x2], ids=str)
def test_a_dtype_without_padding(device: torch.device, dtype: torch.dtype) -> None:
    rows = torch.arange(12, dtype=torch.uint8, device=device).reshape(3, 4)
    with (
        graphed(lambda x: x.view(torch.uint8) + 1, sizes=[4]) as fast,
        pytest.raises(BatchError, match=rf"'x' has dtype {dtype}.*view\(torch\.uint8\)"),
    ):
        fast(rows.view(dtype))
    with graphed(lambda x: x.view(dtype).view(torch.uint8) + 1, sizes=[4]) as fast:  # as it says
        assert torch.equal(fast(rows), rows + 1)
