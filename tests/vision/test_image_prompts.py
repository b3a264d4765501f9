"""Prompts with images, compared with transformers token for token."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_vision import (
    CONFIGS,
    END_ID,
    IMAGE_ID,
    START_ID,
    greedy,
    open_vision,
    picture,
    prompt_of,
    reference,
    save_vision_model,
    tokens_of,
)

from ostinato import LLM, CUDAGraphMode, ReplayedDrafts, SamplingParams
from ostinato.graphs.policy.dispatch import DispatchStats
from ostinato.models.hf.vision.vision_language import VisionLM
from ostinato.models.native.decoder import Decoder
from ostinato.scheduling.step_plan import StepPlan

MODES = ["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE", "FULL_AND_FULL"]
NUM_TOKENS = 8
SMALL, LARGE, OTHER = picture(24, 16, 1), picture(33, 40, 2), picture(24, 16, 3)
PROMPTS = [
    prompt_of(6, 7, 8, 9),  # text only
    prompt_of(6, SMALL, 7, 8),
    prompt_of(9, SMALL, 10, LARGE, 11, 7),
    prompt_of(LARGE, 7),
    prompt_of(6, OTHER, 7, 8),
]

Saved = tuple[Path, Any, list[list[int]]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """A family's checkpoint, transformers' model, and what it generates for ``PROMPTS``."""
    known: dict[str, Saved] = {}

    def save(name: str) -> Saved:
        if name not in known:
            path = tmp_path_factory.mktemp(name)
            model = save_vision_model(path, name)
            known[name] = path, model, [reference(model, each, NUM_TOKENS) for each in PROMPTS]
        return known[name]

    return save


@pytest.fixture(scope="module")
def llm(saved: Callable[[str], Saved]) -> Iterator[LLM]:
    path, _, _ = saved("qwen3_vl")
    with open_vision(path) as opened:
        yield opened


def vision_stats(llm: LLM) -> DispatchStats:
    images = llm.engine.runner.images
    assert images is not None
    return images.vision.stats


def model_of(llm: LLM) -> VisionLM:
    assert isinstance(llm.engine.model, VisionLM)
    return llm.engine.model


@pytest.mark.sweep
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_those_of_transformers(
    name: str, mode: str, device: torch.device, saved: Callable[[str], Saved]
) -> None:
    path, _, expected = saved(name)
    with open_vision(path, mode, device=str(device)) as llm:
        assert isinstance(llm.engine.model, Decoder)  # the native one
        assert tokens_of(llm, PROMPTS, NUM_TOKENS) == expected  # together
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            assert tokens_of(llm, [prompt], NUM_TOKENS) == [tokens]
        for stats in (llm.engine.runner.stats, vision_stats(llm)):
            assert (stats.hits > 0) == (mode != "NONE")


@pytest.mark.sweep
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_FULL"])
@pytest.mark.parametrize("name", [*CONFIGS, "qwen3_vl_moe"])
def test_language_models_by_transformers_modules(
    name: str, mode: str, saved: Callable[[str], Saved], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those with experts are; here the others too."""
    module = "ostinato.models.hf.vision.vision_language"
    monkeypatch.setattr(f"{module}.native_config", lambda config: None)
    path, _, expected = saved(name)
    with open_vision(path, mode) as llm:
        assert not isinstance(llm.engine.model, Decoder)
        assert tokens_of(llm, PROMPTS, NUM_TOKENS) == expected


def test_experts_run_by_transformers_modules(saved: Callable[[str], Saved]) -> None:
    path, _, expected = saved("qwen3_vl_moe")
    with open_vision(path, "NONE") as llm:
        assert not isinstance(llm.engine.model, Decoder)
        assert tokens_of(llm, PROMPTS, NUM_TOKENS) == expected


def test_decode_graphs_do_not_read_images(saved: Callable[[str], Saved]) -> None:
    path, model, _ = saved("qwen3_vl")
    prompt = prompt_of(6)  # a prompt of one token runs as a decode step
    with open_vision(path) as llm:
        images = model_of(llm).images
        assert images is not None
        images.is_image.fill_(True)
        images.rows.fill_(float("nan"))
        assert tokens_of(llm, [prompt], NUM_TOKENS) == [reference(model, prompt, NUM_TOKENS)]
        assert {key.uniform for key in llm.engine.runner.stats.replays} == {True}


