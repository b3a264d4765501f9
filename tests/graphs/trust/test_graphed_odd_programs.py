"""Unusual user programs: right on every call, or refused with advice."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributions import Normal

from ostinato import BatchError, CaptureError, ConfigError, graphed


def quantized_by_range(x: torch.Tensor) -> torch.Tensor:
    low, high = x.min(), x.max()
    scale = (high - low) / 255
    return ((x - low) / scale).round().to(torch.uint8).float() * scale + low


def of_the_largest(x: torch.Tensor) -> torch.Tensor:
    return (x / x.max() * 100).to(torch.int32)


def nonzero_of_the_largest(x: torch.Tensor) -> torch.Tensor:
    return x.bool() * x / x.max()


@pytest.mark.parametrize("function", [quantized_by_range, of_the_largest, nonzero_of_the_largest])
def test_rows_that_mix_before_a_cast_are_refused(
    function: Callable[[torch.Tensor], torch.Tensor], device: torch.device
) -> None:
    """Zero padding lies within the range of a batch with both signs, so it shows nothing."""
    x = torch.randn(3, 8, device=device)
    with (
        graphed(function, sizes=[4]) as fast,
        pytest.raises(BatchError, match="changes when padding rows change"),
    ):
        fast(x)


def test_casts_that_become_indices_are_tried_with_rows_of_the_batch(device: torch.device) -> None:
    table = torch.randn(8, 4, device=device)

    def look_up(x: torch.Tensor) -> torch.Tensor:
        return table[(x * 8).long()]

    with graphed(look_up, sizes=[4]) as fast:
        for rows in (3, 4, 1):
            x = torch.rand(rows, device=device)
            assert torch.equal(fast(x), look_up(x))


def test_eight_bit_floats_are_padded(device: torch.device) -> None:
    with graphed(lambda x: x.float() * 2, sizes=[4]) as fast:
        for rows in (3, 4, 3):
            x = torch.randn(rows, 5, device=device).to(torch.float8_e4m3fn)
            assert torch.equal(fast(x), x.float() * 2)


def test_quantized_arguments_are_refused() -> None:
    x = torch.quantize_per_tensor(torch.randn(2, 3), 0.1, 0, torch.qint8)
    with (
        graphed(torch.dequantize, sizes=[2]) as fast,
        pytest.raises(ConfigError, match="quantized tensor"),
    ):
        fast(x)


def test_a_result_with_one_dimension_less_for_one_row(device: torch.device) -> None:
    with graphed(lambda x: (x * 2).squeeze(), sizes=[1, 2, 4]) as fast:
        for rows in (3, 1, 2, 1):
            x = torch.randn(rows, 3, device=device)
            assert torch.equal(fast(x), (x * 2).squeeze())


@pytest.mark.parametrize("verify", [True, False])
def test_constants_are_of_the_default_type(verify: bool, device: torch.device) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + torch.full((3,), 0.1, device=x.device)

    x = torch.randn(2, 3, device=device)
    with graphed(function, sizes=[2], verify=verify) as fast:
        assert torch.equal(fast(x), function(x))
        torch.set_default_dtype(torch.float64)
        try:
            wide = fast(x)
            assert wide.dtype is torch.float64
            assert torch.equal(wide, function(x))
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(fast(x), function(x))


@pytest.mark.parametrize("case", ["dtype", "shape", "keyword"])
def test_a_first_call_that_failed_binds_no_later_one(case: str, device: torch.device) -> None:
    model = nn.Linear(3, 3).to(device)
    x = torch.randn(2, 3, device=device)
    wrong = {"dtype": x.double(), "shape": torch.randn(2, 5, device=device), "keyword": x}[case]
    options = {"scale": 2} if case == "keyword" else {}
    with graphed(model, sizes=[2, 4]) as fast, torch.no_grad():
        for call in (fast, fast.capture):
            with pytest.raises(CaptureError):
                call(wrong, **options)
        torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize("case", ["cholesky", "multinomial", "embedding"])
def test_padding_that_an_operator_does_not_take_is_named(case: str) -> None:
    embedding = nn.Embedding(5, 3)
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "cholesky": torch.linalg.cholesky,
        "multinomial": lambda weights: torch.multinomial(weights, 1),
        "embedding": lambda numbers: embedding(numbers - 1),
    }
    batch = {
        "cholesky": torch.eye(3).repeat(3, 1, 1),
        "multinomial": torch.rand(3, 5),
        "embedding": torch.tensor([1, 5, 2]),
    }[case]
    with (
        graphed(functions[case], sizes=[4]) as fast,
        pytest.raises(BatchError, match="3 rows run, but fail when padded to 4"),
    ):
        fast(batch)
    with graphed(functions[case], sizes=[3]) as fast:
        assert fast(batch).shape[0] == 3


def test_padding_is_not_tried_with_what_an_operator_does_not_take() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.cholesky(x + torch.eye(3))

    with graphed(function, sizes=[4]) as fast:
        for rows in (3, 4, 2):
            x = torch.rand(rows, 3, 1)
            x = x @ x.mT
            torch.testing.assert_close(fast(x), function(x))


@pytest.mark.parametrize("seeded_before", [True, False])
@pytest.mark.parametrize("place", ["before the draw", "after it", "and no draw", "the default one"])
def test_seeding_a_generator_inside_is_refused(
    device: torch.device, place: str, seeded_before: bool
) -> None:
    """Even with the seed that the generator already has: torch allows that in a CUDA capture."""
    generator = torch.Generator(device)
    if seeded_before:
        generator.manual_seed(7)
        torch.manual_seed(7)

    def function(x: torch.Tensor) -> torch.Tensor:
        if place == "before the draw":
            generator.manual_seed(7)
        elif place == "the default one":
            torch.manual_seed(7)
        drawn = torch.zeros_like(x)
        if place != "and no draw":
            drawn = torch.rand(x.shape, generator=generator, device=device)
        if place != "before the draw":
            generator.manual_seed(7)
        return x + drawn

    x = torch.randn(2, 3, device=device)
    if seeded_before:
        torch.manual_seed(7)
    with (
        graphed(function, sizes=[2], generators=[generator]) as fast,
        pytest.raises(CaptureError, match=r"generator.* seeded"),
    ):
        fast(x)


def test_what_the_search_for_seeding_draws_is_put_back(device: torch.device) -> None:
    generator = torch.Generator(device)
    states = [each.get_state() for each in (generator, torch.default_generator)]
    with graphed(lambda x: x * 2, sizes=[2], generators=[generator]) as fast:
        fast(torch.ones(2, 3, device=device))
    after = [each.get_state() for each in (generator, torch.default_generator)]
    assert all(torch.equal(a, b) for a, b in zip(states, after, strict=True))


class Observer(nn.Module):
    """Keeps the smallest number it has seen, as calibration does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("smallest", torch.full((), torch.inf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.smallest.copy_(torch.minimum(self.smallest, x.min()))
        return x * 2


def test_state_that_padding_would_change_is_refused(device: torch.device) -> None:
    """Zeros change nothing next to a first batch of both signs, but do next to a later one."""
    model = Observer().to(device)
    x = torch.tensor([[-1.0], [2.0], [3.0]], device=device)
    with graphed(model, sizes=[3, 4]) as fast:
        fast(x)
        assert model.smallest == -1
    with (
        graphed(model, sizes=[4]) as fast,
        pytest.raises(BatchError, match="leaves buffer 'smallest' different from an eager call"),
    ):
        fast(x)


@pytest.mark.parametrize("make", [lambda x: deque([x * 2]), lambda x: Normal(x, 1.0)])
def test_results_in_other_objects_are_refused(
    make: Callable[[torch.Tensor], object], device: torch.device
) -> None:
    with (
        graphed(make, sizes=[2]) as fast,
        pytest.raises(CaptureError, match=r"output is a (deque|Normal) that every call creates"),
    ):
        fast(torch.randn(2, 3, device=device))


@pytest.mark.parametrize("captured", [False, True])
def test_transforms_of_a_graphed_callable_are_refused(captured: bool, device: torch.device) -> None:
    x = torch.randn(2, 3, 4, device=device)
    with graphed(lambda rows: rows * 2, sizes=[4]) as fast:
        if captured:
            fast(x[0])
        with pytest.raises(CaptureError, match=r"inside a transform of torch\.func"):
            torch.vmap(fast)(x)
    with graphed(torch.vmap(lambda rows: rows * 2), sizes=[4]) as fast:
        assert torch.equal(fast(x), x * 2)
