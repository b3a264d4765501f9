"""Adapters that come and go while requests run: tokens, slots, graphs, prefix cache, errors.

Tokens are compared with transformers' for the adapter merged into the weights.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from adapters import Merged, save_adapter
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import TINY_NATIVE, save_tiny

from ostinato import (
    LLM,
    ConfigError,
    GraphConfig,
    RequestError,
    SamplingParams,
    compilation_counter,
)
from ostinato.graphs.policy.modes import ModeName

PROMPT = [5, 9, 33, 7, 21]
LONG = list(range(3, 60))
NEW_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


class World(NamedTuple):
    """A checkpoint, four adapters of it, and what transformers makes of each; None: without."""

    model: Path
    paths: dict[str, Path]
    merged: dict[str | None, Merged]
    known: dict[Any, list[int]]

    def tokens(self, adapter: str | None, prompt: list[int], count: int = NEW_TOKENS) -> list[int]:
        key = adapter, tuple(prompt), count
        if key not in self.known:
            self.known[key] = self.merged[adapter].tokens(prompt, count)
        return self.known[key]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    directory = tmp_path_factory.mktemp("world")
    model = save_tiny(TINY_NATIVE["llama"](), directory / "model")
    paths = {
        name: save_adapter(directory / name, model, seed=seed, rank=4 * seed)
        for seed, name in enumerate("abcd", start=1)
    }
    merged: dict[str | None, Merged] = {None: Merged(model)}
    merged |= {name: Merged(model, path) for name, path in paths.items()}
    return World(model, paths, merged, {})


def open_llm(world: World, device: torch.device, **options: Any) -> LLM:
    defaults: dict[str, Any] = {
        "device": str(device),
        "dtype": "float32",
        "max_num_seqs": 4,
        "max_model_len": 128,
        "kv_cache_memory_bytes": "4M",
        "enable_lora": True,
        "max_loras": 2,
        "show_progress": False,
        "graphs": GraphConfig(capture_sizes=[4]),
    }
    return LLM(str(world.model), **{**defaults, **options})


@pytest.fixture
def llm(world: World, device: torch.device) -> Iterator[LLM]:
    with open_llm(world, device) as llm:
        yield llm


def tokens_of(outputs: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def generate(llm: LLM, prompt: list[int], adapter: str | None = None) -> list[int]:
    return tokens_of(llm.generate([prompt], GREEDY, adapter=adapter))[0]


# --- coming and going ---------------------------------------------------------------------------


def test_load_replace_unload(llm: LLM, world: World) -> None:
    assert len({tuple(world.tokens(name, PROMPT)) for name in (None, *"abcd")}) == 5
    with compilation_counter.expect(num_cudagraph_captured=0):
        llm.load_adapter("x", world.paths["a"])
        assert generate(llm, PROMPT, "x") == world.tokens("a", PROMPT)
        llm.load_adapter("y", world.paths["b"])
        llm.load_adapter("x", world.paths["c"])
        assert llm.adapters == ["y", "x"]
        outputs = llm.generate([PROMPT] * 3, GREEDY, adapter=["x", "y", None])
        assert tokens_of(outputs) == [world.tokens(name, PROMPT) for name in ("c", "b", None)]
        llm.unload_adapter("y")
        assert llm.adapters == ["x"]
        with pytest.raises(RequestError, match=r"no adapter 'y' \(loaded are x\); load it"):
            llm.generate([PROMPT], GREEDY, adapter="y")
        llm.load_adapter("z", world.paths["d"])
        outputs = llm.generate([PROMPT] * 2, GREEDY, adapter=["z", "x"])
        assert tokens_of(outputs) == [world.tokens(name, PROMPT) for name in "dc"]


def test_a_smaller_adapter_leaves_nothing_of_a_larger_one(
    llm: LLM, world: World, tmp_path: Path
) -> None:
    """Neither in higher ranks nor in linears that it does not change."""
    small = save_adapter(tmp_path / "small", world.model, rank=2, targets=("v_proj",))
    llm.load_adapter("x", world.paths["d"])
    llm.load_adapter("x", small)
    assert generate(llm, PROMPT, "x") == Merged(world.model, small).tokens(PROMPT, NEW_TOKENS)


def collect(stream: Any, into: list[int], steps: int) -> None:
    for _ in range(steps):
        delta = next(stream, None)
        if delta is None:
            return
        into += delta.token_ids


def test_requests_keep_the_adapter_they_began_with(llm: LLM, world: World) -> None:
    llm.load_adapter("x", world.paths["a"])
    tokens: list[int] = []
    longer = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    with llm.stream(PROMPT, longer, adapter="x") as stream:  # calls inside step it too
        collect(stream, tokens, 3)
        llm.load_adapter("x", world.paths["b"])  # into the other slot
        assert generate(llm, PROMPT, "x") == world.tokens("b", PROMPT)
        collect(stream, tokens, 2)
        with pytest.raises(ConfigError, match=r"all 2 slots.*by x and by 1 unloaded ones that req"):
            llm.load_adapter("z", world.paths["c"])
        llm.unload_adapter("x")
        with pytest.raises(RequestError, match=r"no adapter 'x' \(none is loaded\)"):
            llm.generate([PROMPT], GREEDY, adapter="x")
        llm.load_adapter("z", world.paths["c"])  # where the second x was
        assert generate(llm, PROMPT, "z") == world.tokens("c", PROMPT)
        collect(stream, tokens, 100)
    assert tokens == world.tokens("a", PROMPT, 70)
    llm.load_adapter("w", world.paths["d"])  # where the first x was
    outputs = llm.generate([PROMPT] * 2, GREEDY, adapter=["w", "z"])
    assert tokens_of(outputs) == [world.tokens(name, PROMPT) for name in "dc"]


def test_a_replaced_adapter_needs_a_second_slot_while_it_is_used(
    world: World, device: torch.device
) -> None:
    with open_llm(world, device, max_loras=1) as llm:
        llm.load_adapter("x", world.paths["a"])
        tokens: list[int] = []
        stream = llm.stream([PROMPT] * 7, GREEDY, adapter="x")  # more than run at once
        for _ in range(3):
            next(stream)
        with pytest.raises(ConfigError, match="requests still use the 'x' to be replaced; unload"):
            llm.load_adapter("x", world.paths["b"])
        stream.close()
        llm.load_adapter("x", world.paths["b"])
        assert generate(llm, PROMPT, "x") == world.tokens("b", PROMPT)
        # A stream that was never read holds its slot only as long as it exists.
        stream = llm.stream(PROMPT, GREEDY, adapter="x")
        with pytest.raises(ConfigError, match="requests still use"):
            llm.load_adapter("x", world.paths["a"])
        collect(stream, tokens, 100)
        assert tokens == world.tokens("b", PROMPT)
        stream = llm.stream(PROMPT, GREEDY, adapter="x")
        del stream
        llm.load_adapter("x", world.paths["a"])
        assert generate(llm, PROMPT, "x") == world.tokens("a", PROMPT)


def test_an_interrupted_replacement_leaves_no_adapter(
    llm: LLM, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.load_adapter("x", world.paths["a"])
    runner = llm.engine.runner
    load_adapter = runner.load_adapter

    def interrupted(slot: int, matrices: Any) -> None:
        load_adapter(slot, dict(list(matrices.items())[:5]))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner, "load_adapter", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.load_adapter("x", world.paths["b"])
    assert llm.adapters == []
    llm.load_adapter("x", world.paths["b"])
    assert generate(llm, PROMPT, "x") == world.tokens("b", PROMPT)


# --- graphs -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "mixed"), [("FULL_AND_PIECEWISE", 3), ("FULL_AND_FULL", 1)])
@pytest.mark.parametrize(("max_loras", "cases"), [(1, 2), (4, 4), (5, 5)])
def test_graphs_are_captured_by_number_of_adapters(
    world: World, device: torch.device, max_loras: int, cases: int, mode: ModeName, mixed: int
) -> None:
    """Two layers have three pieces; cases are 0, the powers of two below max_loras, max_loras."""
    sizes = [2, 4, 16]
    full = 2  # 16 is above max_num_seqs
    graphs = GraphConfig(capture_sizes=sizes, mode=mode)
    with (
        compilation_counter.expect(num_cudagraph_captured=(len(sizes) * mixed + full) * cases),
        open_llm(world, device, max_loras=max_loras, graphs=graphs),
    ):
        pass


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL_AND_FULL"])
def test_a_batch_runs_the_graph_of_its_number_of_adapters(
    world: World, device: torch.device, mode: ModeName
) -> None:
    graphs = GraphConfig(mode=mode, capture_sizes=[4, 24])
    with open_llm(world, device, max_loras=4, graphs=graphs) as llm:
        for name, path in world.paths.items():
            llm.load_adapter(name, path)
        stats = llm.engine.runner.stats
        for wanted, case in (
            ([None, None], 0),
            ([None, "a"], 1),
            (["c", "c", "c", "c"], 1),
            (["b", "a"], 2),
            (["a", "b", "d", "d"], 4),
            (["a", "b", "c", "d"], 4),
        ):
            stats.reset()
            outputs = llm.generate([PROMPT] * len(wanted), GREEDY, adapter=wanted)
            assert tokens_of(outputs) == [world.tokens(name, PROMPT) for name in wanted]
            cases = {(key.uniform, key.num_active_loras) for key in stats.replays}
            assert cases == {(False, case), (True, case)}
            assert stats.misses == 0


@pytest.mark.slow
def test_log_probabilities_by_the_sampler_of_each_decode_graph(
    world: World, device: torch.device
) -> None:
    """Decode graphs of one size, for 0, 1 and 2 adapters, have logits and samplers of their own."""
    asked = replace(GREEDY, logprobs=0)
    with open_llm(world, device) as llm:
        llm.load_adapter("a", world.paths["a"])
        llm.load_adapter("b", world.paths["b"])
        stats = llm.engine.runner.samplers.stats
        batches: list[list[str | None]] = [[None, None], ["a", None], ["b", "a"]]
        for wanted in batches * 2:
            outputs = llm.generate([PROMPT] * 2, asked, adapter=wanted)
            assert tokens_of(outputs) == [world.tokens(name, PROMPT) for name in wanted]
            for output, name in zip(outputs, wanted, strict=True):
                (completion,) = output.outputs
                assert completion.logprobs is not None
                got = [next(iter(each.values())).logprob for each in completion.logprobs]
                want = world.merged[name].logprobs(PROMPT, completion.token_ids)
                torch.testing.assert_close(torch.tensor(got), want, rtol=1e-3, atol=1e-3)
        assert stats.captures == len(batches)
        assert stats.replays > 0


def test_without_active_adapters_the_graphs_are_those_of_no_lora(
    world: World, device: torch.device
) -> None:
    def nodes(llm: LLM) -> dict[Any, int | None]:
        runner = llm.engine.runner
        entries = [entry for entry in runner.plan.entries if not entry.descriptor.has_lora]
        return {entry: runner.num_nodes(entry) for entry in entries}

    with open_llm(world, device) as llm:
        with_lora = nodes(llm)
    with open_llm(world, device, enable_lora=False, max_loras=1) as llm:
        assert nodes(llm) == with_lora


# --- prefix cache -------------------------------------------------------------------------------


def cached(llm: LLM, adapter: str | None) -> int:
    (output,) = llm.generate([LONG], GREEDY, adapter=adapter)
    return int(output.num_cached_tokens)


@pytest.mark.slow
def test_adapters_share_no_blocks(llm: LLM, world: World) -> None:
    llm.load_adapter("x", world.paths["a"])
    llm.load_adapter("y", world.paths["b"])
    for adapter in (None, "x", "y"):
        assert cached(llm, adapter) == 0
        assert cached(llm, adapter) == 48
    llm.load_adapter("x", world.paths["c"])
    assert cached(llm, "x") == 0  # another adapter under the same name
    assert generate(llm, LONG, "x") == world.tokens("c", LONG)
    llm.load_adapter("x", world.paths["c"])
    assert cached(llm, "x") == 0  # files may have changed
    assert cached(llm, "y") == 48
    assert generate(llm, LONG) == world.tokens(None, LONG)


# --- random workloads ---------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=8)
@given(
    seed=st.integers(0, 2**32),
    overlaps=st.booleans(),
    mode=st.sampled_from(["FULL_AND_PIECEWISE", "FULL_AND_FULL"]),
)
def test_random_comings_and_goings(world: World, seed: int, overlaps: bool, mode: ModeName) -> None:
    """Streams, calls and changes of adapters in random order: every request has its own tokens."""
    source = random.Random(seed)
    with open_llm(
        world,
        torch.device("cpu"),
        max_loras=3,
        async_scheduling=overlaps,
        max_num_batched_tokens=24,
        graphs=GraphConfig(mode=mode, capture_sizes=[4, 24]),
    ) as llm:
        loaded: dict[str, str] = {}  # by name: which of the four adapters
        streams: list[tuple[Any, list[int], list[int]]] = []  # stream, tokens, expected
        for _ in range(25):
            action = source.choice(["load", "unload", "generate", "stream", "read", "read"])
            name = source.choice("xyz")
            names = [None, *loaded]
            if action == "load":
                which = source.choice("abcd")
                try:
                    llm.load_adapter(name, world.paths[which])
                except ConfigError:
                    continue
                loaded[name] = which
            elif action == "unload" and name in loaded:
                llm.unload_adapter(name)
                del loaded[name]
            elif action == "generate":
                wanted = [source.choice(names) for _ in range(source.randint(1, 5))]
                outputs = llm.generate([PROMPT] * len(wanted), GREEDY, adapter=wanted)
                expected = [None if each is None else loaded[each] for each in wanted]
                assert tokens_of(outputs) == [world.tokens(each, PROMPT) for each in expected]
            elif action == "stream":
                adapter = source.choice(names)
                prompt = source.choice([PROMPT, LONG])
                which = None if adapter is None else loaded[adapter]
                stream = llm.stream(prompt, GREEDY, adapter=adapter)
                streams.append((stream, [], world.tokens(which, prompt)))
            elif streams:
                stream, tokens, expected = source.choice(streams)
                collect(stream, tokens, source.randint(1, 6))
        for stream, tokens, expected in streams:
            collect(stream, tokens, 100)
            assert tokens == expected
