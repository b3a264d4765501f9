"""The vision encoder under its own graphs, and the positions of images, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_vision import (
    CONFIGS,
    END_ID,
    IMAGE_ID,
    MERGE,
    START_ID,
    image_processor,
    open_vision,
    picture,
    prompt_of,
    save_vision_model,
    tokens_of,
)

from ostinato import LLM, BatchError, CUDAGraphMode
from ostinato.engine.explain import explain_batch
from ostinato.graphs.policy.descriptor import Reason
from ostinato.vision.prompt_images import ImagePatches, place_images
from ostinato.vision.vision_runner import VisionRunner

PICTURES = [picture(24, 16, 1), picture(33, 40, 2), picture(64, 8, 3), picture(40, 48, 4)]

Saved = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    known: dict[str, tuple[Path, Any]] = {}

    def save(name: str) -> tuple[Path, Any]:
        if name not in known:
            path = tmp_path_factory.mktemp(name)
            known[name] = path, save_vision_model(path, name)
        return known[name]

    return save


def patches_of(image: Any) -> ImagePatches:
    result = image_processor()(images=[image], return_tensors="pt")
    time, height, width = result["image_grid_thw"][0].tolist()
    return ImagePatches.of(
        result["pixel_values"],
        (time, height, width),
        merge=MERGE**2,
        dtype=torch.float32,
    )


@torch.no_grad()
def expected_rows(model: Any, image: Any) -> torch.Tensor:
    result = image_processor()(images=[image], return_tensors="pt")
    model.model.visual.config._attn_implementation = "sdpa"
    outputs = model.model.visual(result["pixel_values"], grid_thw=result["image_grid_thw"])
    return torch.cat(
        [outputs.pooler_output, *(getattr(outputs, "deepstack_features", None) or ())], dim=-1
    )


def runner_of(llm: LLM) -> VisionRunner:
    images = llm.engine.runner.images
    assert images is not None
    return images.vision


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_are_those_of_transformers(name: str, saved: Saved, device: torch.device) -> None:
    """Packed, padded with NaN, over the largest size, and without graphs."""
    path, model = saved(name)
    expected = [expected_rows(model, each) for each in PICTURES]
    images = [patches_of(each) for each in PICTURES]
    sizes = {"vision_capture_sizes": [30, 110]}  # 32 and 112 in whole tokens
    with open_vision(path, device=str(device), graph_options=sizes) as llm, torch.inference_mode():
        runner = runner_of(llm)
        assert [entry.descriptor.num_tokens for entry in runner.plan.entries] == [112, 32]
        for _ in range(2):
            poison(runner)
            close(runner.encode(images), expected)  # packs of 104, 32 and 120 patches
        assert runner.stats.hits == 4
        assert runner.stats.eager == {Reason.TOO_LARGE: 2}
        poison(runner)
        for image, rows in zip(images, expected, strict=True):
            close(runner.encode([image]), [rows])
        assert runner.stats.padding_tokens == 2 * 8 + 8 + 32


def poison(runner: VisionRunner) -> None:
    runner.inputs.pixels.fill_(float("nan"))
    if runner.inputs.interp_weights is not None:
        runner.inputs.interp_weights.fill_(float("nan"))
    if runner.inputs.window_index is not None:
        runner.inputs.window_index.zero_()


def close(rows: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for ours, theirs in zip(rows, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, atol=2e-5, rtol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "options", "reason"),
    [
        ("NONE", {}, Reason.MODE_NONE),
        ("FULL", {"vision_capture_sizes": []}, Reason.MODE_NONE),
        ("FULL", {"vision_capture_sizes": [8]}, Reason.TOO_LARGE),
    ],
)
def test_reasons_to_encode_eagerly(
    mode: str, options: dict[str, Any], reason: Reason, saved: Saved
) -> None:
    path, _ = saved("qwen2_vl")
    with open_vision(path, mode, graph_options=options) as llm:
        tokens_of(llm, [prompt_of(6, PICTURES[0], 7)], 2)
        assert runner_of(llm).stats.eager == {reason: 1}
        graphs = [entry.mode for entry in runner_of(llm).plan.entries]
        assert graphs == [CUDAGraphMode.PIECEWISE] * len(options.get("vision_capture_sizes", ()))


def test_explain_says_how_images_run(saved: Saved) -> None:
    path, _ = saved("qwen2_vl")
    seen = set()
    for sizes in ([30, 110], []):
        options = {"vision_capture_sizes": sizes}
        with open_vision(path, graph_options=options) as llm, torch.inference_mode():
            stats = runner_of(llm).stats
            for image in map(patches_of, PICTURES):
                stats.reset()
                runner_of(llm).encode([image])
                count = image.pixels.shape[0]
                answer = explain_batch(llm.config, num_tokens=9, num_reqs=1, num_patches=count)
                how = [
                    *(f"PIECEWISE graph of {key.num_tokens} patches" for key in stats.replays),
                    *(f"eagerly: {reason.value}" for reason in stats.eager),
                ]
                assert [answer["images"]] == [f"{count} patches, {each}" for each in how]
                assert answer["vision_sizes"] == sorted(
                    entry.descriptor.num_tokens for entry in runner_of(llm).plan.entries
                )
                seen.add(*how)
    assert len(seen) == 4  # two graphs, too large, none
    assert "images" not in explain_batch(llm.config, num_tokens=9, num_reqs=1)
    with pytest.raises(BatchError, match="num_patches is -1"):
        explain_batch(llm.config, num_tokens=9, num_reqs=1, num_patches=-1)


@pytest.mark.parametrize("name", CONFIGS)
def test_positions_are_those_of_transformers(name: str, saved: Saved) -> None:
    _, model = saved(name)
    images = [patches_of(each) for each in PICTURES]
    prompt = [6, 7]
    for _ in images:
        prompt += [START_ID, IMAGE_ID, END_ID, 8]
    tokens, placed = place_images("it", prompt, images, image_token_id=IMAGE_ID, merge_size=MERGE)
    assert placed is not None
    row = torch.tensor([tokens])
    positions, delta = model.model.get_rope_index(
        row,
        mm_token_type_ids=(row == IMAGE_ID).int(),
        image_grid_thw=torch.tensor([image.grid for image in images]),
    )
    ours = torch.arange(len(tokens)).expand(3, -1) + placed.rope_delta
    ours[:, : placed.stop] += torch.from_numpy(placed.offsets)
    assert placed.rope_delta == delta.item()
    assert torch.equal(ours, positions[:, 0])


def test_rows_are_dropped_when_there_are_too_many(saved: Saved) -> None:
    """The least recently used go first, and are encoded again."""
    path, _ = saved("qwen2_vl")
    # Two steps of 8 tokens: room for 16 tokens of images.
    options = {"max_num_batched_tokens": 8, "enable_prefix_caching": False, "max_model_len": 64}
    with open_vision(path, "NONE", **options) as llm:
        images = llm.engine.runner.images
        assert images is not None

        def encoded(*numbers: int) -> int:
            before = images.vision.stats.misses
            for number in numbers:
                tokens_of(llm, [prompt_of(6, picture(24, 16, number), 7)], 2)
            return images.vision.stats.misses - before

        assert encoded(1, 2) == 2
        assert encoded(2, 1) == 0
        assert images.num_cached_tokens == 12
        assert encoded(3) == 1  # in the place of 2
        assert encoded(1, 3) == 0
        assert encoded(2) == 1
        assert images.num_cached_tokens == 12
        assert encoded(1) == 1
        # One that is larger than all of the room is kept alone, for its later chunks.
        tokens_of(llm, [prompt_of(6, PICTURES[1], 7)], 2)
        assert images.num_cached_tokens == 20
