"""graphed() with difficult callables: right, or refused with a clear error."""

from __future__ import annotations

import contextlib
import copy
import enum
import logging
import math
import pickle
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ostinato import GraphPool, graphed
from ostinato.errors import (
    BatchError,
    CaptureError,
    ConfigError,
    OstinatoError,
    ReplayMismatchError,
)


def make_mlp(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device).eval()


def rows_of(count: int, device: torch.device) -> torch.Tensor:
    return torch.randn(count, 6, device=device)


# --- rows ---------------------------------------------------------------------------------------

# Results that no cut of a padded result can recover.
ROW_MIXERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "cat": lambda x: torch.cat([x, -x]),
    "stack": lambda x: torch.stack([x, -x]).reshape(-1, x.shape[1]),
    "transpose": lambda x: x.T.reshape(-1),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "sort": lambda x: x.sort(0).values,
    "cumulative from the end": lambda x: x.flip(0).cumsum(0).flip(0),
    "batch statistics": lambda x: (x - x.mean(0)) / x.std(0),
    "softmax over the batch": lambda x: x.softmax(0),
    "number of rows": lambda x: x / x.shape[0],
    "branch on the number of rows": lambda x: x * 2 if x.shape[0] > 3 else x,
    "attention between rows": lambda x: torch.softmax(x @ x.T, -1) @ x,
    "outer product": lambda x: (x[:, None] * x[None]).reshape(-1, x.shape[1]),
    "scalar": lambda x: {"loss": x.mean()},
    "features": lambda x: x.sum(0) + x.shape[0],
    "rows as bits": lambda x: torch.cat([x > 0, x < 0]),
}


# From zeros padded with zeros, these produce zeros for any number of rows.
RIGHT_FOR_ZEROS = {"number of rows", "branch on the number of rows"}


@pytest.mark.parametrize("values", ["random", "zeros"])
@pytest.mark.parametrize("case", ROW_MIXERS)
def test_results_that_no_cut_gives_are_refused(
    device: torch.device, case: str, values: str
) -> None:
    function = ROW_MIXERS[case]
    x = rows_of(3, device) if values == "random" else torch.zeros(3, 6, device=device)
    with graphed(function, sizes=[4]) as fast:
        if values == "zeros" and case in RIGHT_FOR_ZEROS:
            for _ in range(5):
                torch.testing.assert_close(fast(x), function(x))
            x = rows_of(3, device)  # only another batch can tell
        with pytest.raises(BatchError, match=r"output.* (of 3|3 rows padded to 4)"):
            fast(x)


ROW_KEEPERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "interleaved": lambda x: torch.stack([x, -x], 1).reshape(-1, x.shape[1]),
    "several outputs": lambda x: (x + 1, {"double": x * 2, "flat": x.reshape(-1)}),
    "constant": lambda x: (x + 1, torch.ones(5, device=x.device)),
    "argmax": lambda x: x.argmax(-1),
    "comparison": lambda x: x > 0,
    "pairs of one row": lambda x: x[:, :, None] * x[:, None],
    "batch last": lambda x: x.T.contiguous(),
    "NaN": lambda x: x / 0 * 0,
}


@pytest.mark.parametrize("case", ROW_KEEPERS)
def test_results_by_row_are_right(device: torch.device, case: str) -> None:
    function = ROW_KEEPERS[case]
    with graphed(function, sizes=[2, 4], copy_outputs=True) as fast:
        for rows in (3, 1, 4, 3, 2, 1):
            x = rows_of(rows, device)
            torch.testing.assert_close(fast(x), function(x), equal_nan=True)


def test_integers_alone_are_compared_exactly(device: torch.device) -> None:
    with graphed(lambda ids: torch.cat([ids, ids + 1]), sizes=[4]) as fast:
        zeros = torch.zeros(3, dtype=torch.int64, device=device)
        with pytest.raises(BatchError, match="output"):
            fast(zeros)
        with pytest.raises(BatchError, match="output"):
            fast(zeros + 5)


def test_padding_that_was_never_told_from_rows_is_compared_every_time(device: torch.device) -> None:
    """Ids of 0 look like padding, so the cut of a doubled result seems right; ids of 5 do not."""
    with graphed(lambda ids: torch.cat([ids, ids]), sizes=[4]) as fast:
        zeros = torch.zeros(3, dtype=torch.int64, device=device)
        for _ in range(5):
            assert torch.equal(fast(zeros), torch.cat([zeros, zeros]))
        with pytest.raises(BatchError, match="output of 3 rows padded to 4 differs"):
            fast(zeros + 5)


def test_without_verification_the_callable_runs_for_the_layout_of_its_result_alone(
    device: torch.device,
) -> None:
    runs = 0

    def function(x: torch.Tensor) -> torch.Tensor:
        nonlocal runs
        runs += 1
        return x.flip(0)

    with graphed(function, sizes=[4], verify=False, check_state_every=0) as fast:
        x = rows_of(4, device)
        assert torch.equal(fast(x), x.flip(0))
        after_capture = runs
        fast(x)
        assert runs == after_capture
        fast(x[:3])
        assert runs == after_capture + 1
        assert (fast(x[:2])[0] == 0).all()  # padding, as requested
        assert runs == after_capture + 1


