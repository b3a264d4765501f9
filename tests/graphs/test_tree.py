"""Walking nested values: the path to every leaf, and rebuilding with tensors replaced."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from ostinato.graphs.tree import leaves_with_path, map_tensors, tensors_in


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Batch:
    ids: torch.Tensor
    extra: Any = None


@dataclass(kw_only=True)
class WithDerived:
    ids: torch.Tensor
    doubled: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.doubled = self.ids * 2


@dataclass
class WithScale:
    """Keeps an argument of its constructor that is not a field, under the same name."""

    ids: torch.Tensor
    scale: InitVar[Any] = None

    def __post_init__(self, scale: Any) -> None:
        self.scale = scale


@dataclass
class Reserved:
    """Gives out no ``ids`` when asked, as configs of transformers do with some of their fields."""

    ids: torch.Tensor
    extra: Any = None

    def __getattribute__(self, name: str) -> Any:
        if name == "ids":
            raise RuntimeError("ask for the ids of a layer")
        return super().__getattribute__(name)


A, B, C = torch.tensor([1]), torch.tensor([2]), torch.tensor([3])


def test_fields_that_are_not_given_out_are_visited() -> None:
    value = Reserved(A, extra=B)
    assert list(tensors_in(value)) == [A, B]
    assert list(leaves_with_path(value, "config")) == [("config.ids", A), ("config.extra", B)]
    assert list(tensors_in(map_tensors(lambda tensor: tensor + 1, value))) == [A + 1, B + 1]


def test_path_is_the_expression_that_reaches_the_leaf() -> None:
    value = {"ids": [A, (B, 7)], 3: Batch(C, extra=Pair("x", None))}
    assert list(leaves_with_path(value, "batch")) == [
        ("batch['ids'][0]", A),
        ("batch['ids'][1][0]", B),
        ("batch['ids'][1][1]", 7),
        ("batch[3].ids", C),
        ("batch[3].extra[0]", "x"),
        ("batch[3].extra[1]", None),
    ]


@pytest.mark.parametrize("leaf", [A, 1, "text", None, torch.float32, Batch], ids=repr)
def test_leaf_is_its_own_tree(leaf: Any) -> None:
    assert list(leaves_with_path(leaf, "x")) == [("x", leaf)]


def test_tensors_in_order() -> None:
    value = [Batch(A, extra={"b": B}), 5, Pair(C, "x")]
    found = list(tensors_in(value))
    assert [id(tensor) for tensor in found] == [id(A), id(B), id(C)]


def plus_ten(tensor: torch.Tensor) -> int:
    return int(tensor) + 10


@pytest.mark.parametrize(
    ("value", "mapped"),
    [
        (A, 11),
        ([A, 1, "x"], [11, 1, "x"]),
        ((A, (B,)), (11, (12,))),
        (Pair(A, None), Pair(11, None)),
        ({"a": A, "b": {"c": B}}, {"a": 11, "b": {"c": 12}}),
        (OrderedDict(a=A), OrderedDict(a=11)),
        (defaultdict(list, a=A), defaultdict(list, a=11)),
        (Batch(A, extra=[B]), Batch(11, extra=[12])),  # type: ignore[arg-type]
        ([], []),
        ((), ()),
        (None, None),
    ],
    ids=repr,
)
def test_map_keeps_the_structure(value: Any, mapped: Any) -> None:
    result = map_tensors(plus_ten, value)
    assert type(result) is type(mapped)
    assert result == mapped


def test_map_keeps_torch_return_types() -> None:
    value = torch.max(torch.tensor([[1.0, 2.0]]), dim=1)
    result = map_tensors(lambda tensor: tensor + 1, value)
    assert type(result) is type(value)
    assert (result.values.tolist(), result.indices.tolist()) == ([3.0], [2])


def test_map_visits_in_the_order_of_tensors_in() -> None:
    value = {"x": [A, Batch(B)], "y": Pair(C, A)}
    visited: list[torch.Tensor] = []
    map_tensors(visited.append, value)
    assert [id(tensor) for tensor in visited] == [id(tensor) for tensor in tensors_in(value)]


def test_map_visits_fields_that_init_does_not_take() -> None:
    value = WithDerived(ids=A)
    visited: list[int] = []

    def visit(tensor: torch.Tensor) -> torch.Tensor:
        visited.append(id(tensor))
        return tensor

    mapped = map_tensors(visit, value)
    assert visited == [id(tensor) for tensor in tensors_in(value)]
    assert mapped.doubled is value.doubled


def test_map_leaves_the_original_alone() -> None:
    inner = [A]
    value = {"x": inner}
    map_tensors(lambda tensor: tensor + 1, value)
    assert value["x"] is inner
    assert inner[0] is A


def test_attributes_beside_the_fields_are_part_of_a_dataclass() -> None:
    value = WithScale(A, scale=B)
    assert list(leaves_with_path(value, "b")) == [("b.ids", A), ("b.scale", B)]
    assert list(tensors_in(value)) == [A, B]
    mapped = map_tensors(lambda tensor: tensor * 2, value)
    assert (mapped.ids.item(), mapped.scale.item()) == (2, 4)
