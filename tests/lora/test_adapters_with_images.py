"""Adapters of models that take images: written by PEFT, and compared with PEFT token for token.

Requests with images and without, with an adapter and without, share batches. PEFT runs each of them
alone, on transformers' model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_vision import (
    CONFIGS,
    greedy,
    open_vision,
    picture,
    prompt_of,
    reference,
    save_vision_model,
)

from ostinato import LLM, ConfigError, ModelLoadError, ReplayedDrafts, RequestError

peft = pytest.importorskip("peft")

NUM_TOKENS = 8
LANGUAGE = r".*language_model.*\."
ADAPTERS: dict[str, dict[str, Any]] = {
    "wide": {
        "r": 8,
        "target_modules": "all-linear",
        "exclude_modules": ".*visual.*",
    },
    "narrow": {
        "r": 3,
        "target_modules": LANGUAGE + "(q_proj|v_proj)",
        "alpha_pattern": {r"model\.language_model\.layers\.1\.self_attn\.v_proj": 40},
    },
    "scaled": {
        "r": 16,
        "target_modules": LANGUAGE + "(up_proj|down_proj)",
        "rank_pattern": {"down_proj": 5},
        "use_rslora": True,
        "lora_alpha": 8,
    },
}
SMALL, LARGE, OTHER = picture(24, 16, 1), picture(33, 40, 2), picture(24, 16, 3)
TEXT, ONE, ANOTHER = prompt_of(6, 7, 8, 9), prompt_of(6, SMALL, 7, 8), prompt_of(6, OTHER, 7, 8)
TWO = prompt_of(9, SMALL, 10, LARGE, 11, 7)
REQUESTS: list[tuple[dict[str, Any], str | None]] = [
    (ONE, None),
    (ONE, "wide"),
    (TEXT, "wide"),
    (ANOTHER, "narrow"),
    (TWO, "scaled"),
    (TEXT, None),
    (ONE, "scaled"),
]


class World(NamedTuple):
    """A checkpoint, its adapters as PEFT saves them, and PEFT's model with all of them."""

    model: Path
    paths: dict[str, Path]
    peft_model: Any
    known: dict[Any, list[int]]

    def tokens(
        self, prompt: dict[str, Any], adapter: str | None, num_tokens: int = NUM_TOKENS
    ) -> list[int]:
        """PEFT's."""
        key = id(prompt), adapter, num_tokens
        if key not in self.known:
            if adapter is not None:
                self.peft_model.set_adapter(adapter)
            alone = self.peft_model.disable_adapter() if adapter is None else nullcontext()
            with alone:
                self.known[key] = reference(self.peft_model.get_base_model(), prompt, num_tokens)
        return self.known[key]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], World]:
    @cache
    def make(name: str) -> World:
        directory = tmp_path_factory.mktemp(name)
        model = save_vision_model(directory / "model", name)
        configs = {
            each: peft.LoraConfig(init_lora_weights=False, **options)
            for each, options in ADAPTERS.items()
        }
        (first, config), *others = configs.items()
        peft_model = peft.get_peft_model(model, config, adapter_name=first)
        for each, config in others:
            peft_model.add_adapter(each, config)
        peft_model.save_pretrained(directory)
        paths = {each: directory / each for each in ADAPTERS}
        return World(directory / "model", paths, peft_model.eval(), {})

    return make


def open_llm(world: World, mode: str = "FULL_AND_PIECEWISE", **options: Any) -> LLM:
    """With all adapters loaded, if there is room for them."""
    settings: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_model_len": 96}
    llm = open_vision(world.model, mode, **{**settings, **options})
    for name, path in list(world.paths.items())[: options.get("max_loras", 3)]:
        llm.load_adapter(name, path)
    return llm


def check(llm: LLM, world: World, requests: Any = REQUESTS, num_tokens: int = NUM_TOKENS) -> None:
    """Run ``requests`` in one call, and compare each with PEFT."""
    prompts, adapters = zip(*requests, strict=True)
    outputs = llm.generate(list(prompts), greedy(num_tokens), adapter=adapters)
    for output, (prompt, adapter) in zip(outputs, requests, strict=True):
        assert output.outputs[0].token_ids == world.tokens(prompt, adapter, num_tokens)


# --- tokens ---------------------------------------------------------------------------------------

MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "FULL_AND_FULL")
DECODE_ONLY = ("NONE", "FULL_DECODE_ONLY")  # at most


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("qwen2_vl", "FULL_AND_FULL"),
        ("qwen2_5_vl", "FULL_AND_PIECEWISE"),
        *(("qwen3_vl", mode) for mode in MODES),
    ],
)
def test_a_mixed_batch_equals_peft(
    name: str, mode: str, device: torch.device, world: Callable[[str], World]
) -> None:
    made = world(name)
    assert len({tuple(made.tokens(ONE, each)) for each in (None, *ADAPTERS)}) == 4
    with open_llm(
        made,
        mode,
        device=str(device),
        max_num_seqs=8,
        max_num_batched_tokens=96,
        enable_prefix_caching=False,
        graph_options={"capture_sizes": [8, 96]},
    ) as llm:
        check(llm, made)
        for request in REQUESTS:
            check(llm, made, [request])
        # Batches with prompts, and others, had graphs of all numbers of adapters that they have.
        wanted = {(False, 0), (False, 1), (False, 3)} if mode not in DECODE_ONLY else set()
        wanted |= {(True, 0), (True, 1), (True, 3)} if mode.startswith("FULL_") else set()
        replays = llm.engine.runner.stats.replays
        assert {(key.uniform, key.num_active_loras) for key in replays} == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [("qwen2_5_vl", "FULL_AND_FULL"), ("qwen3_vl", "PIECEWISE")],
)
def test_prompts_in_chunks_and_after_preemptions(
    name: str, mode: str, world: Callable[[str], World]
) -> None:
    made = world(name)
    with open_llm(
        made,
        mode,
        max_num_batched_tokens=7,
        max_model_len=64,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=27 * 4 * 3 * 2 * 32 * 4,
        graph_options={"capture_sizes": [2, 7]},
    ) as llm:
        preempted = 0
        schedule = llm.engine.scheduler.schedule

        def counting() -> Any:
            nonlocal preempted
            plan = schedule()
            preempted += len(plan.preempted)
            return plan

        llm.engine.scheduler.schedule = counting  # type: ignore[method-assign]
        check(llm, made, [each for each in REQUESTS if each[0] is not TWO], 24)
        assert preempted > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["NONE", "FULL_AND_FULL"])
def test_drafts(mode: str, world: Callable[[str], World]) -> None:
    made = world("qwen2_5_vl")
    with open_vision(made.model, "NONE") as plain:
        texts = [
            plain.generate(prompt, greedy(1))[0].prompt_token_ids + made.tokens(prompt, adapter)
            for prompt, adapter in REQUESTS
        ]
    drafts = ReplayedDrafts(texts=texts, num_tokens=3, acceptance=0.6)
    with open_llm(made, mode, speculative=drafts) as llm:
        check(llm, made)
        for request in REQUESTS:
            check(llm, made, [request])
        assert llm.speculation.num_accepted > 0


# --- the prefix cache -----------------------------------------------------------------------------


@pytest.mark.slow
def test_blocks_are_shared_by_equal_adapters_and_images_only(
    world: Callable[[str], World],
) -> None:
    """The first block of both prompts has two tokens of text and two of the image."""
    made = world("qwen3_vl")

    def cached(prompt: dict[str, Any], adapter: str | None) -> int | None:
        (output,) = llm.generate(prompt, greedy(NUM_TOKENS), adapter=adapter)
        assert output.outputs[0].token_ids == made.tokens(prompt, adapter)
        return output.num_cached_tokens

    with open_llm(made, "NONE") as llm:
        adapters = (None, "wide", "scaled")
        asked = [(prompt, adapter) for prompt in (ONE, ANOTHER) for adapter in adapters]
        assert [cached(*each) for each in asked] == [0] * 6
        assert [cached(*each) for each in asked] == [8] * 6
        llm.load_adapter("wide", made.paths["wide"])  # files may have changed
        assert [cached(ONE, "wide"), cached(ANOTHER, "wide")] == [0, 0]
        assert [cached(ONE, "wide"), cached(ONE, "scaled"), cached(ONE, None)] == [8, 8, 8]