def test_a_mask_does_not_hide_what_is_wrong(device: torch.device) -> None:
    table = torch.randn(10, 8, device=device)

    def function(ids: torch.Tensor) -> torch.Tensor:
        rows = table[ids]
        rows = rows - rows.mean(0)
        rows[:, 0] = -1e9
        return rows

    with graphed(function, sizes=[4]) as fast, pytest.raises(BatchError, match="output of 2 rows"):
        fast(torch.tensor([1, 2], device=device))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float16, torch.int8, torch.bool])
def test_rows_of_any_type(device: torch.device, dtype: torch.dtype) -> None:
    with graphed(lambda x: torch.stack([x, x], 1), sizes=[4]) as fast:
        x = (rows_of(3, device) * 3).to(dtype)
        assert torch.equal(fast(x), torch.stack([x, x], 1))


def test_each_number_of_rows_is_tried(device: torch.device) -> None:
    """Three rows padded to four are right here; two are not."""
    with graphed(lambda x: x * 2 if x.shape[0] > 2 else x, sizes=[4]) as fast:
        x = rows_of(3, device)
        assert torch.equal(fast(x), x * 2)
        with pytest.raises(BatchError, match="output of 2 rows padded to 4 differs"):
            fast(x[:2])
        assert torch.equal(fast(x), x * 2)


def test_a_batch_that_needs_no_padding_may_mix_rows(device: torch.device) -> None:
    with graphed(lambda x: x - x.mean(0), sizes=[3, 4]) as fast:
        for rows in (3, 4, 3):
            x = rows_of(rows, device)
            torch.testing.assert_close(fast(x), x - x.mean(0))


def test_refused_rows_run_eagerly_where_that_is_allowed(device: torch.device) -> None:
    with graphed(lambda x: x.flip(0), sizes=[4], eager_fallback=True) as fast:
        for _ in range(2):
            for rows in (3, 4):
                x = rows_of(rows, device)
                assert torch.equal(fast(x), x.flip(0))
        assert fast.stats().hits == 2
        assert list(fast.stats().eager_calls.values()) == [2]


