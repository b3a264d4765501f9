"""The native decoder: one transformer for Llama, Qwen3, Mixtral, DeepSeek-V3 and similar families.

Inference only, over a flat row of tokens, with few operators per layer: queries, keys and values
come from one GEMM, gate and up from another. ``layer.py`` defines what a layer computes; this
module chooses the kernels: fused ones on CUDA and on a CPU with compiled kernels; plain torch
elsewhere, and for torch.compile, which fuses by itself. ``DecoderConfig`` holds the differences
between the families.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ostinato.attention.base import AttentionSpec
from ostinato.errors import ConfigError
from ostinato.models.base import CausalLM
from ostinato.models.native.config.decoder_config import DecoderConfig
from ostinato.models.native.exchange import ALONE, Exchange
from ostinato.models.native.fused_kernels import LargeM, SmallM
from ostinato.models.native.invariant_kernels import Invariant
from ostinato.models.native.layer import (
    DecoderLayer,
    LayerOffloader,
    empty_linear,
    empty_norm,
    norm_slots,
    run_layers,
)
from ostinato.models.native.layer_kernels import AnyKernels, LayerAdapters, Plain
from ostinato.models.native.norms.rms_norm import RMSNorm
from ostinato.models.native.token_slots import TOKEN_SLOTS, token_slots
from ostinato.models.native.tunable_gemms import tunable_gemms
from ostinato.models.native.weight_rows import WeightRows
from ostinato.models.weight_slot import WeightSlot
from ostinato.ops.gemm.invariant import each_row, invariant_linear
from ostinato.ops.gemm.linear import Gemm, linear
from ostinato.ops.gemm.tile_config import MAX_ROWS, LinearShape
from ostinato.ops.norm import Norm
from ostinato.ops.numba import runs_compiled


class Decoder(nn.Module, CausalLM):
    """A ``CausalLM``. Its parameters hold no values until they are loaded or drawn.

    ``max_position`` limits the RoPE table to the sequences that will be run; the default is the
    model's limit. The device may be ``meta``, to count parameters without memory. ``offloader``
    keeps the weights of some layers elsewhere until they run. ``encoder_prefixes``: how the names
    of a vision encoder begin, if the model has one.
    """

    encoder_prefixes: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        config: DecoderConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_position: int | None = None,
        exchange: Exchange = ALONE,
        offloader: LayerOffloader | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self._exchange = exchange
        self.offloader: LayerOffloader | None = offloader
        self.adapters: LayerAdapters | None = None
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.max_position = _checked_max_position(config, max_position)
        self.dtype = dtype
        self.device = device
        self.embed_tokens = nn.Embedding(
            config.vocab_size,
            config.hidden_size,
            _weight=torch.empty(config.vocab_size, config.hidden_size, device=device, dtype=dtype),
        ).requires_grad_(False)
        self.layers = nn.ModuleList()
        for number in range(config.num_layers):
            layer = DecoderLayer(config, number, device=device, dtype=dtype, exchange=exchange)
            if offloader is not None:
                offloader.place(layer)  # before the next one takes memory on the device
            self.layers.append(layer)
        self.norm = empty_norm(config, config.hidden_size, device=device, dtype=dtype)
        self.lm_head = (
            None
            if config.tied_head
            else empty_linear(
                config.hidden_size, config.vocab_size, bias=False, device=device, dtype=dtype
            )
        )
        if config.experts is not None:
            self.splitting_ops = (*CausalLM.splitting_ops, TOKEN_SLOTS)
        self._aux: dict[int, torch.Tensor] = {}
        # In the precision of the states that it scales, as in the models that have one.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        # float32 for every dtype: bfloat16 cannot represent a position such as 100,001.
        for number, rotary in enumerate(config.rotaries):
            table = rotary.table(self.max_position, device)
            self.register_buffer(_table_name(number), table, persistent=False)
        self.rotary_table: torch.Tensor
        self.attention_specs: Sequence[AttentionSpec] = [
            layer.spec for layer in self.decoder_layers()
        ]

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, hidden_size] of tokens ``input_ids`` at ``positions``.

        The last norm is not applied: it is part of the head, which runs for few tokens.
        """
        hidden = F.embedding(input_ids, self.embed_tokens.weight)
        return self._run_layers(hidden, positions, positions)

    def _run_layers(
        self, hidden: torch.Tensor, positions: torch.Tensor, all_positions: torch.Tensor
    ) -> torch.Tensor:
        """``positions`` belong to ``hidden``, ``all_positions`` to all tokens in attention."""
        if self._embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        run = self._kernels(hidden, positions, all_positions)
        layers = self.decoder_layers()
        if self.offloader is None:
            return run_layers(layers, hidden, run, self._aux)
        with closing(self.offloader.over(layers)) as with_weights:
            return run_layers(with_weights, hidden, run, self._aux, weights_leave=True)

    @property
    def module(self) -> nn.Module:
        return self

    @property
    def rotary_tables(self) -> list[torch.Tensor]:
        """The RoPE tables that layers refer to by number (``DecoderLayer.rotary_table``)."""
        return [getattr(self, _table_name(n)) for n in range(len(self.config.rotaries))]

    def _kernels(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        all_positions: torch.Tensor,
        table: torch.Tensor | None = None,
    ) -> AnyKernels:
        """Choose the kernels that run the layers for these rows, by shapes and device alone.

        With adapters, if the batch has some. ``table``: what positions are rows of, if the model
        has one table; None: the model's RoPE tables.
        """
        tables = self.rotary_tables if table is None else [table]
        run: AnyKernels
        if self.batch_invariant:
            return Invariant(tables, all_positions)
        if not self._runs_fused(hidden):  # first: a trace must not depend on the number of rows
            run = Plain(tables, positions, self.dtype)
        else:
            few = hidden.shape[0] <= MAX_ROWS and self.dtype is not torch.float32
            # GEMMs that are summed over ranks cannot add the residual.
            kernels = SmallM if few and not self._exchange.sums else LargeM
            run = kernels(tables, all_positions)
        if self.config.experts is not None:
            run.slots = self._token_slots(hidden)
        return run if self.adapters is None else self.adapters.adapted(run, hidden.shape[0])

    def _token_slots(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """The slots of the tokens that experts see, whose padding chooses none."""
        return self._exchange.slots_of_all(token_slots(hidden), hidden.shape[0])

    def make_batch_invariant(self) -> None:
        """From now on, the bits of a row do not depend on the rows around it.

        For dense models with plain attention, before anything is captured.
        """
        self.batch_invariant = True
        self._exchange.add_in_order()

    def set_aux_hidden_states(self, states: Mapping[int, torch.Tensor]) -> None:
        for layer in states:
            if not 0 <= layer < len(self.layers):
                raise ConfigError(
                    f"aux_hidden_state_layers has {layer}, but the model's layers are 0 to "
                    f"{len(self.layers) - 1}"
                )
        self._aux = dict(states)

    def expert_load(self, *, reset: bool = False) -> dict[int, list[int]]:
        loads = {
            layer.spec.layer: layer.mixture.load
            for layer in self.decoder_layers()
            if layer.mixture is not None
        }
        if not loads:
            return {}
        counts = torch.stack(list(loads.values())).tolist()
        if reset:
            for load in loads.values():
                load.zero_()
        return dict(zip(loads, counts, strict=True))

    def tunable_gemms(self) -> dict[LinearShape, list[torch.Tensor]]:
        return tunable_gemms(self.config, self.decoder_layers(), self.head_weight)

    def _runs_fused(self, hidden: torch.Tensor) -> bool:
        # Compilers fuse by themselves.
        return not torch.compiler.is_compiling() and (hidden.is_cuda or runs_compiled(hidden))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [B, vocab_size] of hidden states [B, hidden_size]."""
        if self.batch_invariant:
            rows = each_row(self.norm.fused, hidden)
            logits = invariant_linear(Gemm(rows, self.head_weight))
            return each_row(self._scaled_logits, logits)
        if hidden.is_cuda and isinstance(self.norm, RMSNorm):
            logits = linear(hidden, self.head_weight, norm=Norm(self.norm.weight, self.norm.eps))
        elif hidden.is_cuda:
            logits = linear(self.norm.fused(hidden), self.head_weight)
        else:
            logits = F.linear(self.norm(hidden), self.head_weight)
        return self._scaled_logits(logits)

    def _scaled_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Scale and cap ``logits`` in place, as the family does."""
        if self.config.logit_scale != 1.0:
            logits = logits.mul_(self.config.logit_scale)
        cap = self.config.logit_soft_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    @property
    def head_weight(self) -> torch.Tensor:
        return (self.embed_tokens if self.lm_head is None else self.lm_head).weight

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Every tensor that a checkpoint of this model must have, and its destination."""
        rows = WeightRows.whole(self.config)
        reorders = len(self.config.rotary.head_rows) > 1
        for slot in self._own_slots():
            yield rows.place(slot) if reorders else slot

    def linear_slots(self) -> Iterator[tuple[nn.Linear, list[WeightSlot]]]:
        """The linears of all layers, each with its tensors, as in ``weight_slots``."""
        rows = WeightRows.whole(self.config)
        reorders = len(self.config.rotary.head_rows) > 1
        for index, layer in enumerate(self.decoder_layers()):
            for module, slots in layer.linear_slots(f"model.layers.{index}"):
                yield module, [rows.place(slot) if reorders else slot for slot in slots]

    def spellings(self, name: str) -> list[str]:
        """The names that an adapter may have for ``name`` of ``linear_slots``."""
        return [name]

    def _own_slots(self) -> Iterator[WeightSlot]:
        """The same for a model that has all weights of the checkpoint."""
        yield _vocabulary_slot("model.embed_tokens.weight", self.embed_tokens.weight)
        for index, layer in enumerate(self.decoder_layers()):
            yield from layer.weight_slots(f"model.layers.{index}")
        yield from norm_slots("model.norm", self.norm)
        if self.lm_head is not None:
            yield _vocabulary_slot("lm_head.weight", self.lm_head.weight)

    def ignored_names(self) -> list[str]:
        """Tensors that a checkpoint may have in addition to ``weight_slots``, as in its check."""
        unused = [f"model.layers.{number}." for number in self.config.unused_layers]
        elsewhere = [
            name
            for layer in self.decoder_layers()
            if layer.mixture is not None
            for name in layer.mixture.ignored_names(f"model.layers.{layer.spec.layer}")
        ]
        return unused + elsewhere

    @contextmanager
    def few_layers(self) -> Iterator[None]:
        """Keep two layers of each kind, because the first layer has no partial sums to add."""
        whole, kinds = self.layers, dict[tuple[AttentionSpec, bool], list[DecoderLayer]]()
        for layer in self.decoder_layers():
            kind = replace(layer.spec, layer=0), layer.mixture is None
            kinds.setdefault(kind, []).append(layer)
        self.layers = nn.ModuleList(layer for like in kinds.values() for layer in like[:2])
        try:
            yield
        finally:
            self.layers = whole

    def decoder_layers(self) -> Iterator[DecoderLayer]:
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer


def _checked_max_position(config: DecoderConfig, asked: int | None) -> int:
    if asked is None:
        return config.max_position
    if not 1 <= asked <= config.max_position:
        raise ConfigError(
            f"the longest sequence was set to {asked} tokens, but this model supports 1 to "
            f"{config.max_position}; choose a length in that range"
        )
    return asked


def _table_name(number: int) -> str:
    return f"rotary_table_{number}" if number else "rotary_table"


def _vocabulary_slot(name: str, parameter: torch.Tensor) -> WeightSlot:
    return WeightSlot(name, parameter.detach(), parameter.shape, roles=("vocabulary",))
