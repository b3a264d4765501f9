"""``update_weights``: tokens are transformers' with the new weights, by the graphs of the old."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import Merged, save_adapter
from tiny_hybrid import TINY_HYBRID
from tiny_models import TINY_GENERIC, TINY_MIXTURES, TINY_NATIVE, TINY_WITH_OPTIONS
from weight_sets import GREEDY, LONG, PROMPTS, WeightSets, open_llm, tokens_of

from ostinato import LLM, DraftModel, GraphConfig, OffloadConfig, compilation_counter

MODES = ["NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL", "FULL_AND_PIECEWISE", "FULL_AND_FULL"]
FAMILIES = {
    **{name: TINY_GENERIC[name] for name in ("gpt2", "opt")},
    **{name: TINY_MIXTURES[name] for name in ("qwen2_moe", "gpt_oss", "deepseek_v3")},
    **{name: TINY_WITH_OPTIONS[name] for name in ("gemma", "gemma3", "phi3", "glm4", "starcoder2")},
    **{name: TINY_NATIVE[name] for name in ("qwen2", "qwen3")},
}


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> WeightSets:
    return WeightSets(TINY_NATIVE["llama"](), tmp_path_factory.mktemp("llama"), "abc")


@pytest.fixture(scope="module")
def shared(sets: WeightSets) -> Iterator[LLM]:
    with open_llm(sets.paths["a"]) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM, sets: WeightSets) -> LLM:
    """One engine for all tests, with the weights of "a"."""
    shared.update_weights(sets.paths["a"])
    return shared


@pytest.mark.sweep
@pytest.mark.parametrize("mode", MODES)
def test_there_and_back_in_every_mode(sets: WeightSets, device: torch.device, mode: Any) -> None:
    with open_llm(sets.paths["a"], device, graphs=GraphConfig(capture_sizes=[4], mode=mode)) as llm:
        assert tokens_of(llm) == sets.tokens("a")
        addresses = [each.data_ptr() for each in llm.engine.model.parameters()]  # type: ignore[attr-defined]
        with compilation_counter.expect(num_cudagraph_captured=0):
            for name in "ba":
                llm.update_weights(sets.paths[name])
                assert tokens_of(llm) == sets.tokens(name)
            llm.update_weights({name: each.to(device) for name, each in sets.of("b").items()})
            assert tokens_of(llm) == sets.tokens("b") != sets.tokens("a")
        assert addresses == [each.data_ptr() for each in llm.engine.model.parameters()]  # type: ignore[attr-defined]


@pytest.mark.sweep
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_of_weights(family: str, tmp_path: Path) -> None:
    """Fused rows, RoPE orders, norm offsets, tied heads, stacked experts, transformers' modules."""
    sets = WeightSets(FAMILIES[family](), tmp_path)
    with open_llm(sets.paths["a"], graphs=GraphConfig(capture_sizes=[4])) as llm:
        assert tokens_of(llm) == sets.tokens("a")
        with compilation_counter.expect(num_cudagraph_captured=0):
            llm.update_weights(sets.paths["b"])
            assert tokens_of(llm) == sets.tokens("b") != sets.tokens("a")
            llm.update_weights(iter(sets.of("a").items()))
            assert tokens_of(llm) == sets.tokens("a")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_half_precision_modules(family: str, tmp_path: Path) -> None:
    """Modules that are fused in half precision keep copies or views of some weights."""
    sets = WeightSets(TINY_HYBRID[family](), tmp_path)
    options: dict[str, Any] = {"dtype": "bfloat16", "graphs": GraphConfig(mode="NONE")}
    with open_llm(sets.paths["b"], **options) as fresh:
        expected = tokens_of(fresh)
    with open_llm(sets.paths["a"], **options) as llm:
        assert llm.engine.model.num_fused_modules  # type: ignore[attr-defined]
        assert tokens_of(llm) != expected
        llm.update_weights(sets.paths["b"])
        assert tokens_of(llm) == expected


def test_some_tensors(llm: LLM, sets: WeightSets) -> None:
    a, b = sets.of("a"), sets.of("b")
    some = {name: b[name] for name in b if "layers.1.self_attn.k_proj" in name or "norm" in name}
    llm.update_weights(some.items())
    got = tokens_of(llm)
    assert got == sets.mixed_tokens({**a, **some})
    assert got not in (sets.tokens("a"), sets.tokens("b"))


@pytest.mark.slow
def test_some_tensors_of_transformers_modules(tmp_path: Path) -> None:
    sets = WeightSets(TINY_GENERIC["gpt2"](), tmp_path)
    a, b = sets.of("a"), sets.of("b")
    some = {name: b[name] for name in b if "h.1.mlp" in name or "ln_f" in name}
    with open_llm(sets.paths["a"]) as llm:
        llm.update_weights(some)
        assert tokens_of(llm) == sets.mixed_tokens({**a, **some})
        some = {name: b[name] for name in b if name.endswith("wte.weight")}  # and the tied head
        llm.update_weights(some)
        assert tokens_of(llm) == sets.mixed_tokens(
            {**some, "lm_head.weight": next(iter(some.values()))}
        )