def test_values_beside_tensors_that_change_are_refused(device: torch.device) -> None:
    calls = [0]

    def function(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        calls[0] += 1
        return x, calls[0]

    with (
        graphed(function, sizes=[2]) as fast,
        pytest.raises(CaptureError, match=r"calls\[0\] is replaced inside the call"),
    ):
        fast(rows_of(2, device))


def test_python_state_that_a_result_depends_on_is_refused(device: torch.device) -> None:
    calls = [0]

    def function(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return x * calls[0]

    for dtype in (torch.float32, torch.bfloat16):
        with (
            graphed(function, sizes=[2]) as fast,
            pytest.raises(CaptureError, match=r"calls\[0\] is replaced inside .*\(it was \d"),
        ):
            fast(rows_of(2, device).to(dtype))


def test_hidden_python_state_that_a_result_depends_on_is_refused(device: torch.device) -> None:
    numbers = iter(range(1, 100))

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * next(numbers)

    with (
        graphed(function, sizes=[2]) as fast,
        pytest.raises(CaptureError, match="output changes from run to run on the same rows"),
    ):
        fast(rows_of(2, device))


def test_a_list_that_grows_is_refused(device: torch.device) -> None:
    kept: list[torch.Tensor] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x * 2

    with (
        graphed(function, sizes=[2]) as fast,
        pytest.raises(CaptureError, match="the number of items in kept is replaced inside"),
    ):
        fast(rows_of(2, device))


def test_a_note_of_the_batch_size_is_fine(device: torch.device) -> None:
    class Noting(nn.Module):
        rows = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.rows = x.shape[0]
            return x * 2

    with graphed(Noting(), sizes=[2, 4]) as fast:
        for rows in (3, 1, 4, 9, 3, 2):
            x = rows_of(rows, device)
            assert torch.equal(fast(x), x * 2)


def test_a_size_that_replaces_what_others_read_is_refused(device: torch.device) -> None:
    class Growing(nn.Module):
        scratch: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.scratch is None or self.scratch.shape != x.shape:
                self.scratch = torch.empty_like(x)
            return self.scratch.copy_(x) * 2

    with graphed(Growing(), sizes=[2, 4]) as fast, pytest.raises(OstinatoError, match="'scratch'"):
        fast(rows_of(2, device))


# --- what a capture tries -----------------------------------------------------------------------


class Needy:
    """Fails on rows that its caller never passed, and on batch sizes it never requested."""

    def __init__(self, rows: set[int]) -> None:
        self.rows = rows

    def __call__(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if x.shape[0] not in self.rows:
            raise ValueError(f"cannot run {x.shape[0]} rows")
        return torch.where(mask, x, x - x.detach())


@pytest.mark.parametrize("lazy", [False, True])
def test_only_sizes_that_were_asked_for_are_tried(device: torch.device, lazy: bool) -> None:
    function = Needy({2, 4, 3})
    with graphed(function, sizes=[2, 4], lazy=lazy) as fast:
        for rows in (3, 2, 4):
            x = rows_of(rows, device)
            mask = x > 0
            assert torch.equal(fast(x, mask), function(x, mask))


def test_halves_of_a_batch(device: torch.device) -> None:
    def halves(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2)
        return torch.cat([first + second, first - second])

    with graphed(halves, sizes=[2, 4]) as fast:
        for rows in (4, 2):
            x = rows_of(rows, device)
            torch.testing.assert_close(fast(x), halves(x))


def test_batch_norm_in_training_mode(device: torch.device) -> None:
    fast_norm, norm = (nn.BatchNorm1d(6).to(device) for _ in range(2))
    with graphed(fast_norm, sizes=[4]) as fast:
        for _ in range(3):
            x = rows_of(4, device)
            torch.testing.assert_close(fast(x), norm(x))
            for name, expected in norm.named_buffers():
                torch.testing.assert_close(fast_norm.get_buffer(name), expected)
        with pytest.raises(BatchError, match="output of 3 rows padded to 4 differs"):
            fast(x[:3])
        torch.testing.assert_close(fast_norm.running_mean, norm.running_mean)


def test_an_error_of_the_callable_names_the_size_and_its_type(device: torch.device) -> None:
    with (
        graphed(Needy({3}), sizes=[4]) as fast,
        pytest.raises(CaptureError, match="capturing size 4 failed: ValueError: cannot run 4 rows"),
    ):
        fast(rows_of(3, device), rows_of(3, device) > 0)


# --- state --------------------------------------------------------------------------------------


class Counter(nn.Module):
    """Counts its calls, and the rows it saw, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x + self.calls


@pytest.mark.parametrize("lazy", [False, True])
def test_state_changes_once_per_call(device: torch.device, lazy: bool) -> None:
    model, reference = Counter().to(device), Counter().to(device)
    with graphed(model, sizes=[2, 4], lazy=lazy, num_warmups=2) as fast:
        for rows in (3, 1, 4, 2, 3, 9):
            x = rows_of(rows, device)
            assert torch.equal(fast(x), reference(x))
            assert torch.equal(model.calls, reference.calls)


def test_capturing_ahead_changes_no_state(device: torch.device) -> None:
    model = Counter().to(device)
    with graphed(model, sizes=[2, 4]) as fast:
        fast.capture(rows_of(2, device))
        assert model.calls.item() == 0


def test_a_refused_call_changes_no_state(device: torch.device) -> None:
    total = torch.zeros(6, device=device)

    def function(x: torch.Tensor) -> torch.Tensor:
        total.add_(x.sum(0))
        return x.flip(0)

    with graphed(function, sizes=[4]) as fast:
        with pytest.raises(BatchError, match="output"):
            fast(rows_of(3, device))
        assert total.count_nonzero() == 0


def test_padding_rows_that_write_to_a_cache_are_noticed(device: torch.device) -> None:
    def store(x: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache[slots] = x
        return x + 1

    cache = torch.ones(8, 6, device=device)
    slots = torch.tensor([5, 2, 7], device=device)
    with graphed(store, sizes=[4], batch_dims={"cache": "static"}) as fast:
        with pytest.raises(
            BatchError, match="leaves argument 'cache' different from an eager call"
        ):
            fast(rows_of(3, device), slots, cache)
        assert (cache == 1).all()


def test_a_spare_row_keeps_padding_out_of_a_cache(device: torch.device) -> None:
    def store(x: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache[slots] = x
        return x + cache[slots]

    options: dict[str, Any] = {"batch_dims": {"cache": "static"}, "padding": {"slots": 7}}
    cache = torch.zeros(8, 6, device=device)
    with graphed(store, sizes=[4], **options) as fast:
        for rows in (3, 2, 4):
            x, slots = rows_of(rows, device), torch.arange(rows, device=device)
            expected = cache.clone()
            assert torch.equal(fast(x, slots, cache), store(x, slots, expected))
            assert torch.equal(cache, expected)


class Keeper(nn.Module):
    """Remembers the mean of what it saw by replacing its attribute."""

    def __init__(self, kind: str, device: torch.device) -> None:
        super().__init__()
        self.kind = kind
        self.seen = torch.zeros(6, device=device)
        self.register_buffer("buffered", torch.zeros(6, device=device))
        self.parts = {"seen": torch.zeros(6, device=device)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "attribute":
            self.seen = self.seen + x[0]
        elif self.kind == "buffer":
            self.buffered = self.buffered + x[0]
        else:
            self.parts["seen"] = self.parts["seen"] + x[0]
        return x * 2


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("attribute", "attribute 'seen'"),
        ("buffer", "buffer 'buffered'"),
        ("item", r"parts\['seen'\]"),
    ],
)
def test_replacing_a_tensor_inside_the_call_is_refused(
    device: torch.device, kind: str, name: str
) -> None:
    model = Keeper(kind, device)
    with (
        graphed(model, sizes=[2]) as fast,
        pytest.raises(CaptureError, match=f"{name} is replaced inside the call"),
    ):
        fast(rows_of(2, device))


def test_what_the_first_call_makes_for_later_ones_may_stay(device: torch.device) -> None:
    class Lazy(nn.Module):
        table: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.table is None:
                self.table = torch.linspace(0, 1, 6, device=x.device)
            return x + self.table

    model = Lazy()
    with graphed(model, sizes=[2, 4]) as fast:
        for rows in (3, 2, 1):
            x = rows_of(rows, device)
            assert torch.equal(fast(x), x + torch.linspace(0, 1, 6, device=device))


def test_state_that_the_first_call_makes_and_others_change_is_refused(device: torch.device) -> None:
    class Lazy(nn.Module):
        count: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.count is None:
                self.count = torch.zeros(1, device=x.device)
            return x + self.count.add_(1)

    with (
        graphed(Lazy(), sizes=[2]) as fast,
        pytest.raises(CaptureError, match="attribute 'count' is created by the first call"),
    ):
        fast(rows_of(2, device))


# --- weights and values that are replaced between calls -----------------------------------------


class Scaled(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6, bias=False))
        self.scale = 2.0
        self.shift = torch.ones(6, device=device)
        self.tables = [torch.ones(6, device=device), {"one": torch.ones(6, device=device)}]
        self.register_buffer("offset", torch.ones(6))
        self.norm = nn.BatchNorm1d(6).eval()
        self.to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        extra = self.shift + self.tables[0] + self.tables[1]["one"]
        return self.norm(self.inner(x)) * self.scale + self.offset + extra


def assign(model: Scaled) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def set_bias(model: Scaled) -> None:
    model.inner[1].bias = nn.Parameter(torch.ones(6, device=model.offset.device))


def set_data(model: Scaled) -> None:
    model.inner[0].weight.data = model.inner[0].weight.data.clone()


def set_parameter(model: Scaled) -> None:
    model.inner[0].weight = nn.Parameter(model.inner[0].weight.data.clone())


def cut_data(model: Scaled) -> None:
    """The same address, fewer rows."""
    model.inner[1].weight.data = model.inner[1].weight.data[:1]


def set_module(model: Scaled) -> None:
    model.inner[1] = nn.Linear(6, 6, bias=False).to(model.offset.device)


REPLACEMENTS: dict[str, tuple[Callable[[Scaled], object], str]] = {
    "parameter": (set_parameter, r"parameter 'inner\.0\.weight' moved"),
    "data": (set_data, r"parameter 'inner\.0\.weight' moved"),
    "shape of data": (cut_data, r"parameter 'inner\.1\.weight' moved"),
    "a bias where there was none": (set_bias, r"parameter 'inner\.1\.bias' is .*captured with"),
    "module": (set_module, r"module 'inner\.1' is a different Linear"),
    "load_state_dict(assign=True)": (assign, "moved"),
    "half": (lambda model: model.half(), "moved"),
    "double": (lambda model: model.double(), "moved"),
    "buffer": (lambda model: setattr(model, "offset", model.offset + 1), "buffer 'offset' moved"),
    "attribute": (
        lambda model: setattr(model, "shift", model.shift + 1),
        "attribute 'shift' moved",
    ),
    "list item": (
        lambda model: model.tables.__setitem__(0, model.tables[0] * 2),
        r"tables\[0\] moved",
    ),
    "nested item": (
        lambda model: model.tables[1].update(one=model.shift * 2),
        r"tables\[1\]\['one'\] moved",
    ),
    "number": (lambda model: setattr(model, "scale", 3.0), r"attribute 'scale' is 3\.0.*2\.0"),
    "mode of a submodule": (lambda model: model.norm.train(), r"attribute 'norm\.training'"),
    "deleted": (lambda model: delattr(model, "shift"), "attribute 'shift' moved"),
}


@pytest.mark.parametrize("case", REPLACEMENTS)
def test_what_was_replaced_is_found_at_the_next_call(device: torch.device, case: str) -> None:
    replace, message = REPLACEMENTS[case]
    model = Scaled(device)
    with graphed(model, sizes=[2]) as fast:
        x = rows_of(2, device)
        expected = model(x)
        torch.testing.assert_close(fast(x), expected)
        replace(model)
        with pytest.raises(ReplayMismatchError, match=message):
            fast(x)


class Kind(enum.Enum):
    A, B = 1, 2


class Holder:
    def __init__(self, scale: float) -> None:
        self.scale = scale


class Furnished(nn.Module):
    """Reads a number, in one of several ways, from its attribute."""

    default = 2.0

    def __init__(self, value: Any, read: Callable[[Any], float]) -> None:
        super().__init__()
        self.value, self.read = value, read
        self.layers = nn.Sequential(nn.LeakyReLU(0.1), nn.LayerNorm(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.read(self.value) * self.default


FURNITURE: dict[str, tuple[Any, Any, Callable[[Any], float]]] = {
    "list": ([1.0], [3.0], lambda value: value[0]),
    "equal list": ([1.0], [1.0], lambda value: value[0]),
    "tuple": ((1.0,), (3.0,), lambda value: value[0]),
    "dict": ({"a": 1.0}, {"a": 3.0}, lambda value: value["a"]),
    "nested": ([[1.0]], [[3.0]], lambda value: value[0][0]),
    "object": (Holder(1.0), Holder(3.0), lambda value: value.scale),
    "namespace": (SimpleNamespace(a=1.0), SimpleNamespace(a=3.0), lambda value: value.a),
    "partial": (partial(max, 1.0), partial(max, 3.0), lambda value: value(0.0)),
    "enum": (Kind.A, Kind.B, lambda value: float(value.value)),
    "bytes": (b"a", b"abc", lambda value: float(len(value))),
    "set": ({1}, {1, 2}, lambda value: float(len(value))),
    "function": (math.floor, math.ceil, lambda value: float(value(1.5))),
    "size": (torch.Size([1]), torch.Size([3]), lambda value: float(value[0])),
    "type of a number": (1, 1.0, lambda value: 1.0),
}


@pytest.mark.parametrize("case", FURNITURE)
def test_any_kind_of_value_is_watched(device: torch.device, case: str) -> None:
    first, second, read = FURNITURE[case]
    model = Furnished(first, read).to(device)
    with graphed(model, sizes=[2]) as fast:
        x = rows_of(2, device)
        for _ in range(3):
            torch.testing.assert_close(fast(x), model(x))
        model.value = second
        with pytest.raises(ReplayMismatchError, match="attribute 'value'"):
            fast(x)


OTHER_CHANGES: dict[str, tuple[Callable[[Furnished], object], str]] = {
    "hook": (
        lambda model: model.register_forward_hook(lambda module, args, output: output * 2),
        "the number of forward hooks",
    ),
    "hook before": (
        lambda model: model.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
        "the number of forward hooks",
    ),
    "hook inside": (
        lambda model: model.layers[0].register_forward_hook(lambda module, args, out: out * 2),
        r"the number of forward hooks of 'layers\.0'",
    ),
    "forward": (
        lambda model: setattr(model, "forward", lambda x: x * 3),
        "the number of attributes",
    ),
    "attribute over a default": (
        lambda model: setattr(model, "default", 5.0),
        "the number of attributes",
    ),
    "attribute of torch's module": (
        lambda model: setattr(model.layers[0], "negative_slope", 0.5),
        r"attribute 'layers\.0\.negative_slope' is 0\.5",
    ),
    "transposed": (
        lambda model: setattr(model.layers[1].weight, "data", model.layers[1].weight.data[:3]),
        r"parameter 'layers\.1\.weight' moved",
    ),
}


@pytest.mark.parametrize("case", OTHER_CHANGES)
def test_what_is_looked_at_in_turns_is_found_soon(device: torch.device, case: str) -> None:
    change, message = OTHER_CHANGES[case]
    model = Furnished(1.0, float).to(device)
    with graphed(model, sizes=[2]) as fast:
        x = rows_of(2, device)
        fast(x)
        change(model)

        def several_calls() -> None:
            for _ in range(100):
                fast(x)

        with pytest.raises(ReplayMismatchError, match=message):
            several_calls()


def test_a_class_that_changes_is_found(device: torch.device, monkeypatch: Any) -> None:
    model = Furnished(1.0, float).to(device)
    with graphed(model, sizes=[2]) as fast:
        x = rows_of(2, device)
        fast(x)
        monkeypatch.setattr(Furnished, "default", 4.0)
        with pytest.raises(ReplayMismatchError, match=r"attribute 'Furnished\.default' is 4\.0"):
            fast(x)
        monkeypatch.undo()
        fast(x)
        monkeypatch.setattr(Furnished, "forward", lambda self, x: x)
        with pytest.raises(
            ReplayMismatchError, match=r"method 'Furnished\.forward' is a different"
        ):
            fast(x)


def test_weights_are_watched_beside_a_large_table(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(6, 6)).to(device)
    model.vocabulary = {str(number): number for number in range(20_000)}
    with graphed(model, sizes=[2]) as fast:
        x = rows_of(2, device)
        fast(x)
        model[0].weight.data = model[0].weight.data.clone()
        with pytest.raises(ReplayMismatchError, match=r"parameter '0\.weight' moved"):
            fast(x)


@pytest.mark.parametrize("case", ["parameter", "data", "module", "number", "list item"])
def test_after_clearing_the_new_state_is_captured(device: torch.device, case: str) -> None:
    model = Scaled(device)
    with graphed(model, sizes=[2]) as fast:
        x = rows_of(2, device)
        fast(x)
        REPLACEMENTS[case][0](model)
        fast.clear_graphs()
        torch.testing.assert_close(fast(x), model(x))


def test_writing_in_place_is_no_replacement(device: torch.device) -> None:
    model = Scaled(device)
    with graphed(model, sizes=[2]) as fast, torch.no_grad():
        x = rows_of(2, device)
        fast(x)
        model.load_state_dict({name: tensor * 2 for name, tensor in model.state_dict().items()})
        model.inner[0].weight.mul_(3)
        torch.testing.assert_close(fast(x), model(x))


def test_less_frequent_checks_find_it_later(device: torch.device) -> None:
    model = nn.Linear(6, 6).to(device)
    with graphed(model, sizes=[2], check_state_every=3) as fast:
        x = rows_of(2, device)
        fast(x)
        model.weight.data = model.weight.data.clone()
        fast(x)
        fast(x)
        with pytest.raises(ReplayMismatchError, match="parameter 'weight' moved"):
            fast(x)


@pytest.mark.parametrize("every", [-1, 1.5, True])
def test_bad_check_intervals_are_refused(every: object) -> None:
    with pytest.raises(ConfigError, match=f"check_state_every .* got {every}"):
        graphed(lambda x: x, check_state_every=every)


SCALE = 2.0


def test_globals_and_closures_are_watched(device: torch.device, monkeypatch: Any) -> None:
    shift = torch.ones(6, device=device)
    power = 2

    def function(x: torch.Tensor) -> torch.Tensor:
        return x**power * SCALE + shift

    with graphed(function, sizes=[2]) as fast:
        x = rows_of(2, device)
        assert torch.equal(fast(x), function(x))
        monkeypatch.setitem(globals(), "SCALE", 3.0)
        with pytest.raises(ReplayMismatchError, match=r"global 'SCALE' is 3\.0"):
            fast(x)
        monkeypatch.setitem(globals(), "SCALE", 2.0)
        power = 3
        with pytest.raises(ReplayMismatchError, match=r"variable 'power' of .* is 3"):
            fast(x)
        power = 2
        assert torch.equal(fast(x), function(x))
        shift = shift + 1
        with pytest.raises(ReplayMismatchError, match=r"variable 'shift' of .* moved"):
            fast(x)


def test_the_object_of_a_bound_method_is_watched(device: torch.device) -> None:
    class Model:
        def __init__(self) -> None:
            self.weight = torch.ones(6, device=device)

        def run(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    model = Model()
    with graphed(model.run, sizes=[2]) as fast:
        x = rows_of(2, device)
        fast(x)
        model.weight = model.weight * 2
        with pytest.raises(ReplayMismatchError, match=r"attribute 'self\.weight' moved"):
            fast(x)


# --- arguments that are written -----------------------------------------------------------------


def increment(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * y


def test_writes_to_arguments_reach_the_caller(device: torch.device) -> None:
    with graphed(increment, sizes=[2, 4]) as fast:
        for rows in (3, 2, 4, 1, 3):
            x, y = rows_of(rows, device), rows_of(rows, device)
            expected = x.clone()
            result = increment(expected, y)
            assert torch.equal(fast(x, y), result)
            assert torch.equal(x, expected)


def test_writes_to_whole_arguments_reach_the_caller(device: torch.device) -> None:
    def function(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return x + seen.add_(1)

    with graphed(function, sizes=[2], batch_dims={"seen": None}) as fast:
        seen = torch.zeros(6, device=device)
        for count in range(1, 4):
            x = rows_of(2, device)
            assert torch.equal(fast(x, seen), x + count)
            assert torch.equal(seen, torch.full_like(seen, count))


def test_aliases_of_what_is_written_are_refused(device: torch.device) -> None:
    with graphed(increment, sizes=[2, 4]) as fast:
        x, y = rows_of(3, device), rows_of(3, device)
        fast(x, y)
        for first, second in ((x, x), (x[:2], x[1:])):
            before = x.clone()
            with pytest.raises(BatchError, match="'x' shares memory with argument 'y'"):
                fast(first, second)
            assert torch.equal(x, before)


def test_aliases_of_what_is_only_read_are_fine(device: torch.device) -> None:
    with graphed(lambda x, y: x * y, sizes=[4]) as fast:
        x = rows_of(3, device)
        assert torch.equal(fast(x, x), x * x)
        assert torch.equal(fast(x[:2], x[1:]), x[:2] * x[1:])


def test_an_argument_that_is_part_of_written_state_is_refused(device: torch.device) -> None:
    model = Counter().to(device)
    with graphed(lambda x: model(x), sizes=[1]) as fast:
        fast(torch.ones(1, device=device))
        with pytest.raises(BatchError, match="'x' shares memory with memory that the callable"):
            fast(model.calls)


def test_written_arguments_must_not_be_what_is_read_besides(device: torch.device) -> None:
    table = torch.zeros(4, 6, device=device)

    def function(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return table[: x.shape[0]] + 0

    with graphed(function, sizes=[4]) as fast:
        fast(rows_of(4, device))
        with pytest.raises(BatchError, match="'x' shares memory with memory"):
            fast(table)


def constant(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tensor(1.0)


def constant_changed_in_place(x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor(2.0).mul_(3)


@pytest.mark.parametrize("function", [constant, constant_changed_in_place])
def test_tensors_that_a_call_makes_are_not_its_state(
    function: Callable[[torch.Tensor], torch.Tensor], device: torch.device
) -> None:
    """Arguments of later calls may take the place of one that is gone."""
    with torch.inference_mode(), graphed(function, sizes=[2, 4]) as fast:
        alive = []
        for call in range(100):
            x = rows_of(1 + call % 4, device)
            alive.append(x)
            assert torch.equal(fast(x), function(x))


def test_halves_of_one_tensor_may_both_be_written(device: torch.device) -> None:
    def function(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k.add_(1)
        return v.add_(2) * k

    with graphed(function, sizes=[4]) as fast:
        both = torch.ones(2, 4, 6, device=device)
        assert (fast(both[0], both[1]) == 6).all()
        assert (both[0] == 2).all()
        assert (both[1] == 3).all()


# --- results that are arguments -----------------------------------------------------------------

FEEDBACK: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "sum and first": lambda a, b: (a + b, a),
    "swapped": lambda a, b: (b, a),
    "views": lambda a, b: (b.view(-1, 1), (a + 1).view(-1, 1)),
    "written": lambda a, b: (a.add_(1), b),
}


@pytest.mark.parametrize("rows", [3, 4])
@pytest.mark.parametrize("case", FEEDBACK)
def test_results_can_be_passed_in_again(device: torch.device, case: str, rows: int) -> None:
    function = FEEDBACK[case]
    with graphed(function, sizes=[4]) as fast:
        start = torch.arange(1.0, rows + 1, device=device)[:, None]
        a, b = start.clone(), start.clone() * 10
        c, d = start.clone(), start.clone() * 10
        for _ in range(6):
            a, b = fast(a, b)
            c, d = function(c, d)
            assert torch.equal(a, c)
            assert torch.equal(b, d)


# --- torch's switches ---------------------------------------------------------------------------


def test_autocast_is_part_of_the_key(device: torch.device) -> None:
    model = make_mlp(device)
    dtypes = [torch.bfloat16, torch.float16]
    with graphed(model, sizes=[2]) as fast, torch.no_grad():
        x = rows_of(2, device)
        for _ in range(2):
            assert fast(x).dtype == torch.float32
            for dtype in dtypes:
                with torch.autocast(device.type, dtype=dtype):
                    assert fast(x).dtype == dtype
                    torch.testing.assert_close(fast(x), model(x))
            torch.testing.assert_close(fast(x), model(x))
        assert fast.stats().graphs == 3


def test_captured_under_autocast_first(device: torch.device) -> None:
    model = make_mlp(device)
    with graphed(model, sizes=[2]) as fast, torch.no_grad():
        x = rows_of(2, device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            fast(x)
        torch.testing.assert_close(fast(x), model(x))


def test_the_default_dtype_is_part_of_the_key(device: torch.device) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.get_default_dtype()) + torch.ones(6, device=x.device)

    x = torch.ones(2, 6, device=device, dtype=torch.int64)
    with graphed(function, sizes=[2]) as fast:
        assert fast(x).dtype == torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert fast(x).dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        assert fast(x).dtype == torch.float32


SWITCHES: dict[str, tuple[Callable[[], object], Callable[[], object], Callable[[], object]]] = {
    "inference mode": (
        lambda: None,
        lambda: None,
        torch.is_inference_mode_enabled,
    ),
    "deterministic": (
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(False),
        torch.are_deterministic_algorithms_enabled,
    ),
    "matmul precision": (
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: torch.set_float32_matmul_precision("highest"),
        lambda: torch.get_float32_matmul_precision() == "medium",
    ),
}


@pytest.mark.parametrize("case", SWITCHES)
def test_switches_that_a_callable_can_see_are_part_of_the_key(
    device: torch.device, case: str
) -> None:
    """The callable branches on the switch, as torch's own kernels do."""
    switch_on, switch_off, is_on = SWITCHES[case]
    with graphed(lambda x: x * (3 if is_on() else 2), sizes=[2]) as fast:
        x = rows_of(2, device)
        for _ in range(2):
            assert torch.equal(fast(x), x * 2)
            switch_on()
            try:
                with torch.inference_mode(case == "inference mode"):
                    assert torch.equal(fast(x), x * 3)
            finally:
                switch_off()


# --- what a graphed module is -------------------------------------------------------------------


def test_a_graphed_module_is_a_module(device: torch.device) -> None:
    inner = make_mlp(device)
    outer = nn.Sequential(graphed(inner, sizes=[2, 4]), nn.ReLU())
    names = ["0.0.weight", "0.0.bias", "0.2.weight", "0.2.bias"]
    assert isinstance(outer[0], nn.Module)
    assert list(outer.state_dict()) == names
    assert [name for name, _ in outer.named_parameters()] == names
    x = rows_of(3, device)
    torch.testing.assert_close(outer(x), inner(x).relu())
    outer.load_state_dict({name: tensor * 2 for name, tensor in outer.state_dict().items()})
    torch.testing.assert_close(outer(x), inner(x).relu())
    outer.double()  # through the outer module: the graphs notice, and are captured again
    torch.testing.assert_close(outer(x.double()), inner(x.double()).relu())


def test_assignment_reaches_the_model(device: torch.device) -> None:
    model = Scaled(device)
    fast = graphed(model, sizes=[2])
    fast.scale = 5.0
    fast.offset = torch.zeros(6, device=device)
    assert model.scale == 5.0
    assert model.get_buffer("offset") is fast.offset
    x = rows_of(2, device)
    torch.testing.assert_close(fast(x), model(x))
    del fast.scale
    assert not hasattr(model, "scale")
    assert repr(fast).startswith("graphed(Scaled(")
    assert {"stats", "inner"} <= set(dir(fast))


def test_changing_the_model_drops_its_graphs(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).to(device)
    with graphed(model, sizes=[2]) as fast:
        x = rows_of(2, device)
        assert fast.eval() is fast
        torch.testing.assert_close(fast(x), model[0](x))
        assert fast.train() is fast
        assert (fast(torch.ones_like(x)) == 0).any()


def test_a_decorated_method_has_graphs_for_each_object(device: torch.device) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        @graphed(sizes=[2, 4])
        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
            """Doubles."""
            return self.linear(x) * scale

    first, second = Model().to(device), Model().to(device)
    assert Model.forward.__doc__ is not None
    for model in (first, second, first, copy.deepcopy(second)):
        x = rows_of(3, device)
        torch.testing.assert_close(model(x, scale=2.0), model.linear(x) * 2)
    second.linear.weight.data = second.linear.weight.data.clone()
    with pytest.raises(ReplayMismatchError, match=r"parameter 'self\.linear\.weight' moved"):
        second(x, scale=2.0)
    torch.testing.assert_close(first(x, scale=2.0), first.linear(x) * 2)


def test_equal_objects_have_graphs_of_their_own(device: torch.device) -> None:
    class Equal:
        def __init__(self, scale: float) -> None:
            self.scale = scale

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 0

        @graphed(sizes=[2])
        def run(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    x = rows_of(2, device)
    first, second = Equal(2.0), Equal(3.0)
    assert torch.equal(first.run(x), x * 2)
    assert torch.equal(second.run(x), x * 3)

    class Slotted:
        __slots__ = ()
        run = Equal.__dict__["run"]

    with pytest.raises(ConfigError, match="Slotted does not; add '__weakref__'"):
        Slotted().run(x)


@pytest.mark.parametrize("copies", [copy.copy, copy.deepcopy, pickle.dumps])
def test_graphs_are_not_copied(copies: Callable[[Any], object]) -> None:
    for target in (nn.Linear(2, 2), lambda x: x):
        fast = graphed(target, sizes=[1])
        with pytest.raises(ConfigError, match=r"cannot be copied or pickled.*unwrap\(\)"):
            copies(fast)


def test_compiling_a_graphed_callable_is_refused_or_right(device: torch.device) -> None:
    fast = graphed(nn.Linear(6, 6).to(device), sizes=[2])
    x = rows_of(2, device)
    refused = r"graphed\(torch\.compile\(model\)\)|before, outside that function"
    compiled = torch.compile(fast, backend="eager")
    with contextlib.suppress(CaptureError):
        torch.testing.assert_close(compiled(x), fast.unwrap()(x))
        return
    with pytest.raises(CaptureError, match=refused):
        compiled(x)


def test_dropout_in_training_mode_is_pointed_out(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).to(device)
    with caplog.at_level(logging.WARNING), graphed(model, sizes=[2, 4]) as fast:
        fast(rows_of(2, device))
    assert caplog.text.count("Sequential is in training mode and draws random numbers") == 1


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.eye(3).to_sparse(), "sparse_coo"),
        (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
    ],
)
@pytest.mark.parametrize("batch_dim", [0, None, "static"])
@pytest.mark.filterwarnings("ignore:.*prototype.*", "ignore:Sparse.*")
def test_tensors_without_addresses_are_refused(
    make: Callable[[], torch.Tensor], kind: str, batch_dim: Any
) -> None:
    fast = graphed(lambda x, y: y, sizes=[4], batch_dims={"x": batch_dim})
    with pytest.raises(ConfigError, match=f"'x' is a .*{kind} tensor"):
        fast(make(), torch.ones(3, 2))


def test_results_of_the_pool_are_arguments_of_a_trial(pool: GraphPool) -> None:
    """Several replays of a trial would overwrite them."""
    first = graphed(lambda x: x + 1, sizes=[4], pool=pool)
    second = graphed(lambda x: (x * 2).cumsum(1), sizes=[4], pool=pool)
    for rows in (3, 4, 2, 3):
        x = rows_of(rows, pool.device)
        torch.testing.assert_close(second(first(x)), ((x + 1) * 2).cumsum(1))
