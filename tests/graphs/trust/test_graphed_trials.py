"""What graphed() finds by trials: rows that mix for other values, random numbers, own state."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ostinato import graphed
from ostinato.errors import BatchError, ReplayMismatchError


def rows_of(count: int, device: torch.device) -> torch.Tensor:
    return torch.randn(count, 6, device=device)


def seed(device: torch.device, number: int = 0) -> None:
    torch.manual_seed(number)
    torch.cuda.manual_seed_all(number)


# --- rows that mix for some values only -----------------------------------------------------------

# In a batch that contains a 0, or nothing below 0, zero padding does not show at first.
INTEGER_MIXERS: dict[str, tuple[Callable[[torch.Tensor], Any], list[int]]] = {
    "least": (lambda p: p - p.min(), [0, 5, 2]),
    "greatest": (lambda p: p.max() - p, [5, 2, 3]),
    "any": (lambda p: p.bool().any() | p.bool(), [1, 0, 1]),
    "all": (lambda p: p.bool().all() & p.bool(), [1, 0, 1]),
    "rank": (lambda p: (p[:, None] > p[None]).sum(1), [0, 5, 2]),
    "clipped": (lambda p: p.clamp(max=p.max() + 1), [5, 2, 3]),
}
UNAFFECTED = {"clipped"}


@pytest.mark.parametrize("case", INTEGER_MIXERS)
def test_integers_that_mix_for_other_values_are_refused(device: torch.device, case: str) -> None:
    function, batch = INTEGER_MIXERS[case]
    x = torch.tensor(batch, device=device)
    with graphed(function, sizes=[4]) as fast:
        if case in UNAFFECTED:
            assert torch.equal(fast(x), function(x))
            return
        with pytest.raises(BatchError, match="output of 3 rows padded to 4 differs"):
            fast(x)


# Padding of 0 shows only next to rows that are all on one side of 0.
FLOAT_MIXERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all positive": lambda x: x * (x > 0).all(),
    "all large": lambda x: x * (x > 5).all(),
    "all negative": lambda x: x * (x < 0).all(),
    "any zero": lambda x: x * (x == 0).any(),
    "least size": lambda x: x - x.abs().amin(),
    "least above 0": lambda x: x - x.relu().amin(0),
    "product": lambda x: x + x.relu().prod(0),
}


@pytest.mark.parametrize("case", FLOAT_MIXERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_floats_that_mix_for_other_values_are_refused(
    device: torch.device, case: str, dtype: torch.dtype
) -> None:
    x = rows_of(3, device).to(dtype)
    x[0], x[1, 0] = 0, -1
    with (
        graphed(FLOAT_MIXERS[case], sizes=[4]) as fast,
        pytest.raises(BatchError, match="output of 3 rows padded to 4 differs"),
    ):
        fast(x)


INTEGER_KEEPERS: dict[str, Callable[..., Any]] = {
    "embedding": lambda ids, x: torch.arange(60.0, device=ids.device).view(10, 6)[ids] + x,
    "gather": lambda ids, x: x.gather(1, ids[:, None] % 6),
    "mask": lambda ids, x: x.masked_fill((ids > 3)[:, None], 0.0),
    "bits": lambda ids, x: ((ids[:, None] >> torch.arange(4, device=ids.device)) & 1, x),
    "offsets": lambda ids, x: torch.arange(99, device=ids.device)[ids.cumsum(0)],
}


@pytest.mark.parametrize("case", INTEGER_KEEPERS)
def test_integers_by_row_are_right(device: torch.device, case: str) -> None:
    function = INTEGER_KEEPERS[case]
    with graphed(function, sizes=[2, 4], copy_outputs=True) as fast:
        for batch in ([3, 9, 0], [1, 1, 1], [7], [0], [2, 8], [4, 4, 4, 4], [9, 0, 5]):
            ids, x = torch.tensor(batch, device=device), rows_of(len(batch), device)
            torch.testing.assert_close(fast(ids, x), function(ids, x))


def test_an_argument_whose_rows_are_alike_is_compared_again(device: torch.device) -> None:
    """Other arguments have distinct rows, which shows nothing about results of this one."""
    with graphed(lambda x, mask: (x * 2, torch.cat([mask, mask])), sizes=[4]) as fast:
        x = rows_of(3, device)
        mask = torch.zeros(3, dtype=torch.bool, device=device)
        assert torch.equal(fast(x, mask)[1], torch.cat([mask, mask]))
        mask[0] = True
        with pytest.raises(BatchError, match=r"output\[1\] of 3 rows padded to 4 differs"):
            fast(x, mask)


def test_padding_that_means_something_must_be_named(device: torch.device) -> None:
    """A mean over the rows that a mask lets through is right as long as padding stays masked."""

    def centred(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        weights = mask[:, None].to(x.dtype)
        return x - (x * weights).sum(0) / weights.sum(0)

    x, mask = rows_of(3, device), torch.tensor([1, 0, 1], device=device)
    with graphed(centred, sizes=[4]) as fast, pytest.raises(BatchError, match="pass it as padding"):
        fast(x, mask)
    with graphed(centred, sizes=[4], padding={"x": 0, "mask": 0}) as fast:
        torch.testing.assert_close(fast(x, mask), centred(x, mask))


def _with_the_row_before(ids: torch.Tensor) -> torch.Tensor:
    pairs = ids.clone()
    pairs[1:] += ids[:-1]
    return pairs


@pytest.mark.parametrize("combine", [lambda ids: ids.cumsum(0), _with_the_row_before])
def test_indices_are_not_driven_out_of_range(
    device: torch.device, combine: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Run on repeats of the batch's largest row, these would crash a CUDA process."""
    table = torch.arange(9, device=device)
    with graphed(lambda ids: table[combine(ids)], sizes=[4]) as fast:
        for batch in ([0, 7, 1], [8, 0, 0]):
            ids = torch.tensor(batch, device=device)
            assert torch.equal(fast(ids), table[combine(ids)])