def test_images_change_the_answer(saved: Callable[[str], Saved]) -> None:
    """Or the comparisons above would show nothing."""
    for name in CONFIGS:
        _, _, expected = saved(name)
        assert expected[1] != expected[4]  # another image of the same size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [("qwen2_vl", "FULL_AND_FULL"), ("qwen2_5_vl", "NONE"), ("qwen3_vl", "PIECEWISE")],
)
def test_prompts_in_chunks_and_after_preemptions(
    name: str, mode: str, saved: Callable[[str], Saved]
) -> None:
    path, _, expected = saved(name)
    # Images have up to 20 tokens. All prompts together do not fit into the cache.
    limits = {"max_num_batched_tokens": 7, "max_model_len": 64, "enable_prefix_caching": False}
    sizes = {"capture_sizes": [1, 2, 4, 7]}
    with open_vision(
        path, mode, **limits, kv_cache_memory_bytes=27 * 4 * 3 * 2 * 32 * 4, graph_options=sizes
    ) as llm:
        preempted = 0
        run = llm.engine.runner.run

        def counting(plan: StepPlan) -> Any:
            nonlocal preempted
            preempted += len(plan.preempted)
            return run(plan)

        llm.engine.runner.run = counting  # type: ignore[method-assign]
        more = greedy(NUM_TOKENS + 30)  # so that requests grow out of the cache
        prompts = [PROMPTS[1], PROMPTS[4], PROMPTS[0], PROMPTS[1]]
        outputs = llm.generate(prompts, more)
        wanted = [expected[1], expected[4], expected[0], expected[1]]
        assert [each.outputs[0].token_ids[:NUM_TOKENS] for each in outputs] == wanted
        assert preempted > 0
        assert tokens_of(llm, PROMPTS, NUM_TOKENS) == expected


def test_steps_that_start_before_the_last_one_is_read(saved: Callable[[str], Saved]) -> None:
    path, _, expected = saved("qwen2_vl")
    with open_vision(path, async_scheduling=True) as llm:
        assert tokens_of(llm, PROMPTS, NUM_TOKENS) == expected


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["NONE", "FULL_AND_FULL"])
def test_drafts_after_images(mode: str, saved: Callable[[str], Saved]) -> None:
    """Several tokens of a request in a step, whose positions differ from their numbers."""
    path, _, expected = saved("qwen2_5_vl")
    with open_vision(path, "NONE") as plain:
        known = plain.generate(PROMPTS, greedy(NUM_TOKENS))
    texts = [each.prompt_token_ids + each.outputs[0].token_ids for each in known]
    drafts = ReplayedDrafts(texts=texts, num_tokens=3, acceptance=0.6)
    with open_vision(path, mode, speculative=drafts) as llm:
        assert tokens_of(llm, PROMPTS, NUM_TOKENS) == expected
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            assert tokens_of(llm, [prompt], NUM_TOKENS) == [tokens]
        assert llm.speculation.num_accepted > 0


# --- the prefix cache ----------------------------------------------------------------------------


def cached_and_tokens(llm: LLM, prompt: dict[str, Any]) -> tuple[int | None, list[int]]:
    (output,) = llm.generate(prompt, greedy(NUM_TOKENS))
    return output.num_cached_tokens, output.outputs[0].token_ids


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_text_before_images_is_shared(name: str, saved: Callable[[str], Saved]) -> None:
    """Its positions do not depend on the images behind it."""
    path, model, _ = saved(name)
    text = list(range(6, 18))
    prompts = [prompt_of(*text), prompt_of(*text, SMALL, 7), prompt_of(*text, LARGE, 7)]
    with open_vision(path, "NONE") as llm:
        for prompt, cached in zip(prompts, (0, 12, 12), strict=True):
            assert cached_and_tokens(llm, prompt) == (cached, reference(model, prompt, NUM_TOKENS))


@pytest.mark.parametrize("name", CONFIGS)
def test_only_equal_images_share_blocks(name: str, saved: Callable[[str], Saved]) -> None:
    path, _, expected = saved(name)
    with open_vision(path, "NONE") as llm:
        assert cached_and_tokens(llm, PROMPTS[1]) == (0, expected[1])
        # Its first block has two tokens of text and two of the image.
        assert cached_and_tokens(llm, PROMPTS[4]) == (0, expected[4])
        encoded = vision_stats(llm).misses
        assert cached_and_tokens(llm, PROMPTS[1]) == (8, expected[1])
        assert cached_and_tokens(llm, PROMPTS[4]) == (8, expected[4])
        assert vision_stats(llm).misses == encoded == 2


def test_an_image_is_encoded_once_for_several_samples(saved: Callable[[str], Saved]) -> None:
    path, _, expected = saved("qwen2_5_vl")
    with open_vision(path, enable_prefix_caching=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, n=3)
        (output,) = llm.generate(PROMPTS[3], params)
        assert [each.token_ids for each in output.outputs] == [expected[3]] * 3
        assert vision_stats(llm).hits == 1


# --- forms of prompts ----------------------------------------------------------------------------


