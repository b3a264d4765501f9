"""An EAGLE-3 head: one decoder layer that predicts tokens from a model's hidden states.

Its input at a position is the embedding of the next token beside the model's hidden states of some
layers at that position, fused by a linear layer. Its output replaces these where the model has not
been yet. Checkpoints are as EAGLE-3 publishes them, in safetensors: ``fc``, one layer (``midlayer``
or ``layers.0``), ``norm``, ``lm_head``, and ``d2t`` if it knows fewer tokens than the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from ostinato.attention.base import AttentionSpec, attend_qkv
from ostinato.attention.rope import RotaryEmbedding
from ostinato.errors import ConfigError, ModelLoadError
from ostinato.loading.description import describe
from ostinato.models.base import CausalLM
from ostinato.models.checkpoint import Checkpoint
from ostinato.models.native.config.decoder_config import DecoderConfig
from ostinato.models.native.decoder import Decoder

_PREFIXES = ("midlayer", "layers.0")


class EagleHead:
    """The weights of the head in ``path``, for ``model``, with its dtype and on its device."""

    def __init__(self, path: Path, model: CausalLM) -> None:
        if not isinstance(model, Decoder):
            raise ConfigError(
                f"EagleDrafts needs a model of the native decoder, not {type(model).__name__}"
            )
        config = describe(path).native_config
        assert isinstance(config, DecoderConfig), "not a SwiftKV model"
        if config.hidden_size != model.hidden_size:
            raise ModelLoadError(
                f"the head in {path} has hidden_size {config.hidden_size}, the model "
                f"{model.hidden_size}; it belongs to another model"
            )
        if config.rotary.num_fixed or config.rotary.interleaved:
            raise ModelLoadError(
                f"the head in {path} has a RoPE other than Llama's, which is not supported; choose "
                "another head"
            )
        self._read(path, model)
        self._eps = config.rms_norm_eps
        self._rotary = RotaryEmbedding(table=config.rotary.table(model.max_position, model.device))
        self.vocab_size, self.hidden_size = model.vocab_size, model.hidden_size
        self.spec = AttentionSpec(
            layer=0,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            value_dim=config.head_dim,
            scale=config.head_dim**-0.5,
        )

    def _read(self, path: Path, model: Decoder) -> None:
        checkpoint = Checkpoint(path)
        tensors = dict(checkpoint.read(checkpoint.tensors, model.device))
        layer = next((p for p in _PREFIXES if f"{p}.hidden_norm.weight" in tensors), _PREFIXES[0])

        def weight(*names: str) -> torch.Tensor:
            missing = [name for name in names if f"{name}.weight" not in tensors]
            if missing:
                raise ModelLoadError(f"{path} lacks {missing[0]}.weight; it is not an EAGLE-3 head")
            return torch.cat([tensors[f"{name}.weight"].to(model.dtype) for name in names])

        self._fc = weight("fc")
        self._embedding_norm = weight(f"{layer}.input_layernorm")
        self._hidden_norm = weight(f"{layer}.hidden_norm")
        self._qkv = weight(*(f"{layer}.self_attn.{name}_proj" for name in "qkv"))
        self._output = weight(f"{layer}.self_attn.o_proj")
        self._mlp_norm = weight(f"{layer}.post_attention_layernorm")
        self._gate_up = weight(f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj")
        self._down = weight(f"{layer}.mlp.down_proj")
        self._norm = weight("norm")
        self._head = weight("lm_head")
        own = "embed_tokens.weight" in tensors
        self._embedding = weight("embed_tokens") if own else model.embed_tokens.weight
        self._token_ids: torch.Tensor | None = None  # of the head's tokens, if it has fewer
        if "d2t" in tensors:
            offsets = tensors["d2t"].long()
            self._token_ids = torch.arange(len(offsets), device=model.device) + offsets
        elif len(self._head) != model.vocab_size:
            raise ModelLoadError(
                f"the head in {path} has {len(self._head)} tokens and the model "
                f"{model.vocab_size}, but the head has no table d2t that maps its tokens to the "
                "model's"
            )

    @property
    def num_fused(self) -> int:
        """The number of layers whose states it reads."""
        return self._fc.shape[1] // self._fc.shape[0]

    def fuse(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        """The states of several layers, each [T, hidden_size], as one."""
        return F.linear(torch.cat(tuple(states), dim=-1), self._fc)

    def forward(
        self, next_ids: torch.Tensor, fused: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """States [T, hidden_size] that predict the token after ``next_ids``."""
        embedding = self._normed(F.embedding(next_ids, self._embedding), self._embedding_norm)
        x = torch.cat((embedding, self._normed(fused, self._hidden_norm)), dim=-1)
        attended = attend_qkv(self.spec, F.linear(x, self._qkv), self._rotary, positions)
        hidden = fused + F.linear(attended.flatten(1), self._output)
        gate, up = F.linear(self._normed(hidden, self._mlp_norm), self._gate_up).chunk(2, dim=-1)
        return hidden + F.linear(F.silu(gate) * up, self._down)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocab_size] over the model's tokens; unknown ones are never sampled."""
        logits = F.linear(self._normed(hidden, self._norm), self._head)
        if self._token_ids is None:
            return logits
        all_tokens = logits.new_full((logits.shape[0], self.vocab_size), float("-inf"))
        return all_tokens.index_copy_(1, self._token_ids, logits)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self._eps)
