"""Tiny image-and-text models with random weights, their tokenizer and image processor, and what
transformers generates with them.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PretrainedConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from ostinato import LLM, GraphConfig, SamplingParams

WORDS = ["what", "is", "this", "a", "cat", "or", "dog", "and", "that", "?", "user", "assistant"]
START, END, IMAGE, VIDEO = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
SPECIAL = ["<pad>", "<eos>", START, END, IMAGE, VIDEO]
START_ID, END_ID, IMAGE_ID, VIDEO_ID = 2, 3, 4, 5
VOCAB_SIZE = 96
PATCH, MERGE = 4, 2
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' ' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    f"{START}{IMAGE}{END}"
    "{% else %}{{ ' ' + part['text'] }}{% endif %}{% endfor %}{% endif %}{{ ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant' }}{% endif %}"
)

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # so that images matter
    "bos_token_id": 0,
    "eos_token_id": None,
}
_VISION: dict[str, Any] = {
    "depth": 3,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "initializer_range": 0.2,
}
_TOKENS: dict[str, Any] = {
    "image_token_id": IMAGE_ID,
    "video_token_id": VIDEO_ID,
    "vision_start_token_id": START_ID,
    "vision_end_token_id": END_ID,
}


def _rope(*section: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section)}


def _qwen2_vl() -> PretrainedConfig:
    return transformers.Qwen2VLConfig(
        text_config={**_TEXT, "rope_parameters": _rope(2, 3, 3)},
        vision_config={**_VISION, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        **_TOKENS,
    )


def _qwen2_5_vl() -> PretrainedConfig:
    vision = {
        **_VISION,
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": 64,
        "window_size": 4 * PATCH,  # two tokens wide
        "fullatt_block_indexes": [1],
    }
    return transformers.Qwen2_5_VLConfig(
        text_config={**_TEXT, "rope_parameters": _rope(2, 3, 3)}, vision_config=vision, **_TOKENS
    )


_QWEN3_VISION = {
    **_VISION,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
}
_QWEN3_TEXT = {**_TEXT, "head_dim": 16, "rope_parameters": _rope(4, 2, 2)}


def _qwen3_vl() -> PretrainedConfig:
    return transformers.Qwen3VLConfig(
        text_config=_QWEN3_TEXT, vision_config=_QWEN3_VISION, **_TOKENS
    )


def _qwen3_vl_moe() -> PretrainedConfig:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return transformers.Qwen3VLMoeConfig(
        text_config={**_QWEN3_TEXT, **experts}, vision_config=_QWEN3_VISION, **_TOKENS
    )


CONFIGS = {"qwen2_vl": _qwen2_vl, "qwen2_5_vl": _qwen2_5_vl, "qwen3_vl": _qwen3_vl}
WITH_EXPERTS = {"qwen3_vl_moe": _qwen3_vl_moe}


def save_vision_model(path: Path, name: str) -> Any:
    """Save a model with everything that reads text and images for it; returns transformers' own."""
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForImageTextToText.from_config(
        (CONFIGS | WITH_EXPERTS)[name]()
    )
    model = model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases: omitting one must show
                parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(path)
    vocabulary = {token: number for number, token in enumerate(SPECIAL + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=[START, END, IMAGE, VIDEO],
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
    image_processor().save_pretrained(path)
    return model


@cache
def image_processor() -> Any:
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=2,
        size={"shortest_edge": 8 * 8, "longest_edge": 64 * 64},
    )


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def prompt_of(*parts: int | Image.Image) -> dict[str, Any]:
    """A prompt of token ids and images."""
    tokens: list[int] = []
    for part in parts:
        tokens += [part] if isinstance(part, int) else [START_ID, IMAGE_ID, END_ID]
    images = [part for part in parts if not isinstance(part, int)]
    return {"prompt_token_ids": tokens, **({"images": images} if images else {})}


@torch.no_grad()
def reference(model: Any, prompt: dict[str, Any], num_tokens: int) -> list[int]:
    """What transformers generates after ``prompt``, greedily."""
    model.model.rope_deltas = None
    ids: list[int] = []
    inputs: dict[str, Any] = {}
    images = list(prompt.get("images", ()))
    if images:
        inputs = dict(image_processor()(images=images, return_tensors="pt"))
    number = 0
    for token in prompt["prompt_token_ids"]:
        count = 1
        if token == IMAGE_ID and images:
            count = int(inputs["image_grid_thw"][number].prod()) // MERGE**2
            number += 1
        ids += [token] * count
    row = torch.tensor([ids])
    if images:
        inputs["mm_token_type_ids"] = (row == IMAGE_ID).int()
    output = model.generate(
        input_ids=row,
        attention_mask=torch.ones_like(row),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        **inputs,
    )
    generated: list[int] = output[0, row.shape[1] :].tolist()
    return generated


def open_vision(path: Path, mode: str = "FULL_AND_PIECEWISE", **options: Any) -> LLM:
    graph_options = options.pop("graph_options", {})
    settings = {
        "device": "cpu",
        "dtype": "float32",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "block_size": 4,
        "show_progress": False,
        "kv_cache_memory_bytes": "4M",
        "graphs": GraphConfig(mode=mode, **({"capture_sizes": [2, 64]} | graph_options)),
    }
    return LLM(str(path), **{**settings, **options})


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=num_tokens, min_tokens=num_tokens, ignore_eos=True
    )


def tokens_of(llm: LLM, prompts: list[dict[str, Any]], num_tokens: int) -> list[list[int]]:
    outputs = llm.generate(prompts, greedy(num_tokens))
    return [output.outputs[0].token_ids for output in outputs]
