"""What ``graphed()`` does with arguments that are more than tensors, and with what a call does to
them: right on every call, or refused by name.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ostinato import graphed
from ostinato.errors import BatchError, CaptureError, ConfigError, OstinatoError


def rows_of(count: int, device: torch.device) -> torch.Tensor:
    return torch.randn(count, 3, device=device)


# --- what a call does to its arguments ------------------------------------------------------------


def keep_in_a_dict(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    if "positive" not in batch:
        batch["positive"] = batch["x"] > 0
    return batch["x"] * batch["positive"]


def take_out(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return batch["x"] * batch.pop("y")


def put_in_place(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    batch["x"] = batch["x"] * 2
    return batch["x"] + 1


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (keep_in_a_dict, r"""argument "batch\['positive'\]" is added inside the call"""),
        (take_out, r"""argument "batch\['y'\]" is removed inside the call"""),
        (put_in_place, r"""argument "batch\['x'\]" is replaced inside the call"""),
    ],
)
def test_changing_a_container_is_refused(
    function: Callable[[dict[str, torch.Tensor]], torch.Tensor], message: str, device: torch.device
) -> None:
    with graphed(function, sizes=[2, 4]) as fast, pytest.raises(CaptureError, match=message):
        fast({"x": rows_of(4, device), "y": rows_of(4, device)})


RESHAPES: dict[str, Callable[[torch.Tensor], object]] = {
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "t_": lambda x: x.t_(),
    "squeeze_": lambda x: x.squeeze_(0),  # for a single row only
    "as_strided_": lambda x: x.as_strided_((len(x), 2), (3, 1)),
    "data": lambda x: setattr(x, "data", x.data * 2),
    "set_": lambda x: x.set_(x * 2),
}


@pytest.mark.parametrize("case", RESHAPES)
def test_reshaping_an_argument_in_place_is_refused_and_undone(
    case: str, device: torch.device
) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        result = x * 2
        RESHAPES[case](x)
        return result

    with graphed(function, sizes=[2, 4]) as fast, torch.no_grad():
        if case == "squeeze_":
            fast(rows_of(4, device))
        x = rows_of(1, device)
        before, address = x.clone(), x.data_ptr()
        for _ in range(2):
            with pytest.raises(CaptureError, match="argument 'x' gets another shape or other mem"):
                fast(x)
        assert torch.equal(x, before)
        assert x.data_ptr() == address


def test_reshaping_a_static_argument_in_place_is_undone(device: torch.device) -> None:
    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result = x * weight
        weight.unsqueeze_(0)
        return result

    weight = rows_of(1, device)[0]
    before, address = weight.clone(), weight.data_ptr()
    with (
        graphed(function, sizes=[2], batch_dims={"weight": "static"}) as fast,
        pytest.raises(CaptureError, match="argument 'weight' gets another shape"),
    ):
        fast(rows_of(2, device), weight)
    assert weight.data_ptr() == address
    assert torch.equal(weight, before)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    scale: dataclasses.InitVar[float] = 2.0

    def __post_init__(self, scale: float) -> None:
        self.positive = self.x > 0
        self.factor = scale

    @functools.cached_property
    def negative(self) -> torch.Tensor:
        return self.x < 0


def of_attributes(batch: Batch) -> torch.Tensor:
    return batch.x * batch.positive * batch.factor


def of_a_cached_property(batch: Batch) -> torch.Tensor:
    return batch.x * batch.negative


@pytest.mark.parametrize("function", [of_attributes, of_a_cached_property])
@pytest.mark.parametrize("touched", [False, True])
def test_attributes_beside_fields_are_those_of_each_call(
    function: Callable[[Batch], torch.Tensor], touched: bool, device: torch.device
) -> None:
    with graphed(function, sizes=[2, 4]) as fast:
        for rows in (4, 4, 3, 3, 1, 4):
            batch = Batch(rows_of(rows, device))
            if touched:
                assert batch.negative.shape == batch.x.shape
            assert torch.equal(fast(batch), function(batch))
        if function is of_attributes:
            with pytest.raises(OstinatoError, match=r"argument 'batch\.factor' is 3\.0.*with 2\.0"):
                fast(Batch(rows_of(4, device), scale=3.0))


def test_attributes_of_results_are_cut_like_fields(device: torch.device) -> None:
    with graphed(lambda x: Batch(x * 2), sizes=[4]) as fast:
        for rows in (4, 3, 3):
            x = rows_of(rows, device)
            result = fast(x)
            assert torch.equal(result.positive, x > 0)
            assert torch.equal(result.negative, x < 0)


class Scaled(dict[str, torch.Tensor]):
    factor = 2.0


def test_attributes_of_a_dict_are_compared(device: torch.device) -> None:
    with graphed(lambda batch: batch["x"] * batch.factor, sizes=[2]) as fast:
        for factor in (2.0, 3.0):
            batch = Scaled(x=rows_of(2, device))
            batch.factor = factor
            if factor == 2.0:
                assert torch.equal(fast(batch), batch["x"] * 2)
            else:
                with pytest.raises(OstinatoError, match=r"argument 'batch\.factor' is 3\.0"):
                    fast(batch)


# --- which kind of thing an argument is -----------------------------------------------------------


@dataclasses.dataclass
class Doubling:
    x: torch.Tensor
    times = 2


@dataclasses.dataclass
class Tripling:
    x: torch.Tensor
    times = 3


@pytest.mark.parametrize(
    ("function", "first", "second", "message"),
    [
        (lambda batch: batch.x * batch.times, Doubling, Tripling, "Tripling in 'batch' instead"),
        (lambda batch: batch[0] * len({type(batch), list}), lambda x: [x], lambda x: (x,), "tuple"),
        (lambda batch: batch[0] * len({type(batch[1]), dict}), lambda x: [x, {}], list, None),
    ],
)
def test_containers_of_another_type_are_refused(
    function: Callable[[Any], torch.Tensor],
    first: Callable[[torch.Tensor], Any],
    second: Callable[[torch.Tensor], Any],
    message: str | None,
    device: torch.device,
) -> None:
    x = rows_of(2, device)
    with graphed(function, sizes=[2]) as fast:
        assert torch.equal(fast(first(x)), function(first(x)))
        other = [x, []] if message is None else second(x)
        with pytest.raises(BatchError, match=message or "list in 'batch', list in 'batch' instead"):
            fast(other)


class Watched(torch.Tensor):
    """Does the same as a tensor, and could do anything else."""


@pytest.mark.parametrize("batch_dim", [0, None])
def test_subclasses_of_tensors_are_refused(batch_dim: int | None, device: torch.device) -> None:
    plain = rows_of(2, device)
    x = plain.as_subclass(Watched)
    options: dict[str, Any] = {"sizes": [2], "batch_dims": {"x": batch_dim}}
    with graphed(lambda x, y: x * y, **options) as fast:
        with pytest.raises(ConfigError, match="argument 'x' is a Watched, whose own methods"):
            fast(x, plain)
        fast(torch.nn.Parameter(plain, requires_grad=False), plain)
        with pytest.raises(BatchError, match="argument 'x' is a Watched, whose own methods"):
            fast(x, plain)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.eye(3).to_sparse(), "sparse_coo"),
        (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr"),
        (lambda: torch.nested.nested_tensor([torch.ones(3)] * 3), "nested"),
    ],
)
@pytest.mark.parametrize("batch_dim", [0, None])
@pytest.mark.filterwarnings("ignore:.*prototype.*", "ignore:Sparse.*")
def test_later_tensors_without_addresses_are_refused(
    make: Callable[[], torch.Tensor], kind: str, batch_dim: int | None
) -> None:
    options: dict[str, Any] = {"sizes": [3], "batch_dims": {"x": batch_dim}}
    with graphed(lambda x, y: x * y, **options) as fast:
        fast(torch.eye(3), torch.eye(3))
        with pytest.raises(BatchError, match=f"argument 'x' is a .*{kind} tensor"):
            fast(make(), torch.eye(3))
        with pytest.raises(BatchError, match=r"argument 'x' must be a tensor, got 2\.0"):
            fast(2.0, torch.eye(3))


# --- results that are written arguments -----------------------------------------------------------


@pytest.mark.parametrize("rows", [3, 4])
def test_a_result_may_be_written_by_the_next_call(rows: int, device: torch.device) -> None:
    """Its memory is the graph's, where the next result is by then."""

    def function(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2

    x = rows_of(rows, device)
    expected = x.clone()
    with graphed(function, sizes=[4]) as fast:
        for _ in range(5):
            x, expected = fast(x), function(expected)
            torch.testing.assert_close(x, expected)
