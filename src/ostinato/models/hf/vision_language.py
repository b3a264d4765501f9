"""Runs Qwen2-VL, Qwen2.5-VL and Qwen3-VL by transformers' modules, on a flat row of tokens.

The language model runs as any other (``HFCausalLM``), with three positions for each token. Tokens
of images take their embeddings, and what is added to the states after the first layers (DeepStack),
from ``ImageRows``: static buffers, so graphs of mixed batches contain the choice between them and
the embeddings of text. Whole decode graphs have no images and do not read them.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForImageTextToText,
    PretrainedConfig,
)

from ostinato.graphs.capture.context import get_forward_context
from ostinato.models.hf.model import HFCausalLM
from ostinato.models.hf.vision import HFVisionEncoder

VISION_MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")


def takes_images(config: PretrainedConfig) -> bool:
    return config.model_type in VISION_MODELS


class ImageRows:
    """The rows of image tokens in the running batch, at fixed addresses.

    ``rows`` [T, width]: as the vision encoder returns them, where ``is_image`` [T, 1]; other rows
    are never used. Outside of steps with images, ``is_image`` is False everywhere.
    """

    def __init__(self, encoder: HFVisionEncoder, max_num_tokens: int) -> None:
        device = encoder.device
        self.rows = torch.zeros((max_num_tokens, encoder.width), dtype=encoder.dtype, device=device)
        self.is_image = torch.zeros((max_num_tokens, 1), dtype=torch.bool, device=device)


class HFVisionLM(HFCausalLM):
    """A ``CausalLM`` that takes images. ``vision`` encodes them; ``images`` is where they are read.

    ``image_token_id``: the token in a prompt whose place an image takes.
    """

    auto: ClassVar[Any] = AutoModelForImageTextToText
    mapping: ClassVar[Any] = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    kind: ClassVar[str] = "image-and-text model"

    def __init__(self, model: Any, *, max_position: int) -> None:
        self.images: ImageRows | None = None
        super().__init__(model, max_position=max_position)
        self.vision = HFVisionEncoder(model.model.visual, hidden_size=self.hidden_size)
        self.image_token_id: int = model.config.image_token_id
        if self.vision.num_levels > 1:
            # transformers' own indexes by a mask, and a graph cannot contain that.
            self._decoder._deepstack_process = _add_where

    @property
    def uses_mrope(self) -> bool:
        return True

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, hidden_size], after the final norm; ``positions`` [3, T]."""
        images = self.images
        key = get_forward_context().batch_descriptor
        if images is None or (key is not None and key.uniform):
            return self._run(input_ids=input_ids.unsqueeze(0), positions=positions)
        num_tokens = input_ids.shape[0]
        is_image = images.is_image[:num_tokens]
        first, *deeper = images.rows[:num_tokens].chunk(self.vision.num_levels, dim=-1)
        embeds = torch.where(is_image, first, self._decoder.embed_tokens(input_ids))
        added = {}
        if deeper:
            added = {"visual_pos_masks": is_image, "deepstack_visual_embeds": deeper}
        return self._run(inputs_embeds=embeds.unsqueeze(0), positions=positions, **added)

    def _run(self, *, positions: torch.Tensor, **inputs: Any) -> torch.Tensor:
        outputs = self._decoder(position_ids=positions.unsqueeze(-2), use_cache=False, **inputs)
        hidden: torch.Tensor = outputs[0].squeeze(0)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [B, vocab_size] in float32."""
        logits: torch.Tensor = self.model.lm_head(hidden)
        return logits.float()


def _add_where(hidden: torch.Tensor, is_image: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``hidden`` [1, T, H] plus ``rows`` [T, H] at the tokens of images, ``is_image`` [T, 1]."""
    # Between two tensors: a scalar would be copied to the device, which a graph cannot contain.
    return torch.where(is_image, hidden + rows, hidden)
