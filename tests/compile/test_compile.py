"""Piecewise graphs with torch.compile: the same results as the plain model, and the expected
numbers of pieces, compilations and graphs."""

from __future__ import annotations

import gc
import logging
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, LlamaConfig

from ostinato import (
    BatchDescriptor,
    CUDAGraphWrapper,
    GraphPool,
    compilation_counter,
    set_forward_context,
)
from ostinato.attention.base import AttentionSpec, attend
from ostinato.compile.backend import PiecewiseModel, compile_piecewise
from ostinato.compile.cache import CompileCache
from ostinato.errors import BatchError, CaptureError, ConfigError
from ostinato.graphs.backends.ambient import compiled_functions_run_eagerly
from ostinato.models.hf.model import HFCausalLM
from ostinato.models.native.config.decoder_config import DecoderConfig
from ostinato.models.native.decoder import Decoder

WIDTH, HEADS, VOCAB = 32, 4, 64
MAX_TOKENS = 40

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="inductor generates C++, and there is no C++ compiler",
)


class Running:
    """Attention whose results depend on token order, on all inputs and on the layer."""

    def forward(
        self, spec: Any, query: Any, key: Any, value: Any, metadata: Any, out: Any, sinks: Any
    ) -> None:
        groups = spec.num_heads // spec.num_kv_heads
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        weight = (query * key).sum(-1, keepdim=True).mul(spec.scale).tanh()
        weighted = weight * value
        seen = (weighted + weighted.roll(1, 0)) * (1 + spec.layer)
        out.copy_(seen if sinks is None else seen + sinks[:, None])


class Attention(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        size = WIDTH // HEADS
        self.spec = AttentionSpec(
            layer=layer,
            num_heads=HEADS,
            num_kv_heads=HEADS,
            head_dim=size,
            value_dim=size,
            scale=size**-0.5,
            window=7 if layer else None,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(1)
        return x + attend(self.spec, query, key, value).flatten(1)


class Model(nn.Module):
    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Attention(layer) for layer in range(num_layers))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids) + positions[:, None].to(torch.float32).sin()
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden)


