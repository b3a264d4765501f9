"""Random prompts with images, in random engines: chunks, preemptions, shared blocks, all modes."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tiny_vision import (
    CONFIGS,
    greedy,
    open_vision,
    picture,
    prompt_of,
    reference,
    save_vision_model,
)

MODES = ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "FULL_AND_FULL"]
LENGTHS = [1, 5, 12]


@cache
def pictures() -> list[Any]:
    sizes = [(24, 16), (16, 24), (8, 8), (33, 40), (8, 48)]
    return [picture(*size, seed) for seed, size in enumerate(sizes)]


def draw_prompt(draw: random.Random) -> dict[str, Any]:
    """Text that other prompts begin with too, images with or without text between, and text."""

    def words(*counts: int) -> list[int]:
        return [draw.randrange(6, 18) for _ in range(draw.choice(counts))]

    parts: list[Any] = list(range(6, 6 + draw.choice([0, 3, 6])))
    for _ in range(draw.choice([0, 1, 1, 2, 3])):
        parts += [draw.choice(pictures()), *words(0, 1, 4)]
    return prompt_of(*parts, *words(1, 2, 9))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_requests(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    model = save_vision_model(tmp_path, list(CONFIGS)[seed % 3])
    prompts = [draw_prompt(draw) for _ in range(draw.randint(3, 7))]
    lengths = [draw.choice(LENGTHS) for _ in prompts]
    expected = [
        reference(model, prompt, length) for prompt, length in zip(prompts, lengths, strict=True)
    ]
    most = draw.choice([5, 8, 17, 64])
    with open_vision(
        tmp_path,
        MODES[seed % len(MODES)],
        max_num_batched_tokens=most,
        max_num_seqs=draw.choice([1, 3, 5]),
        max_model_len=112,
        block_size=draw.choice([2, 4, 16]),
        enable_prefix_caching=draw.random() < 0.7,
        async_scheduling=draw.random() < 0.5,
        kv_cache_memory_bytes=draw.choice(["96K", "150K", "4M"]),
        graph_options={
            "capture_sizes": [1, 3, most],
            "vision_capture_sizes": draw.choice([[], [16], [32, 128], None]),
        },
    ) as llm:
        for _ in range(2):  # again with what the first time left in the caches
            outputs = llm.generate(prompts, [greedy(length) for length in lengths])
            assert [output.outputs[0].token_ids for output in outputs] == expected
