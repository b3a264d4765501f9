"""graphed(): the API for people with their own model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from ostinato import GraphPool, compilation_counter, eager_break, graphed
from ostinato.errors import BatchError, ConfigError, ReplayMismatchError
from ostinato.graphs.graphed_callable import GraphedCallable

SIZES = [1, 2, 4, 8]


def make_mlp(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3)).to(device).eval()


def padded_eager(model: nn.Module, x: torch.Tensor, size: int, padding: float) -> torch.Tensor:
    """What the graph computes, eagerly: the same shapes, so the same kernels."""
    padded = torch.full((size, *x.shape[1:]), padding, device=x.device, dtype=x.dtype)
    padded[: x.shape[0]] = x
    with torch.no_grad():
        return model(padded)[: x.shape[0]]


def test_every_batch_size_equals_padded_eager(device: torch.device) -> None:
    model = make_mlp(device)
    with graphed(model, sizes=SIZES, padding=float("nan")) as fast:
        for rows in (3, 8, 1, 5, 2, 7, 4, 6):
            x = torch.randn(rows, 6, device=device)
            size = next(size for size in SIZES if size >= rows)
            assert torch.equal(fast(x), padded_eager(model, x, size, float("nan")))


shared: dict[torch.device, GraphedCallable] = {}


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.integers(1, 12), min_size=1, max_size=12))
def test_any_sequence_of_batches_on_one_object(device: torch.device, rows: list[int]) -> None:
    if device not in shared:
        shared[device] = graphed(make_mlp(device), sizes=SIZES)
    fast = shared[device]
    for count in rows:
        x = torch.randn(count, 6, device=device)
        size = next((size for size in SIZES if size >= count), count)
        assert torch.equal(fast(x), padded_eager(fast.unwrap(), x, size, 0.0))


def test_one_graph_per_size_and_no_python_on_replay(device: torch.device) -> None:
    runs = 0

    def function(x: torch.Tensor) -> torch.Tensor:
        nonlocal runs
        runs += 1
        return x * 2

    with (
        compilation_counter.expect(num_cudagraph_captured=4),
        graphed(function, sizes=SIZES, check_state_every=0) as fast,
    ):
        batches = [torch.arange(1, rows + 1, device=device) for rows in range(1, 9)]
        fast(batches[0] + 1)  # captures; the next batch is compared too
        for x in batches:  # each number of rows is compared with eager once
            fast(x)
        runs_so_far = runs
        for x in batches:
            assert torch.equal(fast(x), x * 2)
        assert runs == runs_so_far


def test_as_a_decorator(device: torch.device) -> None:
    @graphed(sizes=[2, 4])
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = torch.randn(3, device=device)
    assert torch.equal(double(x), x * 2)
    double.close()


def test_default_sizes_depend_on_the_device(device: torch.device) -> None:
    with graphed(lambda x: x + 1) as fast:
        fast(torch.ones(1, device=device))
        largest = 16 if device.type == "cpu" else 64
        assert fast.stats().graphs == 3 + largest // 8
        fast(torch.ones(largest, device=device))
        assert fast.stats().eager_calls == {}


@dataclass
class Batch:
    ids: torch.Tensor
    features: dict[str, torch.Tensor]
    name: str = "batch"


class Pair(NamedTuple):
    total: torch.Tensor
    parts: list[torch.Tensor]


def nested(batch: Batch, scale: float = 2.0) -> dict[str, object]:
    x = batch.features["x"]
    return {
        "pair": Pair(x.sum(-1) * scale, [x + 1, batch.ids * 2]),
        "again": Batch(batch.ids + 1, {"x": x}),
        "flat": x.reshape(-1),
        "label": "fixed",
    }


def test_nested_arguments_and_results(device: torch.device) -> None:
    with graphed(nested, sizes=[2, 4], copy_outputs=True) as fast:
        for rows in (3, 2, 1):
            ids = torch.arange(rows, device=device)
            x = torch.randn(rows, 5, device=device)
            got, want = fast(Batch(ids, {"x": x}), 3.0), nested(Batch(ids, {"x": x}), 3.0)
            assert isinstance(got["pair"], Pair)
            assert isinstance(got["again"], Batch)
            assert got["label"] == "fixed"
            assert torch.equal(got["pair"].total, want["pair"].total)
            assert torch.equal(got["pair"].parts[1], ids * 2)
            assert torch.equal(got["again"].ids, ids + 1)
            assert torch.equal(got["flat"], x.reshape(-1))  # five elements a row


def test_batch_in_another_dimension_and_square_results(device: torch.device) -> None:
    def gram(x: torch.Tensor) -> torch.Tensor:
        return x.t() @ x

    with graphed(gram, sizes=[4], batch_dims={"x": 1}, padding=float("nan")) as fast:
        x = torch.randn(3, 2, device=device)
        assert fast(x).shape == (2, 2)
        assert torch.allclose(fast(x), gram(x))


def test_static_arguments_are_read_in_place(device: torch.device) -> None:
    def lookup(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return table[ids]

    table = torch.randn(10, 3, device=device)
    with graphed(lookup, sizes=[4], batch_dims={"table": "static"}) as fast:
        ids = torch.tensor([1, 5, 7], device=device)
        assert torch.equal(fast(ids, table), table[ids])
        table.mul_(2)
        assert torch.equal(fast(ids, table), table[ids])
        with pytest.raises(ReplayMismatchError, match="'table' moved"):
            fast(ids, table.clone())
        assert torch.equal(fast(ids, table), table[ids])


def test_whole_arguments_are_copied(device: torch.device) -> None:
    with graphed(lambda x, w: x @ w, sizes=[2], batch_dims={"w": None}) as fast:
        for _ in range(3):
            x, w = torch.randn(2, 3, device=device), torch.randn(3, 4, device=device)
            assert torch.equal(fast(x, w), x @ w)
        with pytest.raises(BatchError, match=r"'w' has shape"):
            fast(x, torch.randn(3, 5, device=device))


def test_positional_and_keyword_calls_are_the_same(device: torch.device) -> None:
    with graphed(lambda x, y: x - y, sizes=[4]) as fast:
        x, y = torch.randn(3, device=device), torch.randn(3, device=device)
        expected = x - y
        for result in (fast(x, y), fast(x, y=y), fast(y=y, x=x)):
            assert torch.equal(result, expected)


def test_outputs_are_views_by_default_and_copies_on_request(device: torch.device) -> None:
    x, y = torch.ones(2, device=device), torch.zeros(2, device=device)
    with graphed(lambda x: x + 1, sizes=[2]) as views:
        first = views(x)
        assert views(y).data_ptr() == first.data_ptr()
        assert torch.equal(first, y + 1)
    with graphed(lambda x: x + 1, sizes=[2], copy_outputs=True) as copies:
        first = copies(x)
        copies(y)
        assert torch.equal(first, x + 1)


def test_padding_by_argument(device: torch.device) -> None:
    def spy(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.stack((a.sum(), b.sum()))

    with graphed(spy, sizes=[4], padding={"a": 10.0}, verify=False) as fast:
        ones = torch.ones(2, device=device)
        assert fast(ones, ones).tolist() == [22.0, 2.0]
        assert fast(ones[:1], ones[:1]).tolist() == [31.0, 1.0]  # no rows of the last batch left


def test_larger_batches_run_eagerly_and_are_counted(device: torch.device) -> None:
    with graphed(lambda x: x * 2, sizes=[2, 4]) as fast:
        for rows in (1, 3, 4, 9, 10):
            x = torch.randn(rows, device=device)
            assert torch.equal(fast(x), x * 2)
        stats = fast.stats()
    assert (stats.graphs, stats.hits, stats.padding_rows) == (2, 3, 2)
    assert stats.padding_fraction == pytest.approx(2 / 10)
    assert stats.eager_calls == {"more tokens than the largest captured size": 2}
    assert stats.pool_bytes > 0
    assert stats.buffer_bytes == 16
    assert "eager calls       2" in str(stats)


def test_lazy_captures_only_what_is_used(device: torch.device) -> None:
    with graphed(lambda x: x * 2, sizes=[1, 2, 4, 8], lazy=True) as fast:
        for rows, graphs in ((3, 1), (4, 1), (1, 2), (9, 2)):
            x = torch.randn(rows, device=device)
            assert torch.equal(fast(x), x * 2)
            assert fast.stats().graphs == graphs


def test_capture_ahead_of_the_first_call(device: torch.device) -> None:
    with graphed(lambda x: x * 2, sizes=[1, 2]) as fast:
        report = fast.capture(torch.ones(1, device=device))
        assert [entry.entry.descriptor.num_tokens for entry in report.entries] == [2, 1]
        with compilation_counter.expect(num_cudagraph_captured=0):
            fast(torch.ones(2, device=device))


def test_piecewise_splits_at_breaks(device: torch.device) -> None:
    @eager_break
    def host(x: torch.Tensor) -> torch.Tensor:
        return x * (1 if x[0].item() > 0 else -1)

    def function(x: torch.Tensor) -> torch.Tensor:
        return host(x + 1) * 2

    with graphed(function, sizes=[2, 4], mode="piecewise") as fast:
        for _ in range(4):
            x = torch.randn(3, device=device)
            assert torch.equal(fast(x), function(x))
        assert fast.stats().graphs == 4


def test_two_callables_share_a_pool(pool: GraphPool) -> None:
    double = graphed(lambda x: x * 2, sizes=[4], pool=pool)
    square = graphed(lambda x: x * x, sizes=[4], pool=pool)
    for _ in range(3):
        x = torch.randn(3, device=pool.device)
        assert torch.equal(double(x), x * 2)
        assert torch.equal(square(x), x * x)
    square.close()
    assert torch.equal(double(x), x * 2)


def test_random_numbers_are_fresh_on_every_call(device: torch.device) -> None:
    generator = torch.Generator(device)

    def noisy(x: torch.Tensor) -> torch.Tensor:
        own = torch.rand(x.shape, generator=generator, device=x.device)
        return torch.stack((x + torch.rand_like(x), x + own))

    with graphed(noisy, sizes=[8], generators=[generator]) as fast:
        x = torch.zeros(8, device=device)
        draws = [fast(x).clone() for _ in range(4)]
    for stream in zip(*draws, strict=True):
        assert len({tuple(draw.tolist()) for draw in stream}) == 4


def test_attributes_of_the_model_are_reachable(device: torch.device) -> None:
    model = make_mlp(device)
    fast = graphed(model, sizes=[1])
    assert len(list(fast.parameters())) == 4
    assert fast.unwrap() is model
    with pytest.raises(AttributeError, match=r"GraphedModule.*Sequential.*'nothing'"):
        _ = fast.nothing


def test_inside_inference_mode_and_out(device: torch.device) -> None:
    with graphed(lambda x: x * 2, sizes=[4]) as fast:
        x = torch.randn(3, device=device)
        with torch.inference_mode():
            assert torch.equal(fast(x), x * 2)
        assert torch.equal(fast(x), x * 2)
        with torch.inference_mode():
            assert torch.equal(fast(x + 1), (x + 1) * 2)


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": []}, "empty"),
        ({"sizes": [0]}, "got 0"),
        ({"sizes": [-2]}, "got -2"),
        ({"sizes": [1.5]}, r"got 1\.5"),
        ({"sizes": ["2"]}, "got '2'"),
        ({"sizes": 3}, "list of positive integers, got 3"),
        ({"mode": "sideways"}, "unknown graph mode 'sideways'; choose one of NONE, PIECEWISE"),
        ({"mode": "none"}, "not NONE"),
        ({"num_warmups": -1}, "got -1"),
        ({"verify": "off"}, "verify must be True or False, got 'off'"),
        ({"lazy": 2}, "lazy must be True or False, got 2"),
        ({"batch_dims": 1}, "batch_dims must map names of arguments .*, got 1"),
        ({"padding": "0"}, "padding must be a number, or map .*, got '0'"),
        ({"padding": {"x": None}}, "padding must be a number, or map .*, got {'x': None}"),
        ({"generators": torch.Generator()}, "generators must be a list of torch.Generator"),
        ({"generators": [3]}, r"generators must be a list of torch.Generator, got \[3\]"),
        ({"pool": "cpu"}, "pool must be an ostinato.GraphPool, got 'cpu'"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        graphed(lambda x: x, **options)


def test_misspelt_option_is_refused() -> None:
    with pytest.raises(TypeError, match="size"):
        graphed(lambda x: x, size=[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_dims": {"z": 0}}, r"batch_dims names \['z'\].*\['x'\]"),
        ({"batch_dims": {"x": "fixed"}}, "None or 'static', got 'fixed'"),
        ({"batch_dims": {"x": 3}}, "no batch dimension 3"),
        ({"batch_dims": {"x": "static"}}, "no argument has a batch dimension"),
        ({"padding": {"z": 1.0}}, "padding names"),
    ],
)
def test_bad_argument_options_are_refused(options: dict[str, object], message: str) -> None:
    fast = graphed(lambda x: x * 2, sizes=[2], **options)
    with pytest.raises(ConfigError, match=message):
        fast(torch.ones(2))


BAD_BATCHES = {
    "empty": (lambda d: torch.ones(0, 3, device=d), "the batch is empty: 'x' has 0 rows"),
    "dtype": (lambda d: torch.ones(2, 3, device=d).double(), "'x' has dtype torch.float64"),
    "rank": (lambda d: torch.ones(2, device=d), "'x' has rank 1"),
    "shape": (lambda d: torch.ones(2, 4, device=d), "'x' has size 4 in dimension 1"),
    "device": (lambda d: torch.ones(2, 3, device="meta"), "'x' has device meta"),
    "no tensor": (lambda d: 3, "'x' must be a tensor, got 3"),
    "grad": (lambda d: torch.ones(2, 3, device=d, requires_grad=True), "'x' requires grad"),
}


@pytest.mark.parametrize("case", BAD_BATCHES)
def test_bad_batches_are_refused_and_harmless(device: torch.device, case: str) -> None:
    make, message = BAD_BATCHES[case]
    with graphed(lambda x: x * 2, sizes=[2]) as fast:
        good = torch.randn(2, 3, device=device)
        fast(good)
        with pytest.raises(BatchError, match=message):
            fast(make(device))
        assert torch.equal(fast(good), good * 2)


def test_arguments_must_agree_on_the_batch(device: torch.device) -> None:
    with (
        graphed(lambda x, y: (x, y), sizes=[4]) as fast,
        pytest.raises(BatchError, match="'y' has 3 rows in its batch dimension 0, but 'x' has 2"),
    ):
        fast(torch.ones(2, device=device), torch.ones(3, device=device))


def test_arguments_must_be_those_of_the_capture(device: torch.device) -> None:
    with graphed(lambda x, y=None, scale=1: x * scale, sizes=[2]) as fast:
        x = torch.ones(2, device=device)
        fast(x, scale=3)
        with pytest.raises(BatchError, match=r"called with arguments \['x', 'y'\]"):
            fast(x, x)
        with pytest.raises(ReplayMismatchError, match=r"'scale' is 4, but .* captured with 3"):
            fast(x, scale=4)


def test_scalar_tensor_needs_a_decision(device: torch.device) -> None:
    fast = graphed(lambda x, s: x * s, sizes=[2])
    with pytest.raises(ConfigError, match="'s' is a scalar tensor"):
        fast(torch.ones(2, device=device), torch.tensor(2.0, device=device))


def test_results_must_follow_the_batch(device: torch.device) -> None:
    x = torch.ones(2, device=device)
    with pytest.raises(BatchError, match=r"output has shape \(5,\) for a batch of 4 and \(3,\)"):
        graphed(lambda x: torch.cat((x, x[:1])), sizes=[4])(x)
    with pytest.raises(BatchError, match=r"output\[1\] is 4 for a batch of 4 and 2"):
        graphed(lambda x: (x, x.shape[0]), sizes=[4])(x)


def test_several_devices_are_refused() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("elsewhere", torch.ones(1, device="meta"))
    with pytest.raises(ConfigError, match="on cpu, meta"):
        graphed(model, sizes=[1])(torch.ones(1, 2))


def test_no_tensor_at_all_is_refused() -> None:
    with pytest.raises(BatchError, match="no tensor among the arguments"):
        graphed(lambda n: n, sizes=[1])(3)


def test_not_a_callable_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a callable, got 3"):
        graphed(3, sizes=[1])
