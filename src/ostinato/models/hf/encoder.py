"""Runs transformers' encoders, and decoders used as such, on packed sequences, without a KV cache.

The modules are unchanged except for attention, which is ours. When a model is loaded, a few tokens
run through it to find out what its layers see, how it numbers positions, and which state of a
sequence its classification head reads; and to check that tokens interact only in attention.
"""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoModel,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)

from ostinato.attention.packed import PackedBatch, PackedSpec
from ostinato.errors import ConfigError
from ostinato.graphs.capture.context import set_forward_context
from ostinato.models.checkpoint import Checkpoint
from ostinato.models.hf.attention import DISCOVERY, AttentionCall, record_calls
from ostinato.models.hf.head import head_of
from ostinato.models.hf.packed import PACKED, TokensApart, bind_packed_specs
from ostinato.models.hf.replaced.experts import EXPERTS
from ostinato.models.hf.replaced.modules import (
    attention_implementation,
    close,
    configs_in,
    make_quiet,
    model_errors_explained,
    own_copy,
)
from ostinato.models.hf.support import check_config, freeze_rope, longest_sequence
from ostinato.models.hf.weights import check_size, draw_weights, load_weights
from ostinato.models.pooling import POOLINGS, Pooling, pool

_NUM_PROBE_TOKENS = 16
_NO_TOKEN = -1


