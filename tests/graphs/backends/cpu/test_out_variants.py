"""Which overload writes into given tensors, and that it computes what the operator does."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from ostinato import GraphPool
from ostinato.graphs.backends.cpu import recorder
from ostinato.graphs.backends.cpu.bindings import out_calls
from ostinato.graphs.backends.cpu.out_variants import out_variant_of

aten = torch.ops.aten

FACTORY = frozenset({"dtype", "layout", "device", "pin_memory"})


# A custom operator with an overload that looks like an out-variant.
LIBRARY = torch.library.Library("ostinato_test_out", "DEF")
LIBRARY.define("doubled(Tensor x) -> Tensor")
LIBRARY.define("doubled.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")


@pytest.mark.parametrize(
    ("operator", "variant", "names"),
    [
        (aten.mm.default, aten.mm.out, ("out",)),
        (aten.add.Tensor, aten.add.out, ("out",)),
        (aten.addmm.default, aten.addmm.out, ("out",)),
        (aten.exp.default, aten.exp.out, ("out",)),
        (aten.cat.default, aten.cat.out, ("out",)),
        (aten.sum.dim_IntList, aten.sum.IntList_out, ("out",)),
        (aten._softmax.default, aten._softmax.out, ("out",)),
        (aten.topk.default, aten.topk.values, ("values", "indices")),
        (aten.sort.default, aten.sort.values, ("values", "indices")),
        (aten.max.dim, aten.max.dim_max, ("max", "max_values")),
        (aten.native_layer_norm.default, aten.native_layer_norm.out, ("out0", "out1", "out2")),
    ],
    ids=str,
)
def test_the_variant_takes_the_same_arguments(
    operator: Any, variant: Any, names: tuple[str, ...]
) -> None:
    found = out_variant_of(operator)
    assert found is not None
    assert found == (variant, names, frozenset())


@pytest.mark.parametrize(
    ("operator", "variant"),
    [
        (aten.zeros.default, aten.zeros.out),
        (aten.full.default, aten.full.out),
        (aten.arange.start_step, aten.arange.start_out),
        (aten.new_zeros.default, aten.new_zeros.out),
        (aten.ones_like.default, aten.ones_like.out),
    ],
    ids=str,
)
def test_a_factory_takes_its_type_from_the_tensor(operator: Any, variant: Any) -> None:
    found = out_variant_of(operator)
    assert found is not None
    assert (found.operator, found.dropped) == (variant, FACTORY)


@pytest.mark.parametrize(
    "operator",
    [
        aten.add_.Tensor,
        aten.add.out,
        aten.index_put_.default,
        aten._local_scalar_dense.default,
        torch.ops.ostinato_test_out.doubled.default,
    ],
    ids=str,
)
def test_no_variant(operator: Any) -> None:
    assert out_variant_of(operator) is None


def functional_operators() -> list[Any]:
    packets = (getattr(aten, name) for name in dir(aten))
    packets = (packet for packet in packets if isinstance(packet, torch._ops.OpOverloadPacket))
    return [getattr(packet, name) for packet in packets for name in packet.overloads()]


def plain_arguments(operator: Any) -> list[tuple[str, str]]:
    arguments = [argument for argument in operator._schema.arguments if not argument.is_out]
    return [(argument.name, str(argument.type)) for argument in arguments]


def test_every_variant_in_torch_fits_its_operator() -> None:
    found = [(operator, out_variant_of(operator)) for operator in functional_operators()]
    found = [(operator, variant) for operator, variant in found if variant is not None]
    assert len(found) > 500
    for operator, variant in found:
        expected = [pair for pair in plain_arguments(operator) if pair[0] not in variant.dropped]
        assert plain_arguments(variant.operator) == expected, operator
        assert len(variant.output_names) == len(operator._schema.returns), operator


X = torch.linspace(-2, 2, 32).view(4, 8)


@pytest.mark.parametrize(
    ("operator", "args", "kwargs"),
    [
        (aten.mm.default, (X, X.t()), {}),
        (aten.add.Tensor, (X, X), {"alpha": 2}),
        (aten.sum.dim_IntList, (X, [1]), {"dtype": torch.float64}),
        (aten.topk.default, (X, 3), {}),
        (aten.max.dim, (X, 0), {}),
        (aten.cat.default, ([X, X], 1), {}),
        (aten.native_layer_norm.default, (X, [8], None, None, 1e-5), {}),
        (aten.full.default, ([4, 8], 2.5), {"dtype": torch.float64, "device": "cpu"}),
        (aten.arange.start_step, (1, 9, 2), {"dtype": torch.int32}),
        (aten.zeros_like.default, (X.t(),), {"memory_format": torch.preserve_format}),
    ],
    ids=str,
)
def test_the_variant_computes_the_same(operator: Any, args: Any, kwargs: Any) -> None:
    expected = operator(*args, **kwargs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    variant = out_variant_of(operator)
    assert variant is not None
    targets = [torch.full_like(tensor, 77) for tensor in expected]
    kept = {name: value for name, value in kwargs.items() if name not in variant.dropped}
    named = dict(zip(variant.output_names, targets, strict=True))
    variant.operator(*args, **kept, **named)
    assert all(map(torch.equal, targets, expected))


@pytest.mark.parametrize(
    ("operator", "function"),
    [
        (aten.mm.out, torch.mm),
        (aten.silu.out, torch._C._nn.silu),
        (aten.linalg_vector_norm.out, torch.linalg.vector_norm),
    ],
)
def test_torch_has_faster_ways_to_call_an_out_variant(operator: Any, function: Any) -> None:
    calls = out_calls(operator)
    assert len(calls) == 2
    assert calls[0] is function
    assert calls[-1] is operator


def test_an_out_variant_without_a_function_is_called_itself() -> None:
    # torch.embedding takes no ``out``, and says so when it is tried.
    ids, table = torch.tensor([2, 0]), torch.randn(3, 4)
    with GraphPool("cpu", lazy_capture=True) as pool:
        captured = pool.capture(lambda: torch.nn.functional.embedding(ids, table) + 1)
        ids.copy_(torch.tensor([1, 2]))
        pool.replay(captured.tape)
        assert torch.equal(captured.output, table[[1, 2]] + 1)
        assert captured.tape.num_nodes == 2


def test_a_function_that_does_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        return torch.sub(x, other, out=out)

    def calls(operator: Any) -> tuple[Any, ...]:
        return (wrong, operator) if operator is aten.mul.out else (operator,)

    monkeypatch.setattr(recorder, "out_calls", calls)
    x, y = torch.randn(5), torch.randn(5)
    with GraphPool("cpu", lazy_capture=True) as pool:
        captured = pool.capture(lambda: x * y)
        x.copy_(torch.randn(5))
        pool.replay(captured.tape)
        assert torch.equal(captured.output, x * y)


def test_trying_a_function_leaves_the_filters_of_warnings_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are the process's: other threads may warn, or capture, at the same time."""
    before, seen = list(warnings.filters), []

    def watched(x: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        seen.append(list(warnings.filters))
        return torch.mul(x, other, out=out)

    monkeypatch.setattr(recorder, "out_calls", lambda _: (watched,))
    x = torch.randn(5)
    with GraphPool("cpu", lazy_capture=True) as pool:
        pool.capture(lambda: x * x)
    assert seen
    assert all(filters == before for filters in seen)
