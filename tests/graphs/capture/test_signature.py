"""The replay check: what passes, and what is refused with the argument and both values named."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ostinato import graphed
from ostinato.errors import BatchError, ReplayMismatchError
from ostinato.graphs.capture.signature import CallSignature, TensorGuards, positional_names


@dataclass(frozen=True)
class Metadata:
    lengths: torch.Tensor
    causal: bool = True


def forward(x: Any, y: Any = None, *, mask: Any = None) -> None:
    """Stands for a captured callable; only its signature is read."""


def anything(*args: Any, **kwargs: Any) -> None:
    """A callable that hides the names of its arguments."""


def shadowed(x: Any, /, **kwargs: Any) -> None:
    """A callable where a keyword may have the name of a positional argument."""


class Call:
    """One way of calling: ``Call(x, mask=m)``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs


def capture(function: Callable[..., Any], call: Call) -> CallSignature:
    return CallSignature(function, call.args, call.kwargs)


def check(signature: CallSignature, call: Call) -> None:
    signature.check(call.args, call.kwargs)


def refused(signature: CallSignature, call: Call) -> str:
    with pytest.raises(ReplayMismatchError) as caught:
        check(signature, call)
    return str(caught.value)


@pytest.fixture
def x(device: torch.device) -> torch.Tensor:
    return torch.zeros(4, 3, device=device)


@pytest.fixture
def y(device: torch.device) -> torch.Tensor:
    return torch.ones(2, device=device)


# --- equal calls -------------------------------------------------------------------------------


def test_equal_calls_pass(x: torch.Tensor, y: torch.Tensor) -> None:
    calls = [
        Call(),
        Call(x),
        Call(x, y),
        Call(x, mask=y),
        Call(x=x, y=y, mask=None),
        Call(x, 3, mask="causal"),
        Call({"ids": [x, (y, 2)]}, Metadata(y), mask=[]),
    ]
    for call in calls:
        signature = capture(forward, call)
        for _ in range(3):
            check(signature, call)


def test_new_data_at_the_same_address_passes(x: torch.Tensor) -> None:
    signature = capture(forward, Call(x))
    x.fill_(9)
    check(signature, Call(x))


def test_another_view_of_the_same_memory_passes(x: torch.Tensor) -> None:
    signature = capture(forward, Call(x[:2], mask=[x[2:]]))
    check(signature, Call(x[:2], mask=[x[2:]]))


def test_equal_constants_need_not_be_identical(x: torch.Tensor) -> None:
    signature = capture(forward, Call(x, ("a" * 2, 1.5)))
    check(signature, Call(x, ("".join(["a", "a"]), 3 / 2)))


@pytest.mark.parametrize("nested", [False, True])
def test_equal_calls_pass_in_inference_mode(x: torch.Tensor, nested: bool) -> None:
    def call() -> Call:
        return Call({"x": x[:]}) if nested else Call(x[:])

    signature = capture(forward, call())
    with torch.inference_mode():
        inference = torch.zeros(4, 3, device=x.device)
        check(signature, call())
    check(signature, call())
    assert "moved" in refused(signature, Call({"x": inference} if nested else inference))


def test_captured_in_inference_mode_and_replayed_outside(device: torch.device) -> None:
    with torch.inference_mode():
        x = torch.zeros(3, device=device)
        signature = capture(forward, Call(x, mask=x))
    check(signature, Call(x, mask=x))


def test_grad_does_not_matter_and_the_fast_path_comes_back(x: torch.Tensor) -> None:
    signature = capture(forward, Call(x))
    with_grad = x.detach().requires_grad_()
    assert not signature.matches((with_grad,), {})
    check(signature, Call(with_grad))
    assert signature.matches((with_grad,), {}) == (TensorGuards is not None)
    assert "'x' moved" in refused(signature, Call(x.clone().requires_grad_()))


def test_order_of_keywords_does_not_matter(x: torch.Tensor, y: torch.Tensor) -> None:
    signature = capture(forward, Call(x=x, y=y))
    check(signature, Call(y=y, x=x))
    assert "argument 'x' has shape (2,)" in refused(signature, Call(x=y, y=x))


# --- tensors that differ -----------------------------------------------------------------------


def places(tensor: torch.Tensor, other: torch.Tensor) -> list[tuple[str, Call]]:
    """The tensor in every kind of place, with the name it has there."""
    return [
        ("x", Call(tensor)),
        ("y", Call(other, tensor)),
        ("mask", Call(other, mask=tensor)),
        ("x", Call(x=tensor)),
        ("x['ids'][1]", Call({"ids": [other, tensor]})),
        ("mask.lengths", Call(other, mask=Metadata(tensor))),
        ("x", Call(tensor, 5)),
    ]