# --- coming and going -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [None, "ngram"])
def test_load_replace_and_unload_while_requests_run(
    drafts: str | None, world: Callable[[str], World]
) -> None:
    made = world("qwen3_vl")
    with open_llm(made, max_loras=2, speculative=drafts) as llm:
        tokens: list[int] = []
        with llm.stream(TWO, greedy(60), adapter="narrow") as stream:
            for _ in range(3):
                tokens += next(stream).token_ids
            llm.load_adapter("wide", made.paths["scaled"])  # replaces it
            check_one(llm, ONE, "wide", made.tokens(ONE, "scaled"))
            llm.unload_adapter("narrow")
            with pytest.raises(RequestError, match="no adapter 'narrow'"):
                llm.generate(ONE, greedy(1), adapter="narrow")
            with pytest.raises(ConfigError, match="by wide and by 1 unloaded ones"):
                llm.load_adapter("narrow", made.paths["narrow"])
            llm.unload_adapter("wide")
            llm.load_adapter("x", made.paths["wide"])
            check_one(llm, ANOTHER, "x", made.tokens(ANOTHER, "wide"))
            for delta in stream:
                tokens += delta.token_ids
        assert tokens == made.tokens(TWO, "narrow", 60)
        llm.load_adapter("y", made.paths["scaled"])  # where the stream's was
        check_one(llm, TWO, "y", made.tokens(TWO, "scaled"))
        check_one(llm, ANOTHER, "x", made.tokens(ANOTHER, "wide"))


def check_one(llm: LLM, prompt: Any, adapter: str, tokens: list[int]) -> None:
    (output,) = llm.generate(prompt, greedy(NUM_TOKENS), adapter=adapter)
    assert output.outputs[0].token_ids == tokens


# --- files ----------------------------------------------------------------------------------------


def rewrite(path: Path, to: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """A copy of an adapter with other tensors."""
    to.mkdir()
    (to / "adapter_config.json").write_text((path / "adapter_config.json").read_text())
    tensors = change(load_file(path / "adapter_model.safetensors"))
    save_file(tensors, to / "adapter_model.safetensors")
    return to


def older(tensors: dict[str, Any]) -> dict[str, Any]:
    """With the names before transformers 4.52."""
    return {
        name.replace(".language_model.", ".").replace("model.visual.", "visual."): tensor.clone()
        for name, tensor in tensors.items()
    }


def test_older_names(world: Callable[[str], World], tmp_path: Path) -> None:
    made = world("qwen2_vl")
    path = rewrite(made.paths["wide"], tmp_path / "older", older)
    with open_llm(made, "NONE") as llm:
        llm.load_adapter("scaled", path)
        check_one(llm, ONE, "scaled", made.tokens(ONE, "wide"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_adapters_of_the_vision_encoder_are_refused(
    name: str, world: Callable[[str], World], tmp_path: Path
) -> None:
    made = world(name)
    model = save_vision_model(tmp_path / "model", name)
    config = peft.LoraConfig(r=4, target_modules="all-linear")
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "new")
    rewrite(tmp_path / "new", tmp_path / "old", older)
    with open_llm(made, "NONE") as llm:
        for path, prefix in ((tmp_path / "new", "model.visual"), (tmp_path / "old", "visual")):
            module = prefix.replace(".", r"\.") + r"\.blocks\.\d\.attn\.\w+"
            message = f"changes {module}, a linear of the vision encoder; .*exclude_modules='"
            with pytest.raises(ModelLoadError, match=message):
                llm.load_adapter("wide", path)
        assert llm.adapters == list(ADAPTERS)
        check_one(llm, ONE, "wide", made.tokens(ONE, "wide"))


def test_two_names_of_one_linear(world: Callable[[str], World], tmp_path: Path) -> None:
    made = world("qwen3_vl")
    path = rewrite(made.paths["wide"], tmp_path / "both", lambda each: each | older(each))
    with (
        open_llm(made, "NONE") as llm,
        pytest.raises(ModelLoadError, match=r"has both model\..*, two names of the same linear"),
    ):
        llm.load_adapter("wide", path)


def test_models_with_experts_are_refused(tmp_path: Path) -> None:
    save_vision_model(tmp_path, "qwen3_vl_moe")
    with pytest.raises(ConfigError, match="enable_lora needs a dense model of the native decoder"):
        open_vision(tmp_path, "NONE", enable_lora=True)
