"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL with the native decoder as their language model.

The layers are those of Qwen2 and Qwen3. With M-RoPE, each pair of a head follows one of a token's
three positions. In decode steps all three are equal, so the kernels read the usual RoPE table. In
other steps a table of the batch is gathered from it, one row per token, and the kernels read that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from transformers import AutoConfig, PretrainedConfig

from ostinato.graphs.capture.context import get_forward_context
from ostinato.models.hf.replaced.modules import configs_in, make_quiet
from ostinato.models.hf.vision.image_rows import ImageRows, add_where
from ostinato.models.hf.vision.vision_encoder import HFVisionEncoder
from ostinato.models.native.config.decoder_config import DecoderConfig, unsupported_reason
from ostinato.models.native.decoder import Decoder
from ostinato.models.native.layer import run_layers

_PLAIN_TYPES = {"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3"}
_MROPE = ("mrope_section", "mrope_interleaved")


class NativeVisionLM(Decoder):
    """A ``CausalLM`` that takes images. ``vision`` encodes them; ``images`` is where they are read.

    ``axes`` [head_dim]: which of the three positions each column of the RoPE table follows.
    ``image_token_id``: the token in a prompt whose place an image takes.
    """

    encoder_prefixes: ClassVar[tuple[str, ...]] = ("model.visual.", "visual.")

    def __init__(
        self,
        config: DecoderConfig,
        vision: HFVisionEncoder,
        *,
        axes: torch.Tensor,
        image_token_id: int,
        max_position: int | None,
    ) -> None:
        super().__init__(
            config, device=vision.device, dtype=vision.dtype, max_position=max_position
        )
        self.vision = vision
        self.images: ImageRows | None = None
        self.image_token_id = image_token_id
        self._axes = axes.to(vision.device)

    @classmethod
    def take_over(
        cls, model: Any, config: DecoderConfig, *, device: torch.device, max_position: int | None
    ) -> NativeVisionLM:
        """Move transformers' ``model`` to ``device``, its language model into a native decoder."""
        model = model.eval().requires_grad_(False)
        for each in configs_in(model):
            make_quiet(each)
        top, language_model = model.config, model.model.language_model
        config = replace(config, tied_head=_is_tied(model))
        vision = HFVisionEncoder(model.model.visual.to(device), hidden_size=config.hidden_size)
        native = cls(
            config,
            vision,
            axes=mrope_axes(top),
            image_token_id=top.image_token_id,
            max_position=max_position,
        )
        weights = {f"model.{name}": each for name, each in language_model.state_dict().items()}
        weights["lm_head.weight"] = model.lm_head.weight
        for slot in native.weight_slots():
            tensor = weights[slot.name].detach()
            if slot.parts is not None:
                rows = [torch.arange(r.start, r.stop, r.step) for r in slot.parts]
                tensor = tensor.index_select(slot.dim, torch.cat(rows).to(tensor.device))
            slot.target.copy_(tensor)
        return native

    @property
    def uses_mrope(self) -> bool:
        return True

    def spellings(self, name: str) -> list[str]:
        """As transformers names it, and as versions before 4.52 did."""
        return [name.replace("model.", "model.language_model.", 1), name]

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, hidden_size] of tokens ``input_ids`` at ``positions`` [3, T]."""
        hidden = F.embedding(input_ids, self.embed_tokens.weight)
        images, key = self.images, get_forward_context().batch_descriptor
        if images is None or (key is not None and key.uniform):
            return self._run_layers(hidden, positions[0], positions[0])
        num_tokens = input_ids.shape[0]
        is_image = images.is_image[:num_tokens]
        first, *deeper = images.rows[:num_tokens].chunk(self.vision.num_levels, dim=-1)
        hidden = torch.where(is_image, first, hidden)
        # At a fixed address: attention reads it between the pieces of a graph.
        angles, numbers = images.angles[:num_tokens], images.numbers[:num_tokens]
        angles.copy_(self.rotary_table.gather(0, positions[self._axes].T))
        run = self._kernels(hidden, numbers, numbers, table=angles)
        layers = list(self.decoder_layers())
        for layer, rows in zip(layers, deeper, strict=False):  # warm-ups have few layers
            hidden = add_where(run_layers([layer], hidden, run, self._aux), is_image, rows)
        return run_layers(layers[len(deeper) :], hidden, run, self._aux)


def _is_tied(model: Any) -> bool:
    """Whether head and embeddings are one tensor: what transformers found in the checkpoint."""
    embedding: torch.Tensor = model.get_input_embeddings().weight
    head: torch.Tensor = model.lm_head.weight
    return embedding.data_ptr() == head.data_ptr()


def native_config(config: PretrainedConfig) -> DecoderConfig | None:
    """The native decoder's config for the language model; None if it cannot run it."""
    kind = _PLAIN_TYPES.get(config.model_type)
    if kind is None or getattr(config, "quantization_config", None) is not None:
        return None
    text: Any = config.get_text_config()
    fields = {name: value for name, value in text.to_dict().items() if name != "model_type"}
    rope = {name: value for name, value in text.rope_parameters.items() if name not in _MROPE}
    fields |= {"rope_parameters": rope, "tie_word_embeddings": config.tie_word_embeddings}
    plain: Any = AutoConfig.for_model(kind, **fields)
    if unsupported_reason(plain) is not None:
        return None
    return DecoderConfig.from_hf(plain)


def mrope_axes(config: Any) -> torch.Tensor:
    """Which position (time, height, width) each column of the RoPE table follows: [head_dim]."""
    rope: dict[str, Any] = config.get_text_config().rope_parameters
    if config.model_type == "qwen3_vl":  # interleaved: 0 1 2 0 1 2 ... 0 0
        section = rope.get("mrope_section", [24, 20, 20])
        pairs = torch.zeros(sum(section), dtype=torch.int64)
        for axis in (1, 2):
            pairs[axis : 3 * section[axis] : 3] = axis
    else:
        section = rope.get("mrope_section", [16, 24, 24])
        pairs = torch.arange(len(section)).remainder(3).repeat_interleave(torch.tensor(section))
    return pairs.repeat(2)  # cosines, then sines
