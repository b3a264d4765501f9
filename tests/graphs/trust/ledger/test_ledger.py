"""The ledger of graphed callables, managers and wrappers: what they hold, and what is refused."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ostinato import (
    CapturePlan,
    CudaGraphManager,
    CUDAGraphMode,
    CUDAGraphWrapper,
    GraphPool,
    Ledger,
    MemoryKind,
    NamedMemory,
    PreparedBatch,
    StaleGraphError,
    eager_break,
    graphed,
    inspect_graph,
    pool_ledger,
    set_forward_context,
)
from ostinato.errors import ConfigError, ReplayMismatchError
from ostinato.graphs.policy.descriptor import BatchDescriptor

WIDTH = 8


def owners(ledger: Ledger) -> set[str]:
    return {
        each.owner
        for graph in ledger.graphs()
        for node in graph.nodes
        for each in node.addresses
        if each.name
    }


class Scaled(nn.Module):
    """Has a parameter, a buffer, and a tensor that is neither."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, device=device)
        self.register_buffer("shift", torch.ones(WIDTH, device=device))
        self.scale = torch.full((WIDTH,), 2.0, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale + self.shift


def test_all_memory_of_a_module_has_an_owner(device: torch.device) -> None:
    with graphed(Scaled(device).eval(), sizes=[2, 4]) as model:
        assert str(model.ledger()) == "no graphs"
        model(torch.randn(3, WIDTH, device=device))
        ledger = model.ledger()
        assert owners(ledger) == {
            "parameter 'linear.weight'",
            "parameter 'linear.bias'",
            "buffer 'shift'",
            "attribute 'scale'",
            "input buffer 'x'",
        }
        if device.type == "cpu":  # CUDA's libraries have memory of their own
            assert ledger.count()[MemoryKind.UNKNOWN] == 0
        text = str(ledger)
        assert "size 4: " in text
        assert "size 2: " in text
        assert "parameter 'linear.weight'" in text
        ledger.check(thorough=True)
        assert ledger.stale() == []


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_moved_parameter_is_named_with_graph_and_node(device: torch.device, name: str) -> None:
    module = Scaled(device).eval()
    with graphed(module, sizes=[2, 4], check_state_every=0) as model:
        x = torch.randn(3, WIDTH, device=device)
        expected = model(x).clone()
        ledger = model.ledger()
        parameter = getattr(module.linear, name)
        old = parameter.data
        parameter.data = old.clone()
        with pytest.raises(StaleGraphError, match=f"parameter 'linear.{name}' at 0x") as raised:
            ledger.check()
        assert {each.graph for each in raised.value.stale} == {"size 2", "size 4"}
        assert all(each.node is not None for each in raised.value.stale)
        assert "addmm" in str(raised.value)
        assert "clear_graphs() and capture again" in str(raised.value)
        # Its graphs are refused, although nothing else checks them.
        with pytest.raises(StaleGraphError, match=r"1 graph holds .* size 4, node .* is now at 0x"):
            model(x)
        parameter.data = old
        ledger.check()
        assert torch.equal(model(x), expected)


def test_a_refused_graph_can_be_captured_again(device: torch.device) -> None:
    module = nn.Linear(WIDTH, WIDTH, device=device)
    x = torch.randn(2, WIDTH, device=device)
    with graphed(module, sizes=[2], check_state_every=0) as model:
        model(x)
        ledger = model.ledger()
        module.weight.data = torch.randn_like(module.weight)
        with pytest.raises(StaleGraphError):
            ledger.check()
        model.clear_graphs()
        ledger.check()
        with torch.no_grad():
            assert torch.equal(model(x), module(x))
        ledger.check(thorough=True)


def test_a_replaced_module_is_found(device: torch.device) -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()).to(device)
    with graphed(module, sizes=[2]) as model:
        model(torch.randn(2, WIDTH, device=device))
        ledger = model.ledger()
        module[0] = nn.Linear(WIDTH, WIDTH, device=device)
        assert {each.owner for each in ledger.stale()} == {
            "parameter '0.weight'",
            "parameter '0.bias'",
        }


def test_a_parameter_that_shrank_in_place_is_found(device: torch.device) -> None:
    module = nn.Linear(WIDTH, WIDTH, device=device)
    with graphed(module, sizes=[2]) as model:
        model(torch.randn(2, WIDTH, device=device))
        ledger = model.ledger()
        module.bias.data = module.bias.data[:4]
        assert {each.why for each in ledger.stale()} == {"now smaller (16 bytes)"}
        del module.bias
        module.bias = None
        assert {each.why for each in ledger.stale()} == {"gone"}