def test_any_float_dtype_and_layout_of_memory(llm: LLM, sets: WeightSets) -> None:
    columns = {
        name: each.double()
        .permute(*reversed(range(each.dim())))
        .contiguous()
        .permute(*reversed(range(each.dim())))
        for name, each in sets.of("b").items()
    }
    llm.update_weights(columns)
    assert tokens_of(llm) == sets.tokens("b")


def test_an_iterator_may_reuse_its_memory(llm: LLM, sets: WeightSets) -> None:
    b = sets.of("b")
    memory = torch.empty(max(each.numel() for each in b.values()))

    def one_by_one() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in b.items():
            view = memory[: tensor.numel()].view(tensor.shape)
            yield name, view.copy_(tensor)

    llm.update_weights(one_by_one())
    assert tokens_of(llm) == sets.tokens("b")


def test_parameters_that_are_trained(llm: LLM, sets: WeightSets) -> None:
    weights = {name: torch.nn.Parameter(each) for name, each in sets.of("b").items()}
    llm.update_weights(list(weights.items()))
    assert tokens_of(llm) == sets.tokens("b")
    assert not any(each.requires_grad for each in llm.engine.model.parameters())  # type: ignore[attr-defined]


@pytest.mark.slow
def test_prefixes_of_old_weights(llm: LLM, sets: WeightSets) -> None:
    llm.generate([LONG], GREEDY)
    assert llm.generate([LONG], GREEDY)[0].num_cached_tokens == 48
    llm.update_weights(sets.paths["b"])
    assert llm.generate([LONG], GREEDY)[0].num_cached_tokens == 0
    llm.update_weights(sets.paths["b"], keep_prefix_cache=True)
    (output,) = llm.generate([LONG], GREEDY)
    assert output.num_cached_tokens == 48
    assert output.outputs[0].token_ids == sets.tokens("b")[PROMPTS.index(LONG)]


@pytest.mark.slow
def test_offloaded_layers(tmp_path: Path, device: torch.device) -> None:
    config = TINY_NATIVE["llama"]()
    config.num_hidden_layers = 4
    sets = WeightSets(config, tmp_path)
    offload = OffloadConfig(group=2, offloaded=1, prefetch=1)
    with open_llm(sets.paths["a"], device, offload=offload) as llm:
        with compilation_counter.expect(num_cudagraph_captured=0):
            for name in "aba":
                llm.update_weights(sets.paths[name])
                assert tokens_of(llm) == sets.tokens(name)
        slots = [each.data_ptr() for each in llm.engine.model.offloader.slots]  # type: ignore[union-attr]
        llm.update_weights({name: each.to(device) for name, each in sets.of("b").items()})
        assert tokens_of(llm) == sets.tokens("b")
        assert slots == [each.data_ptr() for each in llm.engine.model.offloader.slots]  # type: ignore[union-attr]


def test_two_models_at_once(llm: LLM, sets: WeightSets) -> None:
    with open_llm(sets.paths["a"], graphs=GraphConfig(capture_sizes=[4])) as other:
        llm.update_weights(sets.paths["b"])
        assert (tokens_of(llm), tokens_of(other)) == (sets.tokens("b"), sets.tokens("a"))
        other.update_weights(sets.paths["c"])
        assert (tokens_of(llm), tokens_of(other)) == (sets.tokens("b"), sets.tokens("c"))


@pytest.mark.slow
def test_beside_adapters_and_drafts(sets: WeightSets, tmp_path: Path) -> None:
    """Both stay; drafts of old weights change no token."""
    adapter = save_adapter(tmp_path, sets.paths["a"])
    options: dict[str, Any] = {
        "enable_lora": True,
        "speculative": DraftModel(model=str(sets.paths["a"]), num_tokens=2),
    }
    with open_llm(sets.paths["a"], **options, graphs=GraphConfig(capture_sizes=[4])) as llm:
        llm.load_adapter("one", adapter)
        assert tokens_of(llm) == sets.tokens("a")
        llm.update_weights(sets.paths["b"])
        assert tokens_of(llm) == sets.tokens("b")
        (output,) = llm.generate([LONG], GREEDY, adapter="one")
        expected = Merged(sets.paths["b"], adapter).tokens(LONG, len(output.outputs[0].token_ids))
        assert output.outputs[0].token_ids == expected


@pytest.mark.slow
def test_random_steps(llm: LLM, sets: WeightSets) -> None:
    """Generate, update and reset in any order; after each, tokens are those of the last update."""
    rng = random.Random(0)
    names = list(sets.of("a"))
    now, captured = sets.of("a"), compilation_counter.num_cudagraph_captured
    for _ in range(40):
        step = rng.choice(["whole", "some", "reset", "stream", "again"])
        if step == "whole":
            name = rng.choice("abc")
            now = sets.of(name)
            llm.update_weights(rng.choice([sets.paths[name], now, iter(now.items())]))
        elif step == "some":
            source = sets.of(rng.choice("abc"))
            some = {name: source[name] for name in rng.sample(names, rng.randint(1, 6))}
            now |= some
            llm.update_weights(some)
        elif step == "reset":
            llm.reset_prefix_cache()
        elif step == "stream":
            for _ in llm.stream(PROMPTS, GREEDY):
                if rng.random() < 0.1:
                    break
        assert tokens_of(llm) == sets.mixed_tokens(now)
    assert compilation_counter.num_cudagraph_captured == captured
