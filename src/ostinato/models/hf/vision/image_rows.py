"""The buffers from which image-and-text models read the images of a batch."""

from __future__ import annotations

import torch

from ostinato.models.hf.vision.vision_encoder import HFVisionEncoder


class ImageRows:
    """The rows of image tokens in the running batch, at fixed addresses.

    ``rows`` [T, width]: as the vision encoder returns them, where ``is_image`` [T, 1]; other rows
    are never used. Outside of steps with images, ``is_image`` is False everywhere. ``angles``
    [T, head_dim] is the RoPE table of the batch, and ``numbers`` [T] are its rows; the native
    decoder fills it.
    """

    def __init__(self, encoder: HFVisionEncoder, max_num_tokens: int, head_dim: int) -> None:
        device = encoder.device
        self.rows = torch.zeros((max_num_tokens, encoder.width), dtype=encoder.dtype, device=device)
        self.is_image = torch.zeros((max_num_tokens, 1), dtype=torch.bool, device=device)
        self.angles = torch.zeros((max_num_tokens, head_dim), dtype=torch.float32, device=device)
        self.numbers = torch.arange(max_num_tokens, device=device)


def add_where(hidden: torch.Tensor, is_image: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``hidden`` plus ``rows`` at the tokens of images, ``is_image`` [T, 1]."""
    # Between two tensors: a scalar would be copied to the device, which a graph cannot contain.
    return torch.where(is_image, hidden + rows, hidden)
