"""Runs any transformers causal language model, by transformers' modules, on a flat row of tokens.

The modules are unchanged except for attention, expert layers and recurrent layers, which are ours,
and, in half precision, plain norms and gated MLPs (``fused_modules.py``). When a model is loaded,
it runs a few tokens to find out how its layers call attention, and to check the assumptions of this
path: that tokens interact only in attention and in recurrent layers, that the model uses the given
positions, and that the head is applied to the last hidden state. It is the general path; the native
decoder is the fast one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig

from ostinato.attention.base import AttentionSpec
from ostinato.errors import ConfigError
from ostinato.graphs.capture.context import set_forward_context
from ostinato.models.base import CausalLM
from ostinato.models.checkpoint import Checkpoint
from ostinato.models.hf.attention import (
    ATTENTION,
    DISCOVERY,
    AttentionCall,
    TokenByToken,
    record_calls,
)
from ostinato.models.hf.head import decoder_of, head_of
from ostinato.models.hf.replaced.experts import EXPERTS
from ostinato.models.hf.replaced.fused_modules import fuse_modules, update_fused_norms
from ostinato.models.hf.replaced.mixer_check import check_mixers, tokens_apart
from ostinato.models.hf.replaced.mixers import install_mixers
from ostinato.models.hf.replaced.modules import (
    attention_implementation,
    close,
    configs_in,
    make_quiet,
    model_errors_explained,
    own_copy,
    tables_noted,
)
from ostinato.models.hf.specs import bind_specs
from ostinato.models.hf.support import (
    check_config,
    freeze_rope,
    longest_sequence,
)
from ostinato.models.hf.weights import (
    check_size,
    draw_weights,
    load_some_weights,
    load_weights,
)

_NUM_PROBE_TOKENS = 16


class HFCausalLM(CausalLM):
    """A ``CausalLM`` around a transformers model, which it owns and modifies.

    ``forward`` and ``compute_logits`` read nothing on the host, so they can be captured, unless the
    model's code does; then the capture raises and names the operation.
    """

    # transformers' classes, and what they are called in errors.
    auto: ClassVar[Any] = AutoModelForCausalLM
    mapping: ClassVar[Any] = MODEL_FOR_CAUSAL_LM_MAPPING
    kind: ClassVar[str] = "causal language model"

    _num_ids: int | None = None  # if it can read fewer ids than its head has rows

    def __init__(self, model: Any, *, max_position: int) -> None:
        self.model = model.eval().requires_grad_(False)
        self.max_position = max_position
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self._name = type(model).__name__
        for config in configs_in(model):
            make_quiet(config)
        freeze_rope(model)
        self._decoder = decoder_of(model)
        self._head = head_of(model, self._decoder)
        self.attention_specs: Sequence[AttentionSpec] = ()
        self.num_fused_modules = fuse_modules(model)
        self._mixers = install_mixers(model)
        self.recurrent_specs = [mixer.spec for mixer in self._mixers]
        with torch.no_grad():
            self._discover()

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
        """Load the safetensors checkpoint in the directory ``path``.

        ``checkpoint``: the same, if its headers were read already.

        ``max_model_len``: the longest sequence that will be run; None: the model's limit.
        """
        check_config(config, cls.mapping, cls.kind)
        longest_sequence(config, max_model_len)  # raises before weights are read
        model = load_weights(
            checkpoint or Checkpoint(path),
            own_copy(config),
            device=cls._reading_device(config, device),
            dtype=dtype,
            mapping=cls.mapping,
            attn_implementation=ATTENTION,
            experts_implementation=EXPERTS,
        )
        return cls._around(model, config, device=device, max_model_len=max_model_len)

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
        """A model of ``config`` with random weights on ``device``, of at most ``most_bytes``."""
        check_config(config, cls.mapping, cls.kind)
        longest_sequence(config, max_model_len)
        check_size(cls.auto, config, most_bytes, dtype)
        model = draw_weights(
            cls.auto,
            config,
            device=device,
            dtype=dtype,
            seed=seed,
            attn_implementation=ATTENTION,
            experts_implementation=EXPERTS,
        )
        return cls._around(model, config, device=device, max_model_len=max_model_len)

    def read_some(self, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
        """The weights that ``checkpoint`` has, checked, for ``write``."""
        implementations = {
            "attn_implementation": ATTENTION,
            "experts_implementation": EXPERTS,
        }
        return load_some_weights(checkpoint, self.model, **implementations)

    def write(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Overwrite weights with what ``read_some`` returned."""
        own: dict[str, torch.Tensor] = self.model.state_dict()
        for name, tensor in weights.items():
            own[name].copy_(tensor)
        update_fused_norms(self.model)

    @classmethod
    def _reading_device(cls, config: PretrainedConfig, device: torch.device) -> torch.device:
        """Where weights are read to, for a model that will be on ``device``."""
        return device

    @classmethod
    def _around(
        cls,
        model: Any,
        config: PretrainedConfig,
        *,
        device: torch.device,
        max_model_len: int | None,
    ) -> CausalLM:
        """What runs transformers' ``model``, on ``device``."""
        return cls(model, max_position=longest_sequence(config, max_model_len))

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self.model
        return module

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, hidden_size], after the final norm."""
        outputs = self._decoder(
            input_ids=input_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
        )
        hidden: torch.Tensor = outputs[0].squeeze(0)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [B, vocab_size] in float32, scaled and capped as the model does."""
        logits: torch.Tensor = self._head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits
        logits = logits.squeeze(0).float()
        return logits if self._num_ids is None else logits[:, : self._num_ids].contiguous()

    # --- checks at loading ----------------------------------------------------------------------

    def _discover(self) -> None:
        count = min(_NUM_PROBE_TOKENS, self.max_position)
        positions = torch.arange(count, device=self.device)
        ids = (7 * positions + 3) % self.model.get_input_embeddings().num_embeddings
        apart = SimpleNamespace(
            backend=TokenByToken(), recurrent=tokens_apart(self._mixers, count, self.dtype)
        )
        with model_errors_explained(self._name):
            check_mixers(self._mixers, self.dtype)
            with set_forward_context(attn_metadata=apart):
                with tables_noted(self.model, ids) as tables:
                    own_numbering = self._learn_specs(ids)
                hidden = self.forward(ids, positions)
                backwards = self.forward(ids.flip(0), positions.flip(0)).flip(0)
                logits = self.compute_logits(hidden)
                row = {"input_ids": ids[None], "position_ids": positions[None]}
                expected = self.model(**row, use_cache=False).logits.squeeze(0)
        self.hidden_size = hidden.shape[-1]
        # Gemma 3n has a second table, with fewer rows: it cannot read its last tokens.
        self.vocab_size = min([logits.shape[-1], *(table.num_embeddings for table in tables)])
        if self.vocab_size < logits.shape[-1]:
            self._num_ids = self.vocab_size
        if not logits.isfinite().all():
            raise ConfigError(
                f"{self._name} gives NaN or infinite logits for the first few tokens in "
                f"{self.dtype}; the numbers in its config are wrong, or it needs another dtype"
            )
        if not close(hidden, backwards, self.dtype):
            raise ConfigError(
                f"a token's hidden state in {self._name} depends on more than its id, its position "
                "and attention: it mixes neighbouring tokens elsewhere (a convolution, a recurrent "
                "state) or ignores the positions it is given; it cannot be run"
            )
        if not close(hidden, own_numbering, self.dtype):
            raise ConfigError(
                f"{self._name} does not number the tokens of a sequence 0, 1, 2, ...; it cannot "
                "be run"
            )
        if not close(logits, expected, self.dtype):
            raise ConfigError(
                f"the logits of {self._name} are not a function of its last hidden state alone; it "
                "cannot be run"
            )

    def _learn_specs(self, ids: torch.Tensor) -> torch.Tensor:
        """Set ``attention_specs``; return the hidden states of ``ids`` at the model's positions."""
        calls: list[AttentionCall] = []
        with attention_implementation(self.model, DISCOVERY), record_calls(calls):
            hidden: torch.Tensor = self._decoder(input_ids=ids[None], use_cache=False)[0].squeeze(0)
        num_layers = self.model.config.get_text_config().num_hidden_layers
        self.attention_specs = bind_specs(
            self._name,
            calls,
            num_layers,
            self.max_position,
            [mixer.module.layer_idx for mixer in self._mixers],
        )
        return hidden
