"""Finds the images in users' prompts and messages. Reading them is up to ``vision``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ostinato.errors import RequestError
from ostinato.quoting import shown

_KINDS = ("image", "image_url")


def take_images(name: str, prompt: Any) -> tuple[Any, list[Any]]:
    """Split a prompt into itself and its images: the key 'images', or vLLM's multi_modal_data."""
    if not isinstance(prompt, Mapping):
        return prompt, []
    rest = dict(prompt)
    images: Any = rest.pop("images", None)
    if "multi_modal_data" in rest:
        data = rest.pop("multi_modal_data")
        if images is not None or not isinstance(data, Mapping) or set(data) - {"image"}:
            raise RequestError(
                f"{name}['multi_modal_data'] must be {{'image': one image or a list of them}}, and "
                f"replaces 'images', got {shown(data)}; videos and audio are not supported"
            )
        images = data.get("image")
    if images is None:
        return rest, []
    if isinstance(images, list | tuple):
        return rest, list(images)
    return rest, [images]


def is_image_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _KINDS


def image_of(name: str, part: Mapping[str, Any]) -> Any:
    """The image of a part of a message: transformers' form, or OpenAI's."""
    kind = part["type"]
    image = part.get(kind)
    if kind == "image_url" and isinstance(image, Mapping):
        image = image.get("url")
    if image is None:
        raise RequestError(
            f'{name} has no image, as in {{"type": "image", "image": ...}} or '
            f'{{"type": "image_url", "image_url": {{"url": "data:..."}}}}, got {shown(part)}'
        )
    return image
