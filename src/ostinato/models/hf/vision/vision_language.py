"""Image-and-text models: Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

Where the native decoder can run the language model, it does (``NativeVisionLM``). Others (MoE) run
by transformers' modules, as any other model, with three positions for each token. Tokens of images
take their embeddings, and what is added to the states after the first layers (DeepStack),
from ``ImageRows``: static buffers, so graphs of mixed batches contain the choice between them and
the embeddings of text. Whole decode graphs have no images and do not read them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForImageTextToText,
    PretrainedConfig,
)

from ostinato.graphs.capture.context import get_forward_context
from ostinato.models.base import CausalLM
from ostinato.models.checkpoint import Checkpoint
from ostinato.models.hf.model import HFCausalLM
from ostinato.models.hf.support import check_config
from ostinato.models.hf.vision.image_rows import ImageRows, add_where
from ostinato.models.hf.vision.native_vision import NativeVisionLM, native_config
from ostinato.models.hf.vision.vision_encoder import HFVisionEncoder
from ostinato.models.hf.weights import check_size

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
    def from_pretrained(
        cls,
        path: Path,
        *,
        config: PretrainedConfig,
        device: torch.device,
        dtype: torch.dtype,
        max_model_len: int | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> CausalLM:
        """As any other model; on the native decoder, if that can run its language model."""
        native = native_config(config)
        if native is None:
            return super().from_pretrained(
                path,
                config=config,
                device=device,
                dtype=dtype,
                max_model_len=max_model_len,
                checkpoint=checkpoint,
            )
        check_config(config, cls.mapping, cls.kind)
        # On the CPU: the device needs no memory for a second copy.
        on_cpu = torch.device("cpu")
        model = cls._read(checkpoint or Checkpoint(path), config, device=on_cpu, dtype=dtype)
        return NativeVisionLM.take_over(model, native, device=device, max_position=max_model_len)

    @classmethod
    def from_config(
        cls,
        config: PretrainedConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        max_model_len: int | None = None,
        most_bytes: int | None = None,
    ) -> CausalLM:
        """The same with random weights."""
        native = native_config(config)
        if native is None:
            return super().from_config(
                config,
                device=device,
                dtype=dtype,
                seed=seed,
                max_model_len=max_model_len,
                most_bytes=most_bytes,
            )
        check_config(config, cls.mapping, cls.kind)
        check_size(cls.auto, config, most_bytes, dtype)
        model = cls._draw(config, device=device, dtype=dtype, seed=seed)
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