def test_a_parameter_without_dimensions_is_found(device: torch.device) -> None:
    scale = nn.Parameter(torch.tensor(2.0, device=device), requires_grad=False)
    holder = nn.ParameterList([scale])
    with graphed(lambda x: x * holder[0], sizes=[2]) as model:
        model(torch.randn(2, WIDTH, device=device))
        ledger = model.ledger()
        scale.data = torch.tensor(3.0, device=device)
        assert {each.owner for each in ledger.stale()} == {"parameter 'holder.0'"}


def test_a_number_from_the_host_is_not_held(device: torch.device) -> None:
    """The graph has a copy: where the number was is free, and nothing is stale."""
    with graphed(lambda x: torch.maximum(x, torch.tensor(0.5)), sizes=[2]) as model:
        x = torch.randn(2, WIDTH, device=device)
        torch.testing.assert_close(model(x), x.clamp(min=0.5))
        model.ledger().check()
        assert not model.ledger().stale()
        torch.testing.assert_close(model(-x), (-x).clamp(min=0.5))


def test_a_ledger_keeps_no_memory_alive(device: torch.device) -> None:
    module = nn.Linear(WIDTH, WIDTH, device=device)
    model = graphed(module, sizes=[2])
    model(torch.randn(2, WIDTH, device=device))
    ledger, weight = model.ledger(), StorageWeakRef(module.weight.untyped_storage())
    assert ledger.graphs()
    model.close()
    assert ledger.graphs() == []
    del model, module
    gc.collect()
    assert weight.expired()


@eager_break
def middle(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x + 1)


def test_pieces_are_told_apart(device: torch.device) -> None:
    first, second = (nn.Linear(WIDTH, WIDTH, device=device) for _ in range(2))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            out = torch.empty_like(hidden)
            middle(hidden, out)
            return self.second(out)

    with graphed(Model(), sizes=[2], mode="piecewise") as model:
        model(torch.randn(2, WIDTH, device=device))
        ledger = model.ledger()
        second.bias.data = second.bias.data.clone()
        stale = ledger.stale()
        assert {each.node.piece for each in stale if each.node} == {1}
        assert all("of piece 1 (" in str(each) for each in stale)


# --- managers and wrappers ------------------------------------------------------------------------


def managed(module: nn.Module, pool: GraphPool) -> CudaGraphManager[Any, Any]:
    plan = CapturePlan.build("FULL", [2, 4], max_num_seqs=4, max_num_batched_tokens=4)
    manager: CudaGraphManager[Any, Any] = CudaGraphManager(plan, pool, show_progress=False)
    inputs = torch.zeros(4, WIDTH, device=pool.device)
    manager.capture(
        module, lambda entry: PreparedBatch(inputs=inputs[: entry.descriptor.num_tokens])
    )
    manager.inputs = inputs  # type: ignore[attr-defined]  # keeps them
    return manager


def test_a_manager_knows_the_memory_of_its_graphs(pool: GraphPool) -> None:
    module = nn.Linear(WIDTH, WIDTH, device=pool.device).requires_grad_(False)
    manager = managed(module, pool)
    ledger = manager.ledger({"model": module, "inputs": manager.inputs})
    assert owners(ledger) == {
        "parameter 'model.weight'",
        "parameter 'model.bias'",
        "tensor 'inputs'",
        "output buffer 'hidden states'",
    }
    module.weight.data = module.weight.data.clone()
    with pytest.raises(StaleGraphError, match="2 graphs hold addresses"):
        ledger.check()
    with pytest.raises(StaleGraphError, match="FULL, 2 tokens of 2 requests, node "):
        manager.run_fullgraph(2)


def test_two_managers_in_a_pool_are_told_apart(pool: GraphPool) -> None:
    """Their output buffers have the same name."""
    modules = [nn.Linear(WIDTH, WIDTH, device=pool.device).requires_grad_(False) for _ in "ab"]
    first, second = (managed(module, pool) for module in modules)
    ledger = pool_ledger(pool, {"a": modules[0], "b": modules[1]})
    ledger.check()
    first.clear_graphs()
    ledger.check()
    modules[1].weight.data = modules[1].weight.data.clone()
    assert {each.owner for each in ledger.stale()} == {"parameter 'b.weight'"}
    with pytest.raises(StaleGraphError, match=r"parameter 'b.weight' at"):
        ledger.check()
    with pytest.raises(StaleGraphError):
        second.run_fullgraph(2)


