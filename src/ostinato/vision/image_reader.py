"""Reads users' images: Pillow images, arrays of pixels, and data URLs. Nothing is ever fetched.

A model's own image processor resizes them and cuts them into patches. It and Pillow are loaded with
the first image.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ostinato import compat
from ostinato.errors import RequestError
from ostinato.models.hf.vision.vision_encoder import HFVisionEncoder
from ostinato.models.hf.vision.vision_language import VisionLM
from ostinato.quoting import is_failure, said, shown
from ostinato.vision.prompt_images import ImagePatches, PromptImages, place_images

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_MAX_PIXELS = 64 * 2**20
_MAX_URL = 96 * 2**20  # characters
_CHANNELS = (1, 3, 4)
_AN_IMAGE = "an image is a PIL.Image, an array of uint8 pixels [height, width, 3], or a data URL"
_DATA_URL = re.compile(r"data:image/[a-zA-Z0-9.+-]+;base64,")


class ImageReader:
    """Reads the images of prompts for ``model``, with the image processor in ``path``."""

    def __init__(self, model: VisionLM, path: Path | None) -> None:
        self._encoder = model.vision
        self._dtype = model.dtype
        self._image_token_id = model.image_token_id
        self._path = path
        self._processor: Any = None

    def place(
        self, name: str, prompt_token_ids: Sequence[int], images: Sequence[Any], max_tokens: int
    ) -> tuple[list[int], PromptImages | None]:
        """The prompt with as many tokens for each image as it takes, and the images.

        Images whose tokens together are more than ``max_tokens`` raise.
        """
        patches: list[ImagePatches] = []
        for number, image in enumerate(images):
            patches.append(self._read(f"{name}, image {number}", image))
            num_tokens = sum(each.num_tokens for each in patches)
            if num_tokens > max_tokens:
                raise RequestError(
                    f"the images of {name} up to number {number} take {num_tokens} tokens, but a "
                    f"sequence has at most {max_tokens} (max_model_len); give smaller images or "
                    "fewer, or raise the limit"
                )
        return place_images(
            name,
            prompt_token_ids,
            patches,
            image_token_id=self._image_token_id,
            merge_size=self._encoder.merge_size,
        )

    def _read(self, name: str, image: Any) -> ImagePatches:
        if self._processor is None:
            self._processor = _read_processor(self._path, self._encoder)
        picture = _picture(name, image)
        try:
            result = self._processor(images=[picture], return_tensors="pt")
        except BaseException as error:
            if not is_failure(error):
                raise
            raise RequestError(
                f"{name}, of {picture.width} x {picture.height} pixels, cannot be resized for the "
                f"model: {said(error)}"
            ) from error
        (grid,) = result["image_grid_thw"].tolist()
        return ImagePatches.of(
            result["pixel_values"], tuple(grid), merge=self._encoder.merge, dtype=self._dtype
        )


def _read_processor(path: Path | None, encoder: HFVisionEncoder) -> Any:
    """transformers' image processor in the directory ``path``, which must match the encoder."""
    _pillow()
    processor_class = compat.image_processor.demand()
    try:
        if path is None:
            raise FileNotFoundError("the model has no directory")
        processor: Any = processor_class.from_pretrained(path, local_files_only=True)
    except BaseException as error:
        if not is_failure(error):
            raise
        raise RequestError(
            f"the model's image processor cannot be read: {said(error)}; put its "
            "preprocessor_config.json beside config.json"
        ) from error
    for name, attribute in (
        ("patch_size", "patch_size"),
        ("temporal_patch_size", "temporal_patch_size"),
        ("merge_size", "merge_size"),
    ):
        stated, wanted = getattr(processor, name), getattr(encoder, attribute)
        if stated != wanted:
            raise RequestError(
                f"the image processor in {path} has {name} {shown(stated)}, but the model's config "
                f"has {wanted}; use files of the same model"
            )
    return processor


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise RequestError("images need Pillow: pip install 'ostinato[images]'") from error
    return Image


def _picture(name: str, image: Any) -> Any:
    """A ``PIL.Image`` of whatever the user gave."""
    pillow = _pillow()
    if isinstance(image, str):
        picture = _decoded(name, image)
    elif isinstance(image, pillow.Image):
        picture = image
    else:
        picture = _from_array(name, image)
    if not (picture.width and picture.height):
        raise RequestError(f"{name} has no pixels: it is {picture.width} x {picture.height}")
    if picture.width * picture.height > _MAX_PIXELS:
        raise _too_large(name, picture.width, picture.height)
    try:
        picture.load()
    except BaseException as error:
        if not is_failure(error):
            raise
        raise RequestError(f"{name} cannot be decoded: {said(error)}") from error
    return picture


def _decoded(name: str, url: str) -> Any:
    """The image in a data URL; its pixels are decoded once its size has been checked."""
    prefix = _DATA_URL.match(url)
    if prefix is None:
        raise RequestError(
            f"{name} is the text {shown(url[:60])}; only data URLs are read "
            "('data:image/png;base64,...'), no files and nothing from the network: open it "
            "yourself, as in PIL.Image.open(path)"
        )
    if len(url) > _MAX_URL:
        raise RequestError(
            f"{name} is a data URL of {len(url):,} characters; the limit is {_MAX_URL:,}"
        )
    pillow = _pillow()
    from PIL import ImageOps

    try:
        data = base64.b64decode(url[prefix.end() :], validate=True)
        # It warns of images that are refused below. Hushing it would hush other threads as well.
        picture = pillow.open(io.BytesIO(data), formats=_FORMATS)
        if picture.width * picture.height > _MAX_PIXELS:
            raise _too_large(name, picture.width, picture.height)
        return ImageOps.exif_transpose(picture)
    except RequestError:
        raise
    except BaseException as error:  # what Pillow raises for damaged files varies with the format
        if not is_failure(error):
            raise
        raise RequestError(
            f"{name} is a data URL that does not hold an image in one of the formats "
            f"{', '.join(_FORMATS)}: {said(error)}"
        ) from error


def _from_array(name: str, image: Any) -> Any:
    if isinstance(image, torch.Tensor):
        image = image.detach().cpu().numpy() if image.dtype is torch.uint8 else image
    if not isinstance(image, np.ndarray):
        what = f"a tensor of {image.dtype}" if isinstance(image, torch.Tensor) else shown(image)
        raise RequestError(f"{name} is {what}; {_AN_IMAGE}")
    shape = image.shape
    if image.dtype != np.uint8 or image.ndim not in (2, 3):
        raise RequestError(f"{name} is an array of {image.dtype}, of shape {shape}; {_AN_IMAGE}")
    if image.ndim == 3 and shape[2] not in _CHANNELS:
        if shape[0] not in _CHANNELS:
            raise RequestError(f"{name} is an array of shape {shape}; {_AN_IMAGE}")
        image = image.transpose(1, 2, 0)
    if 0 in image.shape:
        raise RequestError(f"{name} has no pixels: it is an array of shape {shape}")
    if image.ndim == 3 and image.shape[2] == 1:
        image = image[:, :, 0]
    if image.shape[0] * image.shape[1] > _MAX_PIXELS:
        raise _too_large(name, image.shape[1], image.shape[0])
    return _pillow().fromarray(np.ascontiguousarray(image))


def _too_large(name: str, width: int, height: int) -> RequestError:
    return RequestError(
        f"{name} has {width} x {height} pixels; the limit is {_MAX_PIXELS:,}: resize it first"
    )
