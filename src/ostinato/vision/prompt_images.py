"""The images of one prompt: their patches, which tokens they take, and the positions of all tokens.

With M-RoPE a token has three positions. Those of text are equal; those of an image's tokens count
its rows and columns; and the text after an image goes on behind the larger of both counts, so
positions fall behind the number of tokens. ``rope_delta`` is by how much, at the end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ostinato.errors import RequestError
from ostinato.scheduling.request import Content


@dataclass(frozen=True, kw_only=True, eq=False)
class ImagePatches:
    """One image, ready for the vision encoder.

    ``pixels`` [patches, patch_dim] on the CPU. ``grid``: patches in time, by height and by width.
    ``num_tokens``: what it takes in a prompt. ``digest`` identifies its content.
    """

    pixels: torch.Tensor
    grid: tuple[int, int, int]
    num_tokens: int
    digest: bytes

    @classmethod
    def of(
        cls, pixels: torch.Tensor, grid: tuple[int, int, int], *, merge: int, dtype: torch.dtype
    ) -> ImagePatches:
        content = hashlib.sha256(repr(grid).encode())
        content.update(pixels.contiguous().numpy().data)
        return cls(
            pixels=pixels.to(dtype),
            grid=grid,
            num_tokens=pixels.shape[0] // merge,
            digest=content.digest(),
        )


@dataclass(frozen=True, eq=False)
class PlacedImage:
    """An image, and the first of the prompt's tokens that it takes."""

    image: ImagePatches
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.image.num_tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptImages:
    """The images of a prompt, in order.

    The three positions of token n are n + ``rope_delta`` + ``offsets[:, n]``. From ``stop`` on, the
    end of the last image, the offsets are 0, and left out of ``offsets`` [3, stop].
    """

    images: tuple[PlacedImage, ...]
    rope_delta: int
    offsets: npt.NDArray[np.int64]

    @property
    def stop(self) -> int:
        return self.images[-1].stop

    @property
    def contents(self) -> tuple[Content, ...]:
        """What tells blocks of the KV cache with different images apart."""
        return tuple(Content(each.start, each.stop, each.image.digest) for each in self.images)


def place_images(
    name: str,
    prompt_token_ids: Sequence[int],
    images: Sequence[ImagePatches],
    *,
    image_token_id: int,
    merge_size: int,
) -> tuple[list[int], PromptImages | None]:
    """Give each image its tokens in the prompt; returns the longer prompt.

    The prompt has one placeholder for each image, or as many as the images have tokens.
    """
    count = sum(token == image_token_id for token in prompt_token_ids)
    expanded = sum(image.num_tokens for image in images)
    if count not in (len(images), expanded):
        raise RequestError(
            f"{name} has {count} image placeholders (token {image_token_id}) and {len(images)} "
            "images; give one placeholder per image, in order"
        )
    if not images:
        return list(prompt_token_ids), None
    each_takes = [image.num_tokens if count == expanded else 1 for image in images]
    tokens: list[int] = []
    placed: list[PlacedImage] = []
    skip = 0
    for token in prompt_token_ids:
        if skip:
            skip -= 1
        elif token != image_token_id:
            tokens.append(token)
            continue
        else:
            image = images[len(placed)]
            skip = each_takes[len(placed)] - 1
            placed.append(PlacedImage(image, len(tokens)))
            tokens += [image_token_id] * image.num_tokens
        if token != image_token_id:
            raise RequestError(
                f"{name} has placeholders for the tokens of its images, but not in runs as long "
                "as the images; give one placeholder per image"
            )
    if placed[-1].stop == len(tokens):
        raise RequestError(
            f"{name} ends with an image; add text after it, such as the token that ends images"
        )
    return tokens, _with_positions(placed, merge_size)


def _with_positions(placed: list[PlacedImage], merge_size: int) -> PromptImages:
    positions: list[npt.NDArray[np.int64]] = []
    token, position = 0, 0
    for each in placed:
        num_before = each.start - token
        positions.append(np.broadcast_to(position + np.arange(num_before), (3, num_before)))
        position += num_before
        time, height, width = each.image.grid
        shape = time, height // merge_size, width // merge_size
        positions.append(position + np.indices(shape).reshape(3, -1))
        position += max(shape[1:])
        token = each.stop
    delta = position - token
    offsets = np.concatenate(positions, axis=1) - np.arange(token) - delta
    return PromptImages(images=tuple(placed), rope_delta=delta, offsets=offsets)