def test_a_wrapper_refuses_a_stale_graph_and_others_go_on(pool: GraphPool) -> None:
    def wrap(module: nn.Module) -> CUDAGraphWrapper[Any]:
        return CUDAGraphWrapper(module, CUDAGraphMode.FULL, pool=pool)

    modules = [nn.Linear(WIDTH, WIDTH, device=pool.device).requires_grad_(False) for _ in range(2)]
    wrappers, x = [*map(wrap, modules)], torch.randn(2, WIDTH, device=pool.device)
    key = BatchDescriptor(2)

    def run(wrapper: CUDAGraphWrapper[Any]) -> Any:
        with set_forward_context(CUDAGraphMode.FULL, key):
            return wrapper(x)

    with pool.capturing():
        for wrapper in wrappers:
            run(wrapper)
    ledger = pool_ledger(pool, {"a": modules[0], "b": modules[1], "x": x})
    modules[0].weight.data = modules[0].weight.data.clone()
    with pytest.raises(StaleGraphError, match=r"FULL, 2 tokens, node .*parameter 'a\.weight'"):
        ledger.check()
    with pytest.raises(ReplayMismatchError, match=r"parameter 'a\.weight'"):
        run(wrappers[0])
    assert torch.equal(run(wrappers[1]), modules[1](x))


def test_one_ledger_does_not_allow_what_another_refuses(pool: GraphPool) -> None:
    module = nn.Linear(WIDTH, WIDTH, device=pool.device).requires_grad_(False)
    manager = managed(module, pool)
    knows, ignorant = manager.ledger({"model": module}), manager.ledger({"x": manager.inputs})
    old = module.weight.data
    module.weight.data = old.clone()
    with pytest.raises(StaleGraphError):
        knows.check()
    ignorant.check()
    with pytest.raises(StaleGraphError, match=r"parameter 'model\.weight'"):
        manager.run_fullgraph(2)
    module.weight.data = old
    knows.check()
    manager.run_fullgraph(2)


def test_graphs_captured_later_count_from_the_next_use(device: torch.device) -> None:
    with GraphPool(device, lazy_capture=True) as pool:
        module = nn.Linear(WIDTH, WIDTH, device=device).requires_grad_(False)
        wrapper: CUDAGraphWrapper[Any] = CUDAGraphWrapper(module, CUDAGraphMode.FULL, pool=pool)
        x = torch.randn(4, WIDTH, device=device)
        ledger = pool_ledger(pool, {"model": module, "x": x})

        def run(rows: int) -> None:
            with set_forward_context(CUDAGraphMode.FULL, BatchDescriptor(rows)):
                wrapper(x[:rows])

        run(2)
        ledger.update()
        module.weight.data = module.weight.data.clone()
        run(4)  # captured with the new address
        stale = ledger.stale()
        assert {each.graph for each in stale} == {"FULL, 2 tokens"}


def test_memory_without_an_owner_is_counted_as_unknown(pool: GraphPool) -> None:
    module = nn.Linear(WIDTH, WIDTH, device=pool.device).requires_grad_(False)
    manager = managed(module, pool)
    counts: Counter[MemoryKind] = manager.ledger({"model": module}).count()
    assert counts[MemoryKind.PARAMETER] == 4  # two in each graph
    assert counts[MemoryKind.UNKNOWN] >= 2  # the inputs
    assert "unknown memory" in str(manager.ledger({}))


# --- naming owners --------------------------------------------------------------------------------


class Cache:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def named_memory(self) -> list[NamedMemory]:
        return [NamedMemory(MemoryKind.KV_CACHE, "layer 0", self.tensor)]


def test_an_object_names_its_own_memory(pool: GraphPool) -> None:
    cache = Cache(torch.zeros(4, WIDTH, device=pool.device))
    wrapper: CUDAGraphWrapper[Any] = CUDAGraphWrapper(
        lambda x: cache.tensor.add_(x), CUDAGraphMode.FULL, pool=pool
    )
    x = [torch.ones(4, WIDTH, device=pool.device)]
    with pool.capturing(), set_forward_context(CUDAGraphMode.FULL, BatchDescriptor(4)):
        wrapper(x[0])
    both = {"KV cache 'layer 0'", "tensor 'x[0]'"}
    assert owners(pool_ledger(pool, {"cache": cache, "x": x})) == both
    assert owners(pool_ledger(pool, cache)) == {"KV cache 'layer 0'"}


@pytest.mark.parametrize("given", [nn.Linear(2, 2), [torch.ones(1)], None], ids=str)
def test_owners_without_names_are_refused(pool: GraphPool, given: Any) -> None:
    message = f"owners is a {type(given).__name__}; pass a dict that names modules, .*'model': mod"
    with pytest.raises(ConfigError, match=message):
        pool_ledger(pool, given)


def test_owners_without_tensors_are_refused(pool: GraphPool) -> None:
    managed(nn.Linear(WIDTH, WIDTH, device=pool.device).requires_grad_(False), pool)
    with pytest.raises(ConfigError, match=r"owners\['model'\] is a int without tensors; pass"):
        pool_ledger(pool, {"model": 3})


def test_only_cuda_graphs_are_inspected() -> None:
    with pytest.raises(ConfigError, match=r"takes a torch.cuda.CUDAGraph, got a function; for"):
        inspect_graph(lambda: None)  # type: ignore[arg-type]
