"""Weights that ``update_weights`` refuses: with what error, and that nothing has changed then."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_encoders import save_encoder
from tiny_models import TINY_GENERIC, TINY_NATIVE, TINY_WITH_OPTIONS
from weight_sets import GREEDY, PROMPTS, WeightSets, open_llm, tokens_of

from ostinato import (
    LLM,
    AsyncLLM,
    ClosedError,
    ConfigError,
    GraphConfig,
    ModelLoadError,
    RequestError,
)

Tensors = dict[str, torch.Tensor]
NORM = "model.norm.weight"
LAST = "model.layers.1.mlp.down_proj.weight"  # so that there is much to write before it


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> WeightSets:
    return WeightSets(TINY_NATIVE["llama"](), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llm(sets: WeightSets) -> Iterator[LLM]:
    with open_llm(sets.paths["a"], graphs=GraphConfig(capture_sizes=[4])) as llm:
        yield llm


@pytest.fixture(scope="module")
def generic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, WeightSets]]:
    sets = WeightSets(TINY_GENERIC["gpt2"](), tmp_path_factory.mktemp("gpt2"))
    with open_llm(sets.paths["a"], graphs=GraphConfig(mode="NONE")) as llm:
        yield llm, sets


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[-1] = float("nan")
    return tensor


CHANGES: dict[str, tuple[Callable[[Tensors, str], Any], type[Exception], str]] = {
    "unknown": (lambda b, _: {**b, "model.norm.bias": torch.ones(64)}, ModelLoadError, "norm.bias"),
    "stacked": (
        lambda b, _: {"model.layers.1.mlp.gate_up_proj": torch.ones(192, 64)},
        ModelLoadError,
        r"such as model\.layers\.1\.mlp\.(gate|up)_proj\.weight",
    ),
    "shape": (lambda b, n: {**b, n: b[n][:-1]}, ModelLoadError, "shape"),
    "nan": (lambda b, n: {**b, n: with_nan(b[n])}, ModelLoadError, "NaN"),
    "overflow": (lambda b, n: {**b, n: b[n].double() * 1e60}, ModelLoadError, "too large"),
    "integers": (lambda b, n: {**b, n: b[n].int()}, ModelLoadError, "int32"),
    "twice": (lambda b, n: [*b.items(), (n, b[n])], ModelLoadError, "twice"),
    "not a tensor": (lambda b, n: {**b, n: b[n].tolist()}, ConfigError, "not a tensor"),
    "no values": (lambda b, n: {**b, n: b[n].to("meta")}, ConfigError, "meta"),
    "sparse": (lambda b, n: {**b, n: b[n].to_sparse()}, ConfigError, "sparse"),
    "names alone": (lambda b, _: list(b), ConfigError, "pairs"),
    "a number": (lambda b, _: 7, ConfigError, "pairs"),
    "nothing": (lambda b, _: iter(()), ConfigError, "no weights"),
    "no such path": (lambda b, _: Path("/no/such/path"), ModelLoadError, "does not exist"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_refused_before_anything_changes(llm: LLM, sets: WeightSets, case: str) -> None:
    change, kind, message = CHANGES[case]
    with pytest.raises(kind, match=message):
        llm.update_weights(change(sets.of("b"), LAST))
    assert tokens_of(llm) == sets.tokens("a")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["unknown", "shape", "nan", "integers", "twice", "nothing"])
def test_refused_for_transformers_modules(generic: tuple[LLM, WeightSets], case: str) -> None:
    llm, sets = generic
    change, kind, message = CHANGES[case]
    with pytest.raises(kind, match=message):
        llm.update_weights(change(sets.of("b"), "transformer.h.1.mlp.c_proj.bias"))
    assert tokens_of(llm) == sets.tokens("a")


def test_names_that_transformers_would_drop(generic: tuple[LLM, WeightSets]) -> None:
    """It takes names like those of GPT-2's old masks, attn.bias, for them."""
    llm, sets = generic
    bias = sets.of("b")["transformer.h.0.attn.c_attn.bias"]
    for name in ("transformer.h.9.attn.c_attn.bias", "h.0.attn.c_attn.biases"):
        with pytest.raises(ModelLoadError, match=f"no weight called {name}"):
            llm.update_weights({name: bias})
    mask = torch.ones(1, 1, 256, 256)
    llm.update_weights({**sets.of("a"), "transformer.h.0.attn.bias": mask})
    assert tokens_of(llm) == sets.tokens("a")