CHANGES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str, str]] = {
    "shape": (lambda x: x[:3], "shape (3, 3)", "with (4, 3)"),
    "rank": (lambda x: x[0], "shape (3,)", "with (4, 3)"),
    "stride": (lambda x: x.as_strided((4, 3), (1, 4)), "stride (1, 4)", "with (3, 1)"),
    "dtype": (lambda x: x.view(torch.int32), "dtype torch.int32", "with torch.float32"),
    "device": (lambda x: x.to("meta"), "device meta", "with {device}"),
}


@pytest.mark.parametrize("place", range(7))
@pytest.mark.parametrize("change", CHANGES)
def test_changed_tensor_is_named_with_both_values(
    x: torch.Tensor, y: torch.Tensor, change: str, place: int
) -> None:
    alter, now, was = CHANGES[change]
    name, call = places(x, y)[place]
    message = refused(capture(forward, call), places(alter(x), y)[place][1])
    assert f"argument {name!r} has {now}, " in message
    assert was.format(device=x.device) in message


@pytest.mark.parametrize("place", range(7))
def test_moved_tensor_is_named_with_both_addresses(
    x: torch.Tensor, y: torch.Tensor, place: int
) -> None:
    moved = x.clone()
    name, call = places(x, y)[place]
    message = refused(capture(forward, call), places(moved, y)[place][1])
    assert f"argument {name!r} moved" in message
    assert f"captured with it at {x.data_ptr():#x}, it is now at {moved.data_ptr():#x}" in message


def test_moved_inside_its_storage(x: torch.Tensor) -> None:
    signature = capture(forward, Call(x[:2]))
    assert "'x' moved" in refused(signature, Call(x[2:]))


def test_refusal_does_not_change_what_is_accepted(x: torch.Tensor, y: torch.Tensor) -> None:
    signature = capture(forward, Call(x, y))
    for _ in range(2):
        assert "'y' moved" in refused(signature, Call(x, y.clone()))
        check(signature, Call(x, y))


def test_keys_that_look_alike_are_refused(x: torch.Tensor) -> None:
    class Key:
        def __repr__(self) -> str:
            return "key"

    first, second = Key(), Key()
    match = r"there are 2 arguments 'x\[key\]': keys of a dict look alike; use keys whose repr"
    with pytest.raises(BatchError, match=match):
        capture(forward, Call({first: x, second: x.clone()}))
    signature = capture(forward, Call({first: x}))
    with pytest.raises(BatchError, match=match):
        check(signature, Call({first: x, second: x.clone()}))
    check(signature, Call({first: x}))


def test_arguments_that_contain_themselves_are_refused(x: torch.Tensor) -> None:
    signature = capture(forward, Call(x, [x]))
    circle = [x]
    circle.append(circle)  # type: ignore[arg-type]
    with pytest.raises(BatchError, match="argument 'y' contains itself, or is nested too deeply"):
        check(signature, Call(x, circle))
    with pytest.raises(BatchError, match="argument 'y' contains itself"):
        capture(forward, Call(x, circle))


def test_swapped_tensors_are_noticed(x: torch.Tensor) -> None:
    other = x.clone()
    signature = capture(forward, Call(x, other))
    assert "argument 'x' moved" in refused(signature, Call(other, x))


def test_no_tensor_is_kept_alive(device: torch.device) -> None:
    x = torch.zeros(3, device=device)
    alive = weakref.ref(x)
    signature = capture(forward, Call(x, mask=[x]))
    del x
    assert alive() is None
    assert signature is not None


# --- values and structure that differ ----------------------------------------------------------


@pytest.mark.parametrize(
    ("was", "now"),
    [(3, 4), (1, True), (1, 1.0), ("a", "b"), (None, 0), (True, False), (torch.int8, torch.int16)],
)
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [v], lambda v: {"k": (v,)}])
def test_changed_constant_is_named_with_both_values(
    x: torch.Tensor, wrap: Callable[[Any], Any], was: Any, now: Any
) -> None:
    signature = capture(forward, Call(x, wrap(was)))
    message = refused(signature, Call(x, wrap(now)))
    assert re.search(rf"argument \"?'?y.* is {re.escape(repr(now))}, ", message)
    assert f"captured with {was!r};" in message