class Bench:
    """Static inputs, and ways to run a model on a random batch of a given size."""

    def __init__(self, device: torch.device) -> None:
        self.ids = torch.zeros(MAX_TOKENS, dtype=torch.int64, device=device)
        self.positions = torch.zeros(MAX_TOKENS, dtype=torch.int64, device=device)
        self.metadata = SimpleNamespace(backend=Running())

    def fill(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.ids.random_(VOCAB)
        self.positions.random_(30)
        return self.ids[:num_tokens], self.positions[:num_tokens]

    @torch.inference_mode()
    def run(self, model: Callable[..., Any], num_tokens: int, mode: str = "NONE") -> Any:
        """On the current inputs. Results under a mode are copied: they are graph memory."""
        args = self.ids[:num_tokens], self.positions[:num_tokens]
        with set_forward_context(
            mode, BatchDescriptor(num_tokens=num_tokens), attn_metadata=self.metadata
        ):
            output = model(*args)
        return output.clone() if isinstance(output, torch.Tensor) else output


@pytest.fixture
def bench(device: torch.device) -> Bench:
    return Bench(device)


def eager(model: Callable[..., Any], pool: GraphPool, **options: Any) -> PiecewiseModel:
    return compile_piecewise(model, pool=pool, compiler="eager", **options)


def native(device: torch.device) -> Callable[..., Any]:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = Decoder(DecoderConfig.from_hf(config), device=device, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3)
    # torch.compile traces the unfused model, and only that can match it bit for bit.
    model._runs_fused = lambda hidden: False  # type: ignore[method-assign]
    return model.forward


def generic(device: torch.device) -> Callable[..., Any]:
    config = GPT2Config(vocab_size=VOCAB, n_embd=WIDTH, n_layer=3, n_head=HEADS, n_positions=64)
    model = HFCausalLM.from_config(config, device=device, dtype=torch.float32, seed=0)
    return model.forward


def small(device: torch.device) -> Callable[..., Any]:
    return Model().to(device).requires_grad_(False)


# --- the same results ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("make", [small, native, generic])
def test_equals_the_plain_model(
    make: Callable[[torch.device], Callable[..., Any]],
    device: torch.device,
    pool: GraphPool,
    bench: Bench,
) -> None:
    model = make(device)
    compiled = eager(model, pool)
    captured = (8, 1, 32)
    for size in captured:
        bench.fill(size)
        assert torch.equal(bench.run(compiled, size, "PIECEWISE"), bench.run(model, size))
    before = compilation_counter.clone()
    for size in (*captured, 1, *reversed(captured)):  # replays
        bench.fill(size)
        assert torch.equal(bench.run(compiled, size, "PIECEWISE"), bench.run(model, size))
    for size in (2, 7, 9, 31, 33, 1):  # no graphs: between, below and above
        bench.fill(size)
        assert torch.equal(bench.run(compiled, size), bench.run(model, size))
    assert compilation_counter == before
    assert compiled.num_recompiles == 0


@pytest.mark.slow
def test_full_graph_around_the_pieces(pool: GraphPool, bench: Bench, device: torch.device) -> None:
    model = small(device)
    compiled = eager(model, pool)
    full = CUDAGraphWrapper(compiled, "FULL", pool=pool)
    compiled.trace(*bench.fill(2))
    for mode in ("PIECEWISE", "FULL"):  # the order of capture
        bench.run(full, 4, mode)
    graphs = compilation_counter.num_cudagraph_captured
    for mode in ("FULL", "PIECEWISE", "NONE", "PIECEWISE", "FULL"):
        bench.fill(4)
        assert torch.equal(bench.run(full, 4, mode), bench.run(model, 4))
    assert compilation_counter.num_cudagraph_captured == graphs


def test_full_capture_holds_the_attention_and_not_its_context(
    device: torch.device, pool: GraphPool, bench: Bench
) -> None:
    model = small(device)
    compiled = eager(model, pool)
    full = CUDAGraphWrapper(compiled, "FULL", pool=pool)
    compiled.trace(*bench.fill(3))
    bench.run(full, 3, "FULL")
    ids, positions = bench.fill(3)
    with torch.inference_mode(), set_forward_context("FULL", BatchDescriptor(num_tokens=3)):
        replayed = full(ids, positions).clone()
    assert torch.equal(replayed, bench.run(model, 3))


def test_structured_results(device: torch.device, pool: GraphPool, bench: Bench) -> None:
    model = small(device)

    def forward(ids: torch.Tensor, positions: torch.Tensor) -> dict[str, Any]:
        hidden = model(ids, positions)
        return {"hidden": hidden, "aux": [hidden * 2, positions], "name": "last"}

    compiled = eager(forward, pool)
    for _ in range(2):
        _, positions = bench.fill(5)
        result = bench.run(compiled, 5, "PIECEWISE")
        expected = bench.run(model, 5)
        assert torch.equal(result["hidden"], expected)
        assert torch.equal(result["aux"][0], expected * 2)
        assert result["aux"][1].data_ptr() == positions.data_ptr()
        assert result["name"] == "last"


def test_weights_are_read_where_they_are(
    device: torch.device, pool: GraphPool, bench: Bench
) -> None:
    model = small(device)
    compiled = eager(model, pool)
    bench.fill(4)
    bench.run(compiled, 4, "PIECEWISE")
    for parameter in model.parameters():
        parameter.mul_(1.5)
    for mode in ("NONE", "PIECEWISE"):
        assert torch.equal(bench.run(compiled, 4, mode), bench.run(model, 4))


def test_nothing_keeps_the_weights(device: torch.device, pool: GraphPool, bench: Bench) -> None:
    model = Model().to(device).requires_grad_(False)
    compiled = eager(model, pool)
    for _ in range(2):
        bench.run(compiled, 4, "PIECEWISE")
    weights = [weakref.ref(parameter) for parameter in model.parameters()]
    del model, compiled
    gc.collect()
    assert [weight() for weight in weights] == [None] * len(weights)


# --- counts -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("num_layers", "sizes", "graphs"), [(2, (2, 1), 6), (12, (16,), 13)])
def test_counts(
    num_layers: int,
    sizes: tuple[int, ...],
    graphs: int,
    device: torch.device,
    pool: GraphPool,
    bench: Bench,
) -> None:
    compiled = eager(Model(num_layers).to(device), pool)
    with compilation_counter.expect(
        num_models_seen=1,
        num_graphs_seen=1,
        num_piecewise_graphs_seen=2 * num_layers + 1,
        num_piecewise_capturable_graphs_seen=num_layers + 1,
        num_backend_compilations=num_layers + 1,
        num_inductor_compiles=0,
        num_eager_compiles=num_layers + 1,
        num_cudagraph_captured=graphs,
    ):
        for size in sizes:
            bench.run(compiled, size)  # as a warm-up does
            bench.run(compiled, size, "PIECEWISE")
            bench.run(compiled, size, "PIECEWISE")


def test_garbage_once_and_a_weak_last_output(
    device: torch.device, pool: GraphPool, bench: Bench
) -> None:
    compiled = eager(small(device), pool)
    compiled.trace(*bench.fill(2))
    options = [wrapper.cudagraph_options for wrapper in compiled.wrappers]
    assert [option.gc_disable for option in options] == [False, True, True]
    assert [option.weak_ref_output for option in options] == [False, False, True]


@pytest.mark.slow
def test_more_operators_to_split_at(device: torch.device, pool: GraphPool, bench: Bench) -> None:
    model = small(device)
    names = ("ostinato::attend", "torch.nn.functional.layer_norm")
    compiled = eager(model, pool, splitting_ops=names)
    bench.fill(6)
    with compilation_counter.expect(
        num_piecewise_graphs_seen=6, num_piecewise_capturable_graphs_seen=3
    ):
        assert torch.equal(bench.run(compiled, 6, "PIECEWISE"), bench.run(model, 6))
    assert [piece.is_splitting for piece in compiled.pieces] == [False, True] * 3


@pytest.mark.slow
def test_an_operator_that_is_not_there_is_reported(
    device: torch.device, pool: GraphPool, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = eager(small(device), pool, splitting_ops=("ostinato::attend", "other::operator"))
    with caplog.at_level(logging.WARNING):
        compiled.trace(*bench.fill(2))
    assert "other::operator" in caplog.text
    assert "ostinato::attend" not in caplog.text


# --- recompiles ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_recompile_is_counted_and_reported(
    device: torch.device, pool: GraphPool, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    model = small(device)

    def forward(ids: torch.Tensor, positions: torch.Tensor) -> Any:
        hidden = model(ids, positions)
        return hidden * 2 if ids.shape[0] < 20 else hidden

    compiled = eager(forward, pool)
    bench.fill(MAX_TOKENS)
    assert torch.equal(bench.run(compiled, 30), bench.run(forward, 30))
    with caplog.at_level(logging.WARNING), compilation_counter.expect(num_graphs_seen=1):
        for size in (5, 30, 1, 20, 19):
            assert torch.equal(bench.run(compiled, size), bench.run(forward, size))
    assert compiled.num_recompiles == 1
    assert "compiled again" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("first", [5, 30])
def test_a_model_that_is_special_for_few_tokens(
    device: torch.device, pool: GraphPool, bench: Bench, first: int
) -> None:
    """Whichever size comes first, each way of the model's code gets a trace."""
    model = small(device)

    def forward(ids: torch.Tensor, positions: torch.Tensor) -> Any:
        hidden = model(ids, positions)
        return hidden * 2 if ids.shape[0] < 20 else hidden

    compiled = eager(forward, pool)
    bench.fill(MAX_TOKENS)
    for size in (first, 5, 30, 1, 20, 19):
        assert torch.equal(bench.run(compiled, size), bench.run(forward, size))
    assert compiled.num_recompiles == (1 if first == 30 else 0)


@pytest.mark.slow
def test_a_model_that_is_special_for_one_token(
    device: torch.device, pool: GraphPool, bench: Bench
) -> None:
    model = small(device)

    def forward(ids: torch.Tensor, positions: torch.Tensor) -> Any:
        hidden = model(ids, positions)
        return hidden * 2 if ids.shape[0] == 1 else hidden

    compiled = eager(forward, pool)
    bench.fill(MAX_TOKENS)
    compiled.trace(bench.ids, bench.positions)  # both traces are made at start-up
    with compilation_counter.expect(num_graphs_seen=0, num_cudagraph_captured=6):
        for size in (1, 2):
            assert torch.equal(bench.run(compiled, size), bench.run(forward, size))
            assert torch.equal(bench.run(compiled, size, "PIECEWISE"), bench.run(forward, size))
    assert compiled.num_recompiles == 0


@pytest.mark.slow
def test_other_argument_types_are_another_trace(
    device: torch.device, pool: GraphPool, bench: Bench
) -> None:
    model = small(device)
    compiled = eager(model, pool)
    bench.run(compiled, 4)
    bench.ids = bench.ids.to(torch.int32)
    bench.fill(4)
    assert torch.equal(bench.run(compiled, 4), bench.run(model, 4))
    assert compiled.num_recompiles == 1


# --- faults -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_graph_break_shows_the_line(device: torch.device, pool: GraphPool, bench: Bench) -> None:
    model = small(device)

    def forward(ids: torch.Tensor, positions: torch.Tensor) -> Any:
        hidden = model(ids, positions)
        if hidden.sum().item() > 0:  # the line to blame
            hidden = hidden * 2
        return hidden

    compiled = eager(forward, pool)
    with pytest.raises(CaptureError, match=r"cannot be traced") as caught:
        bench.run(compiled, 4)
    assert caught.value.source is not None
    assert Path(__file__).name in caught.value.source
    assert "the line to blame" in caught.value.source
    assert bench.run(eager(model, pool), 4).shape == (4, WIDTH)  # the next model compiles


@pytest.mark.slow
def test_a_first_call_inside_a_capture_says_what_to_do(
    device: torch.device, pool: GraphPool, bench: Bench
) -> None:
    compiled = eager(small(device), pool)
    full = CUDAGraphWrapper(compiled, "FULL", pool=pool)
    with pytest.raises(CaptureError, match=r"trace\(\)"):
        bench.run(full, 4, "FULL")
    compiled.trace(*bench.fill(4))
    bench.run(full, 4, "FULL")


def test_arguments_that_do_not_fit(device: torch.device, pool: GraphPool, bench: Bench) -> None:
    compiled = eager(small(device), pool)
    with pytest.raises(BatchError, match="3 rows"):
        compiled.trace(bench.ids[:3], bench.positions[:4])
    with pytest.raises(BatchError, match="contiguous"):
        compiled.trace(bench.ids[::2], bench.positions[::2])
    with pytest.raises(BatchError, match="one row per token"):
        compiled.trace()


def test_settings_are_checked(pool: GraphPool) -> None:
    with pytest.raises(ConfigError, match="inductor, eager"):
        compile_piecewise(Model(), pool=pool, compiler="llvm")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="list of names"):
        compile_piecewise(Model(), pool=pool, splitting_ops="ostinato::attend")


def break_inductor(monkeypatch: pytest.MonkeyPatch, *, when: str) -> None:
    """Make inductor fail on the pieces that contain ``when``."""
    import torch._inductor.compile_fx as module

    def broken(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        if any(when in node.name for node in graph.graph.nodes):
            raise RuntimeError("no code for this")
        return graph.forward if len(inputs) == 0 else lambda *args: graph.forward(*args)

    monkeypatch.setattr(module, "compile_fx", broken)


@pytest.mark.slow
def test_a_piece_that_fails_to_compile_is_named(
    device: torch.device, pool: GraphPool, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_inductor(monkeypatch, when="layer_norm")
    compiled = compile_piecewise(small(device), pool=pool)
    with pytest.raises(CaptureError, match=r"submod_4.*layer_norm.*no code for this.*eager"):
        bench.run(compiled, 4)


@pytest.mark.slow
def test_a_piece_falls_back_when_asked_to(
    device: torch.device,
    pool: GraphPool,
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    break_inductor(monkeypatch, when="layer_norm")
    model = small(device)
    compiled = compile_piecewise(model, pool=pool, eager_fallback=True)
    bench.fill(4)
    with compilation_counter.expect(
        num_backend_compilations=3, num_inductor_compiles=2, num_eager_compiles=1
    ):
        for mode in ("NONE", "PIECEWISE", "PIECEWISE"):
            assert torch.equal(bench.run(compiled, 4, mode), bench.run(model, 4))
    assert "submod_4" in caplog.text


# --- inductor, and what it keeps ----------------------------------------------------------------


@pytest.mark.slow
@needs_compiler
def test_inductor_and_its_cache(
    device: torch.device, pool: GraphPool, bench: Bench, tmp_path: Path
) -> None:
    model = Model(1).to(device).requires_grad_(False)
    hits: list[int] = []
    for _ in range(2):
        torch._dynamo.utils.counters.clear()
        compiled = compile_piecewise(model, pool=pool, cache_dir=tmp_path, model_key="small")
        with compilation_counter.expect(
            num_backend_compilations=2, num_inductor_compiles=2, num_eager_compiles=0
        ):
            for size in (1, 2, 7, 1, 40):
                bench.fill(size)
                for mode in ("NONE", "PIECEWISE", "PIECEWISE"):
                    torch.testing.assert_close(
                        bench.run(compiled, size, mode), bench.run(model, size)
                    )
        assert compiled.num_recompiles == 0
        counts = torch._dynamo.utils.counters
        hits.append(
            counts["inductor"]["fxgraph_cache_hit"] + counts["aot_autograd"]["autograd_cache_hit"]
        )
    assert hits[0] < 2 <= hits[1]
    assert [path.name for path in (tmp_path / "compiled").glob("*/manifest.json")]


def test_cache_keys(tmp_path: Path) -> None:
    def cache(model: str = "m", **settings: Any) -> CompileCache:
        return CompileCache(tmp_path, model=model, settings=settings)

    assert cache(a=1).path == cache(a=1).path
    assert len({cache().path, cache("n").path, cache(a=1).path, cache(a=2).path}) == 4
    assert not cache().is_filled
    with cache().in_use():
        assert not cache().is_filled
    assert cache().is_filled
    (cache().path / "manifest.json").write_text("{")
    assert not cache().is_filled


def test_a_failed_compilation_leaves_no_manifest(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path, model="m", settings={})
    with pytest.raises(ZeroDivisionError), cache.in_use():
        raise ZeroDivisionError
    assert not cache.is_filled


def test_captures_that_overlap_in_threads_leave_the_compiler_as_it_was() -> None:
    """Ranks that take turns enter and leave in any order; a leftover stance would be permanent."""
    import torch._dynamo

    first, second = compiled_functions_run_eagerly(), compiled_functions_run_eagerly()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert compiled
