"""Static buffers: what a view shows after any sequence of fills, and what does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato.errors import BatchError, ConfigError
from ostinato.graphs.capture.buffers import StaticBuffer

MAX_ROWS, WIDTH, PADDING = 8, 3, -1

# A fill is (rows, size) with rows <= size; the sizes repeat so that views are shared.
FILLS = st.lists(
    st.integers(1, MAX_ROWS).flatmap(lambda size: st.tuples(st.integers(1, size), st.just(size))),
    min_size=1,
    max_size=12,
)
# The device does not change between examples, so a fixture may be shared by them.
same_device = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def batch_of(rows: int, batch_dim: int, first: int, device: torch.device) -> torch.Tensor:
    """Rows of values that no other batch and no padding has."""
    shape = (rows, WIDTH) if batch_dim == 0 else (WIDTH, rows)
    numbers = torch.arange(first, first + rows * WIDTH, dtype=torch.int64, device=device)
    return numbers.reshape(shape)


def check_fills(example: torch.Tensor, batch_dim: int, fills: list[tuple[int, int]]) -> None:
    buffer = StaticBuffer("x", example, max_rows=MAX_ROWS, batch_dim=batch_dim, padding=PADDING)
    for step, (rows, size) in enumerate(fills):
        value = batch_of(rows, batch_dim, 1000 * (step + 1), example.device)
        view = buffer.fill(value, size)
        assert view is buffer.view(size)
        real, padding = view.split([rows, size - rows], dim=batch_dim)
        assert torch.equal(real, value), fills[: step + 1]
        assert (padding == PADDING).all(), fills[: step + 1]


@pytest.mark.slow
@same_device
@given(fills=FILLS)
@pytest.mark.parametrize("batch_dim", [0, 1])
def test_rows_after_the_batch_are_padding(
    device: torch.device, batch_dim: int, fills: list[tuple[int, int]]
) -> None:
    check_fills(batch_of(4, batch_dim, 0, device), batch_dim, fills)


@pytest.mark.slow
@same_device
@given(fills=FILLS)
@pytest.mark.parametrize("batch_dim", [0, 1])
def test_rows_after_the_batch_are_padding_in_a_transposed_buffer(
    device: torch.device, batch_dim: int, fills: list[tuple[int, int]]
) -> None:
    check_fills(batch_of(4, 1 - batch_dim, 0, device).t(), batch_dim, fills)


@pytest.mark.parametrize("batch_dim", [0, 1])
def test_new_buffer_holds_padding_only(device: torch.device, batch_dim: int) -> None:
    example = batch_of(4, batch_dim, 0, device)
    buffer = StaticBuffer("x", example, max_rows=8, batch_dim=batch_dim, padding=PADDING)
    assert (buffer.view(8) == PADDING).all()
    assert buffer.num_bytes == 8 * WIDTH * 8


@pytest.mark.parametrize("batch_dim", [0, 1, -1, -2])
def test_views_are_dense_and_share_one_address(device: torch.device, batch_dim: int) -> None:
    example = batch_of(4, batch_dim % 2, 0, device)
    buffer = StaticBuffer("x", example, max_rows=8, batch_dim=batch_dim)
    views = [buffer.view(size) for size in (8, 1, 5)]
    assert {view.data_ptr() for view in views} == {buffer.view(8).data_ptr()}
    assert all(view.is_contiguous() for view in views)
    shapes = [(n, WIDTH) if batch_dim % 2 == 0 else (WIDTH, n) for n in (8, 1, 5)]
    assert [tuple(view.shape) for view in views] == shapes
    assert views[2] is buffer.view(5)


def test_fill_moves_nothing(device: torch.device) -> None:
    buffer = StaticBuffer("x", batch_of(4, 0, 0, device), max_rows=8)
    before = buffer.view(4)
    address = before.data_ptr()
    after = buffer.fill(batch_of(3, 0, 0, device), 4)
    assert after is before
    assert after.data_ptr() == address


def test_channels_last_stays_channels_last(device: torch.device) -> None:
    example = torch.rand(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last)
    buffer = StaticBuffer("image", example, max_rows=8)
    for size in (8, 2, 1):
        assert buffer.view(size).is_contiguous(memory_format=torch.channels_last)
    view = buffer.fill(example, 4)
    assert torch.equal(view[:2], example)
    assert view[2:].count_nonzero() == 0


def test_value_may_have_another_memory_order(device: torch.device) -> None:
    buffer = StaticBuffer("x", batch_of(4, 0, 0, device), max_rows=8)
    value = batch_of(2, 1, 5, device).t()
    assert not value.is_contiguous()
    assert torch.equal(buffer.fill(value, 4)[:2], value)


def test_rows_are_repeated_to_fill_a_size(device: torch.device) -> None:
    buffer = StaticBuffer("x", batch_of(3, 1, 0, device), max_rows=8, batch_dim=1)
    value = batch_of(3, 1, 5, device)
    buffer.fill_repeated(value, 8)
    assert torch.equal(buffer.view(8), value[:, [0, 1, 2, 0, 1, 2, 0, 1]])
    buffer.fill_repeated(value, 2)
    assert torch.equal(buffer.view(2), value[:, :2])


@pytest.mark.parametrize("content", ["values", "padding"])
def test_varied_padding_is_other_than_padding(device: torch.device, content: str) -> None:
    value = torch.rand(3, 2, device=device) + 5
    if content == "padding":
        value.zero_()
    buffer = StaticBuffer("x", value, max_rows=8)
    view = buffer.fill(value, 8)
    buffer.vary_padding(value, 8, noise=0)
    assert torch.equal(view[:3], value)
    assert (view[3:] != 0).all()
    if content == "values":
        assert torch.equal(view[3:], value[[2, 1, 0, 2, 1]])


def test_noise_in_padding_is_mirrored(device: torch.device) -> None:
    value = torch.rand(3, 2, device=device)
    buffer = StaticBuffer("x", value, max_rows=8)
    centre = value[[2, 1, 0, 2, 1]]
    sides = []
    for noise in (2, -2):
        view = buffer.fill(value, 8)
        buffer.vary_padding(value, 8, noise)
        assert torch.equal(view[:3], value)
        sides.append((view[3:] - centre).clone())
    assert (sides[0] != 0).all()
    torch.testing.assert_close(sides[0], -sides[1])


@pytest.mark.parametrize(
    ("rows", "distinct", "unlike_padding"),
    [
        ([[1, 2], [3, 4]], True, True),
        ([[1, 2], [1, 2]], False, True),
        ([[1, 2], [PADDING, PADDING]], True, True),
        ([[PADDING, PADDING]], True, False),
        ([[7, PADDING]], True, True),
    ],
)
def test_whether_rows_can_be_told_apart(
    rows: list[list[int]], distinct: bool, unlike_padding: bool
) -> None:
    value = torch.tensor(rows)
    buffer = StaticBuffer("x", value, max_rows=8, padding=PADDING)
    assert buffer.has_distinct_rows(value) is distinct
    assert buffer.differs_from_padding(value) is unlike_padding


@pytest.mark.parametrize(
    ("dtype", "padding"),
    [(torch.int32, -1), (torch.bool, True), (torch.float16, 0.5), (torch.bfloat16, float("-inf"))],
)
def test_padding_in_every_dtype(device: torch.device, dtype: torch.dtype, padding: float) -> None:
    example = torch.zeros(2, 3, dtype=dtype, device=device)
    buffer = StaticBuffer("x", example, max_rows=4, padding=padding)
    view = buffer.fill(example, 4)
    assert view.dtype is dtype
    assert (view[2:] == padding).all()


def test_made_in_inference_mode_and_filled_outside(device: torch.device) -> None:
    example = torch.zeros(2, 3, device=device)
    with torch.inference_mode():
        buffer = StaticBuffer("x", example, max_rows=4)
        view = buffer.view(4)
    assert not view.is_inference()
    buffer.fill(torch.ones(2, 3, device=device), 4)
    assert view.sum() == 6


def wrong(**changes: Any) -> torch.Tensor:
    return torch.zeros(*changes.pop("shape", (2, 3)), **changes)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            wrong(dtype=torch.float64),
            r"argument 'ids' has dtype torch\.float64 but .* captured with torch\.float32;",
        ),
        (wrong(device="meta"), r"argument 'ids' has device meta but .* captured with cpu;"),
        (wrong(shape=(2,)), r"argument 'ids' has rank 1 but .* captured with 2;"),
        (wrong(shape=(2, 3, 1)), r"argument 'ids' has rank 3 but .* captured with 2;"),
        (
            wrong(shape=(2, 4)),
            r"argument 'ids' has size 4 in dimension 1,? but the graphs were captured with 3;",
        ),
    ],
    ids=["dtype", "device", "rank 1", "rank 3", "size"],
)
def test_what_does_not_fit_is_named_with_both_values(value: torch.Tensor, message: str) -> None:
    buffer = StaticBuffer("ids", torch.zeros(2, 3), max_rows=4)
    with pytest.raises(BatchError, match=message):
        buffer.rows_of(value)


def test_size_is_checked_before_the_batch_dimension_too() -> None:
    buffer = StaticBuffer("positions", torch.zeros(3, 4), max_rows=8, batch_dim=1)
    with pytest.raises(BatchError, match="argument 'positions' has size 2 in dimension 0"):
        buffer.rows_of(torch.zeros(2, 4))


def test_rows_are_counted_in_the_batch_dimension(device: torch.device) -> None:
    rows_first = StaticBuffer("x", batch_of(4, 0, 0, device), max_rows=8)
    rows_last = StaticBuffer("x", batch_of(4, 1, 0, device), max_rows=8, batch_dim=-1)
    assert rows_first.rows_of(batch_of(7, 0, 0, device)) == 7
    assert rows_last.rows_of(batch_of(7, 1, 0, device)) == 7


@pytest.mark.parametrize(("shape", "batch_dim"), [((2, 3), 2), ((2, 3), -3), ((), 0)])
def test_batch_dimension_must_exist(shape: tuple[int, ...], batch_dim: int) -> None:
    message = f"'ids' has {len(shape)} dimensions, so it has no batch dimension {batch_dim}"
    with pytest.raises(ConfigError, match=message):
        StaticBuffer("ids", torch.zeros(shape), max_rows=4, batch_dim=batch_dim)