def test_changed_field_of_a_dataclass(x: torch.Tensor) -> None:
    signature = capture(forward, Call(x, mask=Metadata(x, causal=True)))
    message = refused(signature, Call(x, mask=Metadata(x, causal=False)))
    assert "argument 'mask.causal' is False, but the graph was captured with True" in message


def test_tensor_instead_of_a_value_and_the_other_way(x: torch.Tensor) -> None:
    message = refused(capture(forward, Call(x, 3)), Call(x, x))
    assert "argument 'y' is a tensor, but the graph was captured with 3" in message
    message = refused(capture(forward, Call(x, x)), Call(x, None))
    assert "argument 'y' is None, but the graph was captured with a tensor" in message


def test_argument_left_out_or_added(x: torch.Tensor, y: torch.Tensor) -> None:
    message = refused(capture(forward, Call(x, y)), Call(x))
    assert "missing ['y'], new []" in message
    message = refused(capture(forward, Call(x)), Call(x, mask=y))
    assert "missing [], new ['mask']" in message
    message = refused(capture(forward, Call(x)), Call())
    assert "missing ['x'], new []" in message


@pytest.mark.parametrize(
    ("was", "now", "missing", "new"),
    [
        (lambda t: [t, t], lambda t: [t], "['x[1]']", "[]"),
        (lambda t: [t], lambda t: [t, t], "[]", "['x[1]']"),
        (lambda t: {"a": t}, lambda t: {"b": t}, "[\"x['a']\"]", "[\"x['b']\"]"),
        (lambda t: {"a": t}, lambda t: [t], "[\"x['a']\"]", "['x[0]']"),
        (lambda t: t, lambda t: [t], "['x']", "['x[0]']"),
        (lambda t: Metadata(t).lengths, Metadata, "['x']", "['x.causal', 'x.lengths']"),
    ],
)
def test_changed_structure_names_what_is_missing_and_new(
    x: torch.Tensor,
    was: Callable[[torch.Tensor], Any],
    now: Callable[[torch.Tensor], Any],
    missing: str,
    new: str,
) -> None:
    message = refused(capture(forward, Call(was(x))), Call(now(x)))
    assert f"missing {missing}, new {new};" in message


# --- by keyword or by position -----------------------------------------------------------------


def test_keyword_for_a_named_position_is_the_same_call(x: torch.Tensor, y: torch.Tensor) -> None:
    by_position, by_keyword = Call(x, y), Call(x, y=y)
    for captured, replayed in ((by_position, by_keyword), (by_keyword, by_position)):
        signature = capture(forward, captured)
        check(signature, replayed)
        check(signature, captured)
        assert "argument 'y' moved" in refused(signature, Call(x, y=y.clone()))
        assert "argument 'y' moved" in refused(signature, Call(x, y.clone()))


def test_keyword_where_positions_have_no_names_is_another_call(x: torch.Tensor) -> None:
    message = refused(capture(anything, Call(x)), Call(x=x))
    assert "missing ['args[0]'], new ['x']" in message
    message = refused(capture(anything, Call(x=x)), Call(x))
    assert "missing ['x'], new ['args[0]']" in message


def test_position_without_a_name_is_named_by_index(x: torch.Tensor) -> None:
    message = refused(capture(anything, Call(x, x)), Call(x, x.clone()))
    assert "argument 'args[1]' moved" in message


def test_keyword_with_the_name_of_a_positional_argument(x: torch.Tensor, y: torch.Tensor) -> None:
    signature = capture(shadowed, Call(x, x=y))
    check(signature, Call(x, x=y))
    assert "moved" in refused(signature, Call(x.clone(), x=y))
    assert "moved" in refused(signature, Call(x, x=y.clone()))


class Model(torch.nn.Module):
    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return ids + positions


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (forward, ["x", "y"]),
        (anything, []),
        (shadowed, ["args[0]"]),
        (Model(), ["ids", "positions"]),
    ],
)
def test_positional_names(function: Callable[..., Any], names: list[str]) -> None:
    assert positional_names(function) == names


class Settings:
    """Raises another error than AttributeError for what it lacks."""

    def __init__(self) -> None:
        self.__dict__["values"] = {"factor": 2.0}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["values"][name]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def test_a_callable_that_cannot_be_asked_has_no_names(x: torch.Tensor) -> None:
    assert positional_names(Settings()) == []
    with graphed(Settings(), sizes=[len(x)]) as fast:
        assert torch.equal(fast(x), x * 2)


def test_arguments_of_a_module_are_named_as_in_forward(x: torch.Tensor) -> None:
    signature = capture(Model(), Call(x, x))
    assert "argument 'positions' moved" in refused(signature, Call(x, x.clone()))
