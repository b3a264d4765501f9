"""Image-and-text models: Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

Where the native decoder can run the language model, it does (``NativeVisionLM``). Others (MoE) run
by transformers' modules, as any other model, with three positions for each token. Tokens of images
take their embeddings, and what is added to the states after the first layers (DeepStack),
from ``ImageRows``: static buffers, so graphs of mixed batches contain the choice between them and
the embeddings of text. Whole decode graphs have no images and do not read them.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeAlias

import torch
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForImageTextToText,
    PretrainedConfig,
)

from ostinato.graphs.capture.context import get_forward_context
from ostinato.models.base import CausalLM
from ostinato.models.hf.model import HFCausalLM
from ostinato.models.hf.vision.image_rows import ImageRows, add_where
from ostinato.models.hf.vision.native_vision import NativeVisionLM, native_config
from ostinato.models.hf.vision.vision_encoder import HFVisionEncoder

VISION_MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")


def takes_images(config: PretrainedConfig) -> bool:
    return config.model_type in VISION_MODELS


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
            self._decoder._deepstack_process = add_where

    @classmethod
    def _reading_device(cls, config: PretrainedConfig, device: torch.device) -> torch.device:
        # A native decoder copies the weights: the device needs no memory for a second copy.
        return device if native_config(config) is None else torch.device("cpu")

    @classmethod
    def _around(
        cls,
        model: Any,
        config: PretrainedConfig,
        *,
        device: torch.device,
        max_model_len: int | None,
    ) -> CausalLM:
        native = native_config(config)
        if native is None:
            return super()._around(model, config, device=device, max_model_len=max_model_len)
        return NativeVisionLM.take_over(model, native, device=device, max_position=max_model_len)

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


VisionLM: TypeAlias = HFVisionLM | NativeVisionLM