def data_url(image: Any) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
    "form",
    [
        np.asarray,
        lambda image: torch.from_numpy(np.array(image)),
        lambda image: torch.from_numpy(np.array(image)).permute(2, 0, 1),
        data_url,
    ],
    ids=["array", "tensor", "channels first", "data URL"],
)
def test_forms_of_images(
    form: Callable[[Any], Any], llm: LLM, saved: Callable[[str], Saved]
) -> None:
    _, _, expected = saved("qwen3_vl")
    for key, value in (
        ("images", [form(SMALL)]),
        ("images", form(SMALL)),
        ("multi_modal_data", {"image": form(SMALL)}),
    ):
        prompt = {"prompt_token_ids": PROMPTS[1]["prompt_token_ids"], key: value}
        assert tokens_of(llm, [prompt], NUM_TOKENS) == [expected[1]]


def test_text_with_placeholders(llm: LLM, saved: Callable[[str], Saved]) -> None:
    _, _, expected = saved("qwen3_vl")
    text = "what <|vision_start|><|image_pad|><|vision_end|> is this"
    prompt = {"prompt": text, "images": [SMALL]}
    (output,) = llm.generate(prompt, greedy(NUM_TOKENS))
    assert output.outputs[0].token_ids == expected[1]
    assert output.prompt == text
    assert output.prompt_token_ids == [6, START_ID, *[IMAGE_ID] * 6, END_ID, 7, 8]
    # Placeholders that are as many as the image's tokens are left as they are.
    again = {"prompt_token_ids": output.prompt_token_ids, "images": [SMALL]}
    assert tokens_of(llm, [again], NUM_TOKENS) == [expected[1]]


def test_chats_with_images(llm: LLM, saved: Callable[[str], Saved]) -> None:
    _, model, _ = saved("qwen3_vl")
    messages = [
        {"role": "user", "content": "what is this ?"},
        {"role": "assistant", "content": [{"type": "text", "text": "a cat"}]},
        {
            "role": "user",
            "content": [
                {"type": "image", "image": SMALL},
                {"type": "text", "text": "or"},
                {"type": "image_url", "image_url": {"url": data_url(LARGE)}},
                {"type": "text", "text": "?"},
            ],
        },
    ]
    prompt = prompt_of(16, 6, 7, 8, 15, 17, 9, 10, 16, SMALL, 11, LARGE, 15, 17)
    assert llm.render_chat(messages) == prompt["prompt_token_ids"]
    (output,) = llm.chat(messages, greedy(NUM_TOKENS))
    assert output.outputs[0].token_ids == reference(model, prompt, NUM_TOKENS)


def test_chats_with_images_and_variables(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    template = llm.tokenizer.chat_template
    monkeypatch.setattr(llm.tokenizer, "chat_template", template + "{{ style }}")
    content = [{"type": "image", "image": SMALL}, {"type": "text", "text": "what ?"}]
    messages = [{"role": "user", "content": content}]
    plain = llm.render_chat(messages)
    styled = llm.tokenizer.encode(" a cat", add_special_tokens=False)
    variables = {"style": " a cat"}
    assert llm.render_chat(messages, chat_template_kwargs=variables) == [*plain, *styled]
    (output,) = llm.chat(messages, greedy(2), chat_template_kwargs=variables)
    assert output.prompt_token_ids[-2:] == styled
    assert output.prompt_token_ids.count(IMAGE_ID) == 6


def test_images_side_by_side(llm: LLM, saved: Callable[[str], Saved]) -> None:
    """Without a token between them, which transformers does not take: the second then shifts."""
    tokens = [6, START_ID, IMAGE_ID, IMAGE_ID, END_ID, 7]
    both = {"prompt_token_ids": tokens, "images": [SMALL, LARGE]}
    swapped = {"prompt_token_ids": tokens, "images": [LARGE, SMALL]}
    first, second = tokens_of(llm, [both, swapped], NUM_TOKENS)
    assert first != second
    assert tokens_of(llm, [both], NUM_TOKENS) == [first]


def test_streams_take_images(llm: LLM) -> None:
    expected = llm.generate(PROMPTS[1], greedy(NUM_TOKENS))[0].outputs[0].text
    streamed = "".join(str(piece.text) for piece in llm.stream(PROMPTS[1], greedy(NUM_TOKENS)))
    assert streamed == expected


def test_random_weights(saved: Callable[[str], Saved]) -> None:
    path, _, _ = saved("qwen3_vl")
    with open_vision(path, random_weights=True) as llm:
        assert llm.engine.resolved_mode.mode is CUDAGraphMode.FULL_AND_PIECEWISE
        (tokens,) = tokens_of(llm, [PROMPTS[2]], NUM_TOKENS)
        assert len(tokens) == NUM_TOKENS
