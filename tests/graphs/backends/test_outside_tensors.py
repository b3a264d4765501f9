"""Tensors from outside: a graph keeps the memory and the shape they had when it was captured.

A CUDA graph holds addresses. What Python objects refer to later (``parameter.data = ...``) does not
affect it, while new values at the same address do. A CPU recording behaves the same for all
tensors, so that no replay mixes old and new weights.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ostinato import GraphPool


def new_values(tensor: Tensor) -> Tensor:
    return torch.randn(tensor.shape, device=tensor.device).to(tensor.dtype)


def assign_data(tensor: Tensor) -> None:
    tensor.data = new_values(tensor)


def swap_storage(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.set_(new_values(tensor))


def swap_tensors(tensor: Tensor) -> None:
    torch.utils.swap_tensors(tensor, nn.Parameter(new_values(tensor)))


def assign_double(tensor: Tensor) -> None:
    tensor.data = new_values(tensor).double()


def assign_shape(tensor: Tensor) -> None:
    tensor.data = torch.randn(3, device=tensor.device)


REBINDS: dict[str, Callable[[Tensor], None]] = {
    "data": assign_data,
    "set_": swap_storage,
    "swap_tensors": swap_tensors,
    "dtype": assign_double,
    "shape": assign_shape,
}


@pytest.mark.parametrize("rebind", REBINDS.values(), ids=REBINDS)
@pytest.mark.parametrize("names", [["weight"], ["bias"], ["weight", "bias"]], ids="+".join)
def test_a_replay_uses_the_weights_of_its_capture(
    pool: GraphPool, device: torch.device, rebind: Callable[[Tensor], None], names: list[str]
) -> None:
    module = nn.Linear(8, 5).to(device)
    x = torch.randn(4, 8, device=device)
    weight, bias = module.weight.detach().clone(), module.bias.detach().clone()
    captured = pool.capture(lambda: module(x))
    kept = [module.weight.data, module.bias.data]  # CUDA does not keep memory for its graphs
    for name in names:
        rebind(getattr(module, name))
        x.copy_(torch.randn(4, 8))
        pool.replay(captured.tape)
        expected = torch.nn.functional.linear(x, weight, bias)
        torch.testing.assert_close(captured.output, expected, rtol=0, atol=0)
    assert len(kept) == 2


def test_values_written_in_place_are_seen(pool: GraphPool, device: torch.device) -> None:
    module = nn.Linear(8, 5).to(device)
    x = torch.randn(4, 8, device=device)
    captured = pool.capture(lambda: module(x))
    with torch.no_grad():
        module.weight.mul_(2)
        module.bias.data.copy_(torch.randn(5))
    pool.replay(captured.tape)
    torch.testing.assert_close(captured.output, module(x).detach(), rtol=0, atol=0)


def test_what_a_graph_writes_is_seen_outside(pool: GraphPool, device: torch.device) -> None:
    state = torch.zeros(4, 2, device=device)
    captured = pool.capture(lambda: state[1:3, 1].add_(1))
    for count in (2, 3):
        pool.replay(captured.tape)
        assert state.sum().item() == 2 * count
    old, state.data = state.data, torch.zeros(4, 2, device=device)
    pool.replay(captured.tape)
    assert (state.sum().item(), old.sum().item()) == (0.0, 8.0)


def test_the_memory_lives_as_long_as_the_graph() -> None:
    """On the CPU. A CUDA graph keeps nothing alive, and its user must."""
    modules = [nn.Linear(64, 64, bias=False)]
    x, weight = torch.randn(2, 64), modules[0].weight.detach().clone()
    with GraphPool("cpu", lazy_capture=True) as pool:
        captured = pool.capture(lambda: modules[0](x))
        parameter = weakref.ref(modules[0].weight)
        modules.clear()
        gc.collect()
        assert parameter() is None  # the memory is kept, but not the model
        junk = [torch.randn(64, 64) for _ in range(64)]
        pool.replay(captured.tape)
        torch.testing.assert_close(captured.output, x @ weight.t())
        assert len(junk) == 64


# --- what an alias has to carry over --------------------------------------------------------------

COMPLEX = torch.complex(torch.arange(6.0), torch.ones(6)).view(2, 3)
KINDS: dict[str, Callable[[], Tensor]] = {
    "conjugated": lambda: COMPLEX.clone().conj(),
    "negated": lambda: torch.imag(COMPLEX.clone().conj()),
    "conjugated slice": lambda: COMPLEX.clone().t().conj()[1:],
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
    "overlapping": lambda: torch.randn(9).as_strided((3, 4), (2, 1)),
    "offset": lambda: torch.randn(40)[7:19].view(3, 4),
    "strided": lambda: torch.randn(6, 8)[::2, ::2],
    "empty": lambda: torch.randn(0, 4),
    "scalar": lambda: torch.randn(()),
    "parameter": lambda: nn.Parameter(torch.randn(3, 4)),
    "buffer": lambda: nn.Buffer(torch.randn(3, 4)),
    "bool": lambda: torch.rand(3, 4) < 0.5,
    "bfloat16": lambda: torch.randn(3, 4).bfloat16(),
    "channels last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
}


def inference(make: Callable[[], Tensor]) -> Tensor:
    with torch.inference_mode():
        return make()


@pytest.mark.parametrize("in_inference", [False, True], ids=["normal", "inference_tensor"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_every_kind_of_tensor_is_read_as_it_is(
    pool: GraphPool,
    device: torch.device,
    make: Callable[[], Tensor],
    mode: Callable[[], Any],
    in_inference: bool,
) -> None:
    def on_device() -> Tensor:
        made = make()
        if device.type == "cpu":
            return made
        with torch.no_grad():
            return made.to(device)

    outside = inference(on_device) if in_inference else on_device()
    scale = torch.ones((), device=device)

    def function() -> list[Tensor]:
        return [outside * scale, outside + outside, outside.sum(), outside.flatten() * 1]

    with mode():
        captured = pool.capture(function, collect_garbage=False)
        torch.testing.assert_close(captured.output, function(), rtol=0, atol=0)
        scale.fill_(3)
        pool.replay(captured.tape)
        torch.testing.assert_close(captured.output, function(), rtol=0, atol=0)


@pytest.mark.slow
@given(
    order=st.permutations(["0.weight", "0.bias", "2.weight", "2.bias"]),
    kinds=st.lists(st.sampled_from(["data", "set_", "swap_tensors", "in place"]), min_size=4),
)
def test_any_order_of_changes(order: list[str], kinds: list[str]) -> None:
    """After every single change, a replay is what the memory of the capture says."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    memory = {name: parameter.data for name, parameter in module.named_parameters()}
    x = torch.randn(2, 4)
    with GraphPool("cpu", lazy_capture=True) as pool, torch.no_grad():
        captured = pool.capture(lambda: module(x), collect_garbage=False)
        for name, kind in zip(order, kinds, strict=False):
            parameter = dict(module.named_parameters())[name]
            if kind == "in place":
                memory[name].mul_(1.5)
            else:
                REBINDS[kind](parameter)
            x.normal_()
            pool.replay(captured.tape)
            hidden = torch.tanh(x @ memory["0.weight"].t() + memory["0.bias"])
            expected = hidden @ memory["2.weight"].t() + memory["2.bias"]
            torch.testing.assert_close(captured.output, expected)