class HFEncoder:
    """A transformers model, which it owns and modifies, over a row of packed sequences.

    ``max_position``: the longest sequence. ``first_position``: the number of a sequence's first
    token. ``has_token_types``: tokens of a pair of texts are told apart. ``is_causal``: no token
    sees a later one. ``head_pooling``: the state of a sequence that the classification head reads;
    None if there is no head.
    """

    def __init__(self, model: Any, *, max_position: int) -> None:
        self.model = model.eval().requires_grad_(False)
        self.config: Any = model.config
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self._name = type(model).__name__
        self._base = model.base_model
        pad_token: Any = getattr(self.config, "pad_token_id", None)
        for config in configs_in(model):
            make_quiet(config)
            vars(config)["use_cache"] = False
        freeze_rope(model)
        self.vocab_size: int = model.get_input_embeddings().num_embeddings
        takes_types = "token_type_ids" in inspect.signature(self._base.forward).parameters
        # Without a table of types, GPT-2 and its like look them up in the table of tokens.
        num_types = getattr(self.config, "type_vocab_size", 0) if takes_types else 0
        self.has_token_types = num_types > 1
        self._takes_types = num_types > 0
        self.max_position = max_position
        self.first_position = 0
        self.head_pooling: Pooling | None = None
        with torch.no_grad(), model_errors_explained(self._name):
            self._discover(pad_token)

    @classmethod
    def from_pretrained(
        cls,
        path: Path,
        *,
        config: PretrainedConfig,
        task: Literal["embed", "classify"],
        device: torch.device,
        dtype: torch.dtype,
        max_model_len: int | None,
        checkpoint: Checkpoint,
    ) -> HFEncoder:
        """Load the ``checkpoint`` in the directory ``path``, with a head to classify or without."""
        mapping, options = _class_of(config, task)
        max_position = longest_sequence(config, max_model_len)
        model = load_weights(
            checkpoint,
            own_copy(config),
            device=device,
            dtype=dtype,
            mapping=mapping,
            without_head=task == "embed",
            attn_implementation=PACKED,
            experts_implementation=EXPERTS,
            **options,
        )
        return cls(model, max_position=max_position)

    @classmethod
    def from_config(
        cls,
        config: PretrainedConfig,
        *,
        task: Literal["embed", "classify"],
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        max_model_len: int | None,
        most_bytes: int | None,
    ) -> HFEncoder:
        """A model of ``config`` with random weights on ``device``, of at most ``most_bytes``."""
        _, options = _class_of(config, task)
        auto: Any = AutoModel if task == "embed" else AutoModelForSequenceClassification
        max_position = longest_sequence(config, max_model_len)
        check_size(auto, config, most_bytes, dtype)
        model = draw_weights(
            auto,
            config,
            device=device,
            dtype=dtype,
            seed=seed,
            attn_implementation=PACKED,
            experts_implementation=EXPERTS,
            **options,
        )
        return cls(model, max_position=max_position)

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self.model
        return module

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, token_types: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states [T, hidden_size] of a row of tokens; all arguments are [T].

        ``positions`` count from ``first_position`` in each sequence.
        """
        types = {"token_type_ids": token_types[None]} if self._takes_types else {}
        outputs = self._base(input_ids=input_ids[None], position_ids=positions[None], **types)
        hidden: torch.Tensor = outputs[0].squeeze(0)
        return hidden

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Scores of the labels [B, num_labels], in float32, of one state per sequence."""
        rows = states.to(self.dtype).unsqueeze(1)
        ids = torch.zeros(rows.shape[:2], dtype=torch.int64, device=self.device)
        logits: torch.Tensor = self._head(input_ids=ids, inputs_embeds=rows).logits
        return logits.float()

    # --- checks at loading ----------------------------------------------------------------------

    def _discover(self, pad_token: Any) -> None:
        # RoBERTa counts positions from the number after its padding token's, which is small.
        has_offset = isinstance(pad_token, int) and 0 <= pad_token < self.max_position // 2
        offset = pad_token + 1 if has_offset else 0
        count = min(_NUM_PROBE_TOKENS, self.max_position - offset)
        ids = (7 * torch.arange(count, device=self.device) + 3) % self.vocab_size
        if has_offset:
            ids[ids == pad_token] = (pad_token + 1) % self.vocab_size
        calls: list[AttentionCall] = []
        with attention_implementation(self.model, DISCOVERY), record_calls(calls):
            expected: torch.Tensor = self._base(input_ids=ids[None])[0].squeeze(0)
        if not expected.isfinite().all():
            raise ConfigError(
                f"{self._name} gives NaN or infinite states for the first few tokens in "
                f"{self.dtype}; the numbers in its config are wrong, or it needs another dtype"
            )
        self.hidden_size: int = expected.shape[-1]
        num_layers = self.config.get_text_config().num_hidden_layers
        specs: list[PackedSpec] = bind_packed_specs(
            self._name, calls, num_layers, self.max_position
        )
        self.is_causal = all(spec.right == 0 for spec in specs)
        with set_forward_context(attn_metadata=TokensApart()):
            self._number_positions(ids, expected, offset)
            if self._base is not self.model:
                self._find_head_pooling(ids, expected)

    def _number_positions(self, ids: torch.Tensor, expected: torch.Tensor, offset: int) -> None:
        """Set ``first_position`` to what gives the model's own states, even in another row."""
        count, row = len(ids), torch.cat([ids.flip(0), ids])
        for first in dict.fromkeys((0, offset)):
            positions = first + torch.arange(count, device=self.device)
            positions = torch.cat([positions.flip(0), positions])
            states = self.forward(row, positions, torch.zeros_like(row))
            parts = (states[count:], states[:count].flip(0))
            if all(close(part, expected, self.dtype) for part in parts):
                self.first_position = first
                # A table of positions that counts from ``first`` ends earlier.
                self.max_position -= first
                return
        raise ConfigError(
            f"a token's state in {self._name} depends on more than its id, its position (0, 1, 2, "
            "... in a sequence) and attention; it cannot be run on packed sequences"
        )

    def _find_head_pooling(self, ids: torch.Tensor, states: torch.Tensor) -> None:
        """Set ``head_pooling`` to what gives the model's own logits."""
        self._head = head_of(self.model, self._base)
        self._head.config = copy.copy(self.config)
        vars(self._head.config)["pad_token_id"] = _NO_TOKEN  # some heads look for it
        expected = self.model(input_ids=ids[None]).logits
        batch = PackedBatch([len(ids)], self.device)
        logits = {each: self.compute_logits(pool(states, batch, each)) for each in POOLINGS}
        # With few labels, a wrong one may come close by chance.
        nearest = min(POOLINGS, key=lambda each: float((logits[each] - expected).abs().max()))
        if not close(logits[nearest], expected, self.dtype):
            raise ConfigError(
                f"the scores of {self._name} are not a function of a sequence's first, last or "
                "mean hidden state; it cannot be run"
            )
        self.head_pooling = nearest


def _class_of(
    config: PretrainedConfig, task: Literal["embed", "classify"]
) -> tuple[Any, dict[str, Any]]:
    """transformers' classes by config, and options to build one. Raises if it cannot run."""
    if task == "classify":
        mapping: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
        check_config(config, mapping, "sequence classifier", packed=True)
        return mapping, {}
    mapping = MODEL_MAPPING
    check_config(config, mapping, "encoder", packed=True)
    # The pooler is for heads, and saved by some checkpoints only.
    if "add_pooling_layer" in inspect.signature(mapping[type(config)]).parameters:
        return mapping, {"add_pooling_layer": False}
    return mapping, {}
