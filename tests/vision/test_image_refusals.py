"""Images that cannot be read, and models and options that do not go with them: clear errors."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_models import save_tiny
from tiny_vision import (
    END_ID,
    IMAGE_ID,
    START_ID,
    VIDEO_ID,
    image_processor,
    open_vision,
    picture,
    prompt_of,
    reference,
    save_vision_model,
    tokens_of,
)
from transformers import LlamaConfig
from workers import GlooPool

from ostinato import LLM, ConfigError, GraphConfig, RequestError

PICTURE = picture(24, 16, 1)
TOKENS = [6, START_ID, IMAGE_ID, END_ID, 7]
NUM_TOKENS = 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("qwen2_vl")
    return path, save_vision_model(path, "qwen2_vl")


@pytest.fixture(scope="module")
def llm(saved: tuple[Path, Any]) -> Iterator[LLM]:
    with open_vision(saved[0], "NONE", max_model_len=64) as opened:
        yield opened


def encoded(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64," + base64.b64encode(data).decode()


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("https://example.com/cat.png", "only data URLs are read .* nothing from the network"),
        ("file:///etc/passwd", "only data URLs"),
        ("/etc/passwd", "open it yourself, as in PIL.Image.open"),
        ("data:text/html;base64,aaaa", "only data URLs"),
        ("data:image/png;base64,!!!!", "does not hold an image in one of the formats PNG"),
        (encoded(b"no image"), "does not hold an image"),
        (encoded(png(8, 8)[:40]), "image 0 (is a data URL that does not|cannot be decoded)"),
        (encoded(png(2**14, 2**13)), "16384 x 8192 pixels; the limit is 67,108,864"),
        (np.zeros((2**14, 2**13), dtype=np.uint8), "8192 x 16384 pixels"),
        (np.zeros((8, 8, 3)), "an array of float64, of shape .* array of uint8 pixels"),
        (np.zeros((8, 8, 2), dtype=np.uint8), r"an array of shape \(8, 8, 2\)"),
        (np.zeros((8,), dtype=np.uint8), r"of shape \(8,\)"),
        (np.zeros((0, 8, 3), dtype=np.uint8), "has no pixels"),
        (torch.zeros(3, 8, 8), "a tensor of torch.float32; an image is"),
        (Image.new("RGB", (0, 5)), "has no pixels: it is 0 x 5"),
        (Image.new("RGB", (1, 500)), "of 1 x 500 pixels, cannot be resized .* aspect ratio"),
        (b"bytes", "image 0 is b'bytes'; an image is a PIL.Image"),
        (None, "image 0 is None; an image is"),
        (7, "image 0 is 7; an image is"),
    ],
)
def test_bad_images(image: Any, message: str, llm: LLM) -> None:
    with pytest.raises(RequestError, match=f"(?s)the prompt, image 0.*{message}|{message}"):
        llm.generate({"prompt_token_ids": TOKENS, "images": [image]})


def test_long_urls(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostinato.vision.image_reader._MAX_URL", 50)
    with pytest.raises(RequestError, match=r"a data URL of 1\d+ characters; the limit is 50"):
        llm.generate({"prompt_token_ids": TOKENS, "images": [encoded(png(8, 8))]})


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (TOKENS, "the prompt has 1 image placeholders .token 4. and 0 images"),
        ({"prompt_token_ids": [6, 7], "images": [PICTURE]}, "0 image placeholders .* 1 images"),
        ({"prompt_token_ids": TOKENS, "images": [PICTURE] * 2}, "give one placeholder per image"),
        ({"prompt_token_ids": TOKENS[:3], "images": [PICTURE]}, "ends with an image; add text"),
        (
            {"prompt_token_ids": [IMAGE_ID] * 3 + [6] + [IMAGE_ID] * 3 + [7], "images": [PICTURE]},
            "not in runs as long as the images",
        ),
        (
            {"prompt_token_ids": TOKENS * 9, "images": [picture(64, 64)] * 9},
            r"images of the prompt up to number 1 take 128 tokens, .* at most 64 \(max_model_len\)",
        ),
        (
            {"prompt_token_ids": [6] * 60 + TOKENS, "images": [PICTURE]},
            "the prompt.* has (65|70) tokens, but a sequence has at most 64",
        ),
        ({"prompt": "a", "multi_modal_data": {"video": []}}, "videos and audio are not supported"),
        ([START_ID, VIDEO_ID, END_ID, 7], "placeholder of a video .token 5.; videos are not supp"),
        ({"prompt": "a", "multi_modal_data": 5}, "must be {'image': one image"),
        ({"images": [PICTURE]}, "exactly one of the keys 'prompt' and 'prompt_token_ids'"),
    ],
)
def test_bad_prompts(prompt: Any, message: str, llm: LLM) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "video", "video": "x"}, "a part of type 'video'; this model takes text and"),
        ({"type": "image"}, r"messages\[0\]\['content'\]\[1\] has no image, as in"),
        ({"type": "image_url", "image_url": {}}, "has no image"),
        ({"type": "image", "image": "cat.png"}, "only data URLs"),
    ],
)
def test_bad_parts_of_messages(part: Any, message: str, llm: LLM) -> None:
    content = [{"type": "text", "text": "what"}, part]
    with pytest.raises(RequestError, match=message):
        llm.chat([{"role": "user", "content": content}])


def test_new_weights(llm: LLM, saved: tuple[Path, Any]) -> None:
    with pytest.raises(ConfigError, match="update_weights does not support models that take"):
        llm.update_weights(saved[0])


def test_refusals_lose_nothing(llm: LLM, saved: tuple[Path, Any]) -> None:
    prompt = prompt_of(6, PICTURE, 7)
    with pytest.raises(RequestError, match=r"prompts\[1\], image 0 is 5"):
        llm.generate([prompt, {"prompt_token_ids": TOKENS, "images": [5]}])
    assert not llm.engine.has_unfinished
    assert tokens_of(llm, [prompt], NUM_TOKENS) == [reference(saved[1], prompt, NUM_TOKENS)]


def test_a_failed_encoder_loses_nothing(
    llm: LLM, saved: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    images = llm.engine.runner.images
    assert images is not None
    prompt = prompt_of(6, picture(40, 24, 9), 7)
    with monkeypatch.context() as patch:
        patch.setattr(images.vision.encoder, "batch", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tokens_of(llm, [prompt], NUM_TOKENS)
    assert tokens_of(llm, [prompt], NUM_TOKENS) == [reference(saved[1], prompt, NUM_TOKENS)]


def test_pillow_is_asked_for(saved: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with open_vision(saved[0], "NONE") as llm:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "PIL", None)
            with pytest.raises(RequestError, match="images need Pillow: pip install"):
                llm.generate(prompt_of(6, PICTURE, 7))
        tokens_of(llm, [prompt_of(6, PICTURE, 7)], 2)


def test_image_processors_of_other_models(tmp_path: Path) -> None:
    save_vision_model(tmp_path, "qwen2_vl")
    file = tmp_path / "preprocessor_config.json"
    file.write_text(file.read_text().replace('"merge_size": 2', '"merge_size": 1'))
    with open_vision(tmp_path, "NONE") as llm:
        with pytest.raises(RequestError, match="has merge_size 1, but the model's config has 2"):
            llm.generate(prompt_of(6, PICTURE, 7))
        file.unlink()
        with pytest.raises(RequestError, match=r"cannot be read: .*; put its preprocessor"):
            llm.generate(prompt_of(6, PICTURE, 7))
        tokens_of(llm, [prompt_of(6, 7)], 2)  # text needs none
        image_processor().save_pretrained(tmp_path)
        tokens_of(llm, [prompt_of(6, PICTURE, 7)], 2)


# --- models and options --------------------------------------------------------------------------


def test_text_models_refuse_images(tmp_path: Path) -> None:
    config = LlamaConfig(vocab_size=64, hidden_size=32, num_attention_heads=2, num_hidden_layers=1)
    save_tiny(config, tmp_path)
    refused = pytest.raises(RequestError, match="has 1 images, but this model takes text only")
    with open_vision(tmp_path, "NONE") as llm, refused:
        llm.generate({"prompt_token_ids": [5], "images": [PICTURE]})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"swiftkv_layers": 1}, "swiftkv_layers=1 is for models of the native decoder"),
        (
            {"graphs": GraphConfig(compile="eager")},
            "compile='eager' does not support models that take images",
        ),
        ({"verify": "capture"}, "verify='capture' does not support models that take images"),
    ],
)
def test_options_that_do_not_go_with_images(
    options: dict[str, Any], message: str, saved: tuple[Path, Any]
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_vision(saved[0], **options)


def refusal_on_ranks(path: Path, options: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        open_vision(path, **options)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, "only models of the native decoder run on several ranks"),
        ({"data_parallel_size": 2}, "models that take images run on one device, not on 2 ranks"),
    ],
)
def test_several_ranks_do_not_go_with_images(
    options: dict[str, Any], message: str, saved: tuple[Path, Any], gloo_pool: GlooPool
) -> None:
    for said in gloo_pool.run(refusal_on_ranks, saved[0], options):
        assert message in said


@torch.no_grad()
def test_embeddings_are_of_text_only(saved: tuple[Path, Any]) -> None:
    path, model = saved
    expected = model.model(input_ids=torch.tensor([[6, 7, 8]])).last_hidden_state[0, -1]
    with open_vision(path, "PIECEWISE", task="embed") as llm:
        (output,) = llm.embed([6, 7, 8], normalize=False)
        torch.testing.assert_close(output.embedding, expected, atol=2e-5, rtol=1e-4)
        with pytest.raises(RequestError, match="got the keys 'prompt_token_ids', 'images'"):
            llm.embed({"prompt_token_ids": TOKENS, "images": [PICTURE]})


@pytest.mark.parametrize("sizes", ["64", 5, [0], [True]])
def test_bad_vision_sizes(sizes: Any) -> None:
    with pytest.raises(ConfigError, match="capture size"):
        GraphConfig(vision_capture_sizes=sizes)