def test_positions_among_boundaries_stay_in_range() -> None:
    """Numbers beyond the last boundary would be indices out of range: a crash on CUDA."""
    seen: list[int] = []

    @torch.library.custom_op("test_graphed_trials::look_up", mutates_args=())
    def look_up(positions: torch.Tensor) -> torch.Tensor:
        seen.extend(positions.tolist())
        return positions.clone()

    boundaries = torch.tensor([2.0, 4.0])
    for positions in (torch.bucketize, lambda x, limits: torch.searchsorted(limits, x)):
        with graphed(lambda x, of=positions: look_up(of(x, boundaries)), sizes=[4]) as fast:
            fast(torch.rand(3))
    assert {*seen} == {0}


@pytest.mark.parametrize(
    "function",
    [
        torch.bernoulli,
        lambda x: F.binary_cross_entropy(x, x.round(), reduction="none"),
        lambda x: torch.multinomial(x + 1e-3, 2),
    ],
)
def test_probabilities_stay_probabilities(
    device: torch.device, function: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """These assert the range of their numbers, which crashes a CUDA process."""
    with graphed(function, sizes=[4]) as fast:
        assert fast(torch.rand(3, 6, device=device)).shape[0] == 3


# --- random numbers -------------------------------------------------------------------------------

DRAWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn": lambda x: x + torch.randn(x.shape, device=x.device),
    "dropout": lambda x: F.dropout(x, 0.5, training=True),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "exponential": lambda x: (x.softmax(-1) / torch.empty_like(x).exponential_()).argmax(-1),
    "in place": lambda x: torch.empty_like(x).uniform_(-1, 1) * x,
    "several": lambda x: (x + torch.rand_like(x), torch.randn_like(x)),
    "integers": lambda x: torch.randint(0, 9, x.shape, device=x.device) + x,
    "attention": lambda x: F.scaled_dot_product_attention(
        x[:, None, :, None], x[:, None, :, None], x[:, None, :, None], dropout_p=0.5
    ),
}


@pytest.mark.parametrize("case", DRAWS)
def test_a_full_batch_draws_what_an_eager_call_does(device: torch.device, case: str) -> None:
    function = DRAWS[case]
    x = rows_of(4, device)
    with graphed(function, sizes=[4], copy_outputs=True) as fast:
        for number in range(3):  # the first call captures
            seed(device, number)
            result = fast(x)
            seed(device, number)
            torch.testing.assert_close(result, function(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", DRAWS)
def test_padded_draws_are_repeatable_and_differ_from_call_to_call(
    device: torch.device, case: str
) -> None:
    x = rows_of(3, device)
    with graphed(DRAWS[case], sizes=[4], copy_outputs=True) as fast:
        seed(device)
        first, second = fast(x), fast(x)
        seed(device)
        again = fast(x)
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(second, first, rtol=0, atol=0)


RANDOM_MIXERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "batch statistics": lambda x: x - x.mean(0) + 0 * torch.rand_like(x),
    "flip": lambda x: (x.flip(0), torch.rand_like(x)),
    "flipped draws": lambda x: (x + torch.rand_like(x)).flip(0),
    "number of rows": lambda x: x * x.shape[0] + torch.rand_like(x),
    "dropout of the number of rows": lambda x: F.dropout(x, 0.1, training=True) / x.shape[0],
    "cat": lambda x: torch.cat([F.dropout(x, 0.1, training=True), -x]),
}


@pytest.mark.parametrize("case", RANDOM_MIXERS)
def test_rows_that_mix_and_draw_are_refused(device: torch.device, case: str) -> None:
    fast = graphed(RANDOM_MIXERS[case], sizes=[4])
    with fast, pytest.raises(BatchError, match="3 rows padded to 4"):
        fast(rows_of(3, device))


def test_integers_beside_draws_are_not_taken_for_equal(device: torch.device) -> None:
    """Rounding could explain integers that differ, so these calls return eager results."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.isfinite().sum() + torch.randint(5, 6, x.shape[:1], device=x.device)

    x = rows_of(3, device)
    with graphed(function, sizes=[4]) as fast:
        for _ in range(8):
            assert torch.equal(fast(x), function(x))
        with pytest.raises(BatchError, match="the result of 3 rows padded to 4 differs"):
            fast(x)


class OverRows(nn.Module):
    """Attention within each row, then a mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)[:, None]
        x = F.scaled_dot_product_attention(x, x, x)
        return x - x.mean(0)


