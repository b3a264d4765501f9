"""The ledger on CUDA: addresses in kernels, copies and fills, of our graphs and of others.

Run with ``-s`` to see what each graph holds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ostinato import (
    LLM,
    GraphConfig,
    Ledger,
    MemoryKind,
    SamplingParams,
    StaleGraphError,
    graphed,
    inspect_graph,
)
from ostinato.errors import ConfigError

pytest.importorskip("cuda.bindings")
triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

CUDA = torch.device("cuda")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@triton.jit
def add_kernel(x, y, out, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(out + at, tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)


def show(*what: object) -> None:
    sys.stdout.write(f"{' '.join(map(str, what))}\n")


def captured(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of one call, captured by hand as torch's documentation shows."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        run()
    return graph


def nodes_of(ledger: Ledger) -> list[Any]:
    show(ledger)
    return [node for graph in ledger.graphs() for node in graph.nodes]


def owners_in(nodes: list[Any]) -> set[str]:
    return {each.owner for node in nodes for each in node.addresses if each.name}


def tensors(*shape: int, count: int = 3, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(shape, device=CUDA, dtype=dtype) for _ in range(count)]


# --- graphs that others captured ------------------------------------------------------------------


def test_addresses_of_torch_kernels_are_found() -> None:
    x, y, out = tensors(1000)
    graph = captured(lambda: torch.add(x, y, out=out))
    (node,) = nodes_of(inspect_graph(graph, {"x": x, "y": y, "out": out}))
    assert node.kind == "kernel"
    assert owners_in([node]) == {"tensor 'x'", "tensor 'y'", "tensor 'out'"}


def test_addresses_of_triton_kernels_are_found() -> None:
    x, y, out = tensors(1000)
    graph = captured(lambda: add_kernel[(1,)](x, y, out, 1000, block=1024))
    (node,) = nodes_of(inspect_graph(graph, {"x": x, "y": y, "out": out}))
    assert "add_kernel" in node.name
    assert [(each.name, each.where) for each in node.addresses] == [
        ("tensor 'x'", "parameter 0"),
        ("tensor 'y'", "parameter 1"),
        ("tensor 'out'", "parameter 2"),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 16, 512])
def test_addresses_of_gemms_are_found_or_known_to_be_hidden(dtype: torch.dtype, rows: int) -> None:
    x, weight = tensors(rows, 1024, count=1, dtype=dtype)[0], tensors(2048, 1024, dtype=dtype)[0]
    out = torch.empty(rows, 2048, device=CUDA, dtype=dtype)
    graph = captured(lambda: torch.mm(x, weight.t(), out=out))
    nodes = nodes_of(inspect_graph(graph, {"x": x, "weight": weight, "out": out}))
    found = owners_in(nodes)
    hides = any(node.hides_addresses for node in nodes)
    show(f"{dtype}, {rows} rows: {sorted(found)}, hides: {hides}")
    assert hides or found == {"tensor 'x'", "tensor 'weight'", "tensor 'out'"}


def test_both_ends_of_copies_and_the_target_of_fills_are_found() -> None:
    x, out, zeroed = tensors(4096)

    def run() -> None:
        out.copy_(x)
        zeroed.zero_()

    nodes = nodes_of(inspect_graph(captured(run), {"x": x, "out": out, "zeroed": zeroed}))
    assert owners_in(nodes) == {"tensor 'x'", "tensor 'out'", "tensor 'zeroed'"}
    (copy,) = (node for node in nodes if node.kind == "memcpy")
    assert [(each.name, each.where) for each in copy.addresses] == [
        ("tensor 'x'", "source"),
        ("tensor 'out'", "destination"),
    ]


def test_memory_of_the_graph_itself_is_its_pools() -> None:
    x, out, _ = tensors(1000)
    graph = captured(lambda: torch.mul((x + 1).relu(), 2, out=out))
    ledger = inspect_graph(graph, {"x": x, "out": out})
    nodes = nodes_of(ledger)
    counts = ledger.count()
    assert len(nodes) == 3
    assert counts[MemoryKind.POOL] >= 1
    assert counts[MemoryKind.UNKNOWN] == 0
    ledger.check(thorough=True)


def test_unknown_memory_is_counted() -> None:
    x, y, out = tensors(1000)
    ledger = inspect_graph(captured(lambda: torch.add(x, y, out=out)), {"x": x})
    assert ledger.count() == {MemoryKind.STATE: 1, MemoryKind.UNKNOWN: 2}
    assert ledger.stale() == []


def test_a_moved_parameter_is_named() -> None:
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)).to(CUDA).requires_grad_(False)
    x = torch.randn(8, 64, device=CUDA)
    ledger = inspect_graph(captured(lambda: model(x)), {"model": model, "x": x}, name="my graph")
    ledger.check(thorough=True)
    old = model[0].weight.data
    model[0].weight.data = old.clone()
    with pytest.raises(StaleGraphError, match=r"my graph, node \d+ .*parameter 'model\.0\.weight'"):
        ledger.check()
    model[0].weight.data = old
    ledger.check()


def test_a_freed_tensor_is_found() -> None:
    x, out, _ = tensors(300_000)
    table = [torch.randn(300_000, device=CUDA)]
    graph = captured(lambda: torch.add(x, table[0], out=out))
    address = table[0].data_ptr()
    owners = {"x": x, "out": out}
    assert inspect_graph(graph, owners).stale() == []
    torch.cuda.synchronize()
    table.clear()
    (stale,) = inspect_graph(graph, owners).stale()
    assert (stale.address, stale.why, stale.owner) == (address, "freed", "unknown memory")


def test_pinned_host_memory_is_memory_outside_torch() -> None:
    host, out = torch.randn(4096).pin_memory(), torch.empty(4096, device=CUDA)
    graph = captured(lambda: out.copy_(host, non_blocking=True))
    nodes = nodes_of(inspect_graph(graph, {"host": host, "out": out}))
    assert owners_in(nodes) == {"tensor 'host'", "tensor 'out'"}


def test_a_graph_that_was_not_kept_is_refused() -> None:
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(4, device=CUDA)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        x.add_(1)
    with pytest.raises(ConfigError, match=r"cannot be read .*CUDAGraph\(keep_graph=True\)"):
        inspect_graph(graph, {"x": x})


# --- our own graphs -------------------------------------------------------------------------------


def test_nodes_know_their_operators() -> None:
    one, two = torch.ones(8, device=CUDA), torch.full((8,), 2.0, device=CUDA)
    with graphed(lambda x: torch.relu(x + one) * two, sizes=[4]) as function:
        function(torch.randn(4, 8, device=CUDA))
        nodes = nodes_of(function.ledger())
    assert [node.index for node in nodes] == [0, 1, 2]
    assert [node.operator for node in nodes] == [
        "aten.add.Tensor",
        "aten.relu.default",
        "aten.mul.Tensor",
    ]


def test_attention_and_gemms_of_a_graphed_module_have_owners() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(256, 768), nn.Linear(256, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).view(x.shape[0], 4, 3, 4, 64).permute(2, 0, 3, 1, 4)
            return self.out(F.scaled_dot_product_attention(q, k, v).flatten(1).view(-1, 4, 256))

    block = Block().to(CUDA, torch.bfloat16).requires_grad_(False).eval()
    with graphed(block, sizes=[2, 8], verify=False) as model:
        model(torch.randn(8, 4, 256, device=CUDA, dtype=torch.bfloat16))
        ledger = model.ledger()
        names = owners_in(nodes_of(ledger))
        assert {f"parameter '{name}'" for name, _ in block.named_parameters()} <= names
        ledger.check(thorough=True)
        block.out.weight.data = block.out.weight.data.clone()
        graphs = {each.graph for each in ledger.stale()}
        assert graphs == {"size 2", "size 8"}


def test_every_graph_of_an_engine_holds_its_weights_and_cache() -> None:
    options: dict[str, Any] = {"random_weights": True, "device": "cuda", "show_progress": False}
    options |= {"max_model_len": 128, "max_num_seqs": 8, "kv_cache_memory_bytes": "64M"}
    graphs = GraphConfig(mode="FULL_DECODE_ONLY", capture_sizes=[1, 2, 4, 8])
    with LLM("tiny", graphs=graphs, **options) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
        ledger = llm.ledger()
        ledger.check(thorough=True)
        for record in ledger.graphs():
            show(record.name, len(record.nodes), dict(record.count()))
        show(ledger)
        layers: list[Any] = llm.engine.runner.kv_cache.layers
        parameters = dict(llm.engine.model.named_parameters())  # type: ignore[attr-defined]
        num_graphs = len(ledger.graphs())
        for name, parameter in parameters.items():
            old = parameter.data
            parameter.data = old.clone()
            stale = ledger.stale(thorough=False)
            parameter.data = old
            show(f"{name}: {len({each.graph for each in stale})} of {num_graphs} graphs")
            assert len({each.graph for each in stale}) == num_graphs
            assert {each.owner for each in stale} == {f"parameter {name!r}"}
        for number, (keys, values) in enumerate(layers):
            layers[number] = keys.clone(), values
            stale = ledger.stale(thorough=False)
            layers[number] = keys, values
            assert len({each.graph for each in stale}) == num_graphs
            assert {each.owner for each in stale} == {f"KV cache 'layer {number}, keys'"}
        ledger.check()