@pytest.mark.parametrize("case", ["unknown", "shape", "nan", "integers"])
def test_refused_files(llm: LLM, sets: WeightSets, tmp_path: Path, case: str) -> None:
    change, kind, message = CHANGES[case]
    save_file(change(sets.of("b"), LAST), tmp_path / "model.safetensors")
    with pytest.raises(kind, match="I32" if case == "integers" else message):
        llm.update_weights(tmp_path / "model.safetensors")
    assert tokens_of(llm) == sets.tokens("a")


def test_an_iterator_that_raises(llm: LLM, sets: WeightSets) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(sets.of("b").items())[:5]
        raise ConnectionError("the trainer is gone")

    with pytest.raises(ConnectionError, match="the trainer is gone"):
        llm.update_weights(broken())
    assert tokens_of(llm) == sets.tokens("a")


def test_unfinished_requests(llm: LLM, sets: WeightSets) -> None:
    stream = llm.stream(PROMPTS, GREEDY)
    next(stream)
    with pytest.raises(RequestError, match="unfinished"):
        llm.update_weights(sets.paths["b"])
    stream.close()
    assert tokens_of(llm) == sets.tokens("a")


def test_tied_heads(tmp_path: Path, generic: tuple[LLM, WeightSets]) -> None:
    config = TINY_WITH_OPTIONS["gemma"]()
    config.tie_word_embeddings = True
    sets = WeightSets(config, tmp_path)
    embedding = "model.embed_tokens.weight"
    with open_llm(sets.paths["a"], graphs=GraphConfig(mode="NONE")) as llm:
        new = sets.of("b")
        for head in (
            {"lm_head.weight": new[embedding]},
            {**new, "lm_head.weight": -new[embedding]},
        ):
            with pytest.raises(ModelLoadError, match="embeddings are its head"):
                llm.update_weights(head)
        assert tokens_of(llm) == sets.tokens("a")
        llm.update_weights({**new, "lm_head.weight": new[embedding]})
        assert tokens_of(llm) == sets.tokens("b")
    llm, sets = generic
    new = sets.of("b")
    with pytest.raises(ModelLoadError, match="one weight"):
        llm.update_weights({**new, "lm_head.weight": -new["transformer.wte.weight"]})
    assert tokens_of(llm) == sets.tokens("a")


def test_an_interrupted_write(llm: LLM, sets: WeightSets, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are refused until the same tensors are written."""
    copy, left = torch.Tensor.copy_, [4]

    def interrupted(*args: Any) -> torch.Tensor:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return copy(*args)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.update_weights(sets.of("b"))
    b = sets.of("b")
    for _ in range(2):
        with pytest.raises(ModelLoadError, match="update_weights with all of them again"):
            llm.generate(PROMPTS, GREEDY)
        llm.update_weights({NORM: b[NORM]})  # not enough
    llm.update_weights(b)
    assert tokens_of(llm) == sets.tokens("b")
    llm.update_weights(sets.of("a"))
    assert tokens_of(llm) == sets.tokens("a")


def test_models_that_embed(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    with LLM(tmp_path, device="cpu", show_progress=False, graphs=GraphConfig(mode="NONE")) as llm:
        for call in (llm.reset_prefix_cache, lambda: llm.update_weights(tmp_path)):
            with pytest.raises(RequestError, match="not to generate"):
                call()


def test_a_closed_model(sets: WeightSets) -> None:
    with open_llm(sets.paths["a"], graphs=GraphConfig(mode="NONE")) as closed:
        closed.update_weights(sets.paths["b"])
        model = weakref.ref(closed.engine.model)
    gc.collect()
    assert model() is None
    with pytest.raises(ClosedError):
        closed.update_weights(sets.paths["b"])
    with pytest.raises(ClosedError):
        closed.expert_load()


def test_an_async_llm_between_requests(llm: LLM, sets: WeightSets) -> None:
    async def ask() -> None:
        async with AsyncLLM.from_config(llm.config) as served:
            async with served.stream(PROMPTS[0], replace(GREEDY, max_tokens=100)) as stream:
                await anext(stream)
                with pytest.raises(RequestError, match="unfinished"):
                    await served.update_weights(sets.paths["b"])
            await served.update_weights(sets.paths["b"])
            outputs = await asyncio.gather(*(served.generate(each, GREEDY) for each in PROMPTS))
            assert [each.outputs[0].token_ids for each in outputs] == sets.tokens("b")

    asyncio.run(ask())