def test_attention_that_draws_nothing_is_compared_in_full(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """torch says of the operator that it draws random numbers, and it does with dropout."""
    ids = torch.tensor([[3, 7, 5]], device=device)  # no other row to try in its place
    with (
        caplog.at_level(logging.WARNING),
        graphed(OverRows().to(device), sizes=[2]) as fast,
        pytest.raises(BatchError, match="output of 1 rows padded to 2 differs"),
    ):
        fast(ids)
    assert "draws random numbers" not in caplog.text


def test_a_refused_batch_draws_nothing(device: torch.device) -> None:
    seed(device)
    expected = torch.rand(5, device=device)
    seed(device)
    x = torch.arange(18.0, device=device).view(3, 6)
    with graphed(RANDOM_MIXERS["flip"], sizes=[4]) as fast, pytest.raises(BatchError):
        fast(x)
    assert torch.equal(torch.rand(5, device=device), expected)


def test_a_generator_of_its_own_is_left_as_eager_code_leaves_it() -> None:
    def draw(generator: torch.Generator) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: x + torch.rand(x.shape, generator=generator)

    mine, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    x = torch.randn(4, 6)
    with graphed(draw(mine), sizes=[4], copy_outputs=True, generators=[mine]) as fast:
        for _ in range(3):
            assert torch.equal(fast(x), draw(other)(x))


# --- values that the callable leaves for its next call -------------------------------------------


class ReadsTheLast(nn.Module):
    """Adds the number of rows of the previous call."""

    def __init__(self, *, read_first: bool) -> None:
        super().__init__()
        self.last = 4
        self._read_first = read_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._read_first:
            x = x + self.last
        self.last = x.shape[0]
        return x if self._read_first else x * (self.last / x.shape[0])


def test_what_the_call_before_left_behind_is_refused(device: torch.device) -> None:
    with graphed(ReadsTheLast(read_first=True), sizes=[4]) as fast:
        x = rows_of(4, device)
        assert torch.equal(fast(x), x + 4)
        with pytest.raises(BatchError, match="depends on what the previous call left in attribute"):
            fast(x[:3])


def test_what_the_call_itself_sets_first_is_its_own_affair(device: torch.device) -> None:
    model = ReadsTheLast(read_first=False)
    with graphed(model, sizes=[4], copy_outputs=True) as fast:
        x = rows_of(4, device)
        for rows in (3, 4, 2, 3):
            assert torch.equal(fast(x[:rows]), x[:rows])


# --- function modes -------------------------------------------------------------------------------


class Times(torch.overrides.TorchFunctionMode):
    """Scales results of ``torch.sin``."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * self.factor if func is torch.sin else result


def test_each_function_mode_has_graphs_of_its_own(device: torch.device) -> None:
    x = rows_of(4, device)
    expected = x.sin()
    with graphed(torch.sin, sizes=[4], copy_outputs=True) as fast:
        for factor in (2, 3, 2, 3):
            with Times(factor):
                result = fast(x)
            torch.testing.assert_close(result, expected * factor)
        assert fast.stats().graphs == 2


# --- modules in modules ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_compiled_module_is_watched_like_the_one_in_it(device: torch.device) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.drop = nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.drop(self.linear(x))

    model = Scaled().to(device).eval()
    compiled: Any = torch.compile(model, backend="eager")
    x = rows_of(3, device)
    with graphed(compiled, sizes=[4], copy_outputs=True) as fast:
        for _ in range(2):
            torch.testing.assert_close(fast(x), model(x))
        model.train()
        with pytest.raises(ReplayMismatchError, match="training"):
            fast(x)
        model.eval()
        model.linear.weight = nn.Parameter(torch.ones(6, 6, device=device))
        with pytest.raises(ReplayMismatchError, match="weight"):
            fast(x)
