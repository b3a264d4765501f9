"""The late layers of a SwiftKV model, which run only for tokens that need logits.

They have the same weights as plain layers: the query projection reads the layer's input, while the
key and value projections read the hidden state before all late layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ostinato.attention.base import AttentionSpec
from ostinato.attention.selected import SelectedTokens, attend_selected, select_tokens
from ostinato.attention.store import store_kv
from ostinato.graphs.capture.context import get_forward_context
from ostinato.models.native.config.decoder_config import DecoderConfig
from ostinato.models.native.exchange import ALONE, Exchange
from ostinato.models.native.fused_kernels import SmallM
from ostinato.models.native.layer import DecoderLayer, empty_norm, norm_slots, run_layers
from ostinato.models.native.layer_kernels import AnyKernels, AnyNorm, AttentionLayer, Plain
from ostinato.models.native.swiftkv.config import SwiftKVConfig
from ostinato.models.weight_slot import WeightSlot

_NORM = "model.norm_swiftkv"


class _Projection(NamedTuple):
    """Rows of a linear module."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class LateLayer(DecoderLayer):
    """A late layer: its keys and values come from ``source``, not from its input.

    ``source`` is the normed state after the early layers, the same for all late ones. A strategy
    without one is for tokens whose keys and values are already in the cache.
    """

    def qkv(self, x: Any, run: AnyKernels) -> torch.Tensor:
        queries, keys_values = self._projections()
        query = run.project(queries, x)
        if run.source is None:
            return query
        return torch.cat((query, run.project(keys_values, run.source)), dim=1)

    def store(self, source: torch.Tensor, run: Plain) -> None:
        """Write the keys and values of all tokens to the cache."""
        num_heads, num_kv_heads = self.head_counts
        _, projection = self._projections()
        heads = run.project(projection, source).unflatten(-1, (-1, self.spec.head_dim))
        key, value = heads.split(num_kv_heads, dim=1)
        store_kv(self.spec, run.rotated(self, key, slice(num_heads, None)), value)

    def _projections(self) -> tuple[_Projection, _Projection]:
        """Views of the projections: queries, then keys and values."""
        boundary = self.head_counts[0] * self.spec.head_dim
        weight, bias = self.qkv_proj.weight, self.qkv_proj.bias
        parts = (slice(boundary), slice(boundary, None))
        first, second = (_Projection(weight[p], None if bias is None else bias[p]) for p in parts)
        return first, second


class _Selected(Plain):
    """For selected tokens, whose keys and values are in the cache."""

    def __init__(self, every: Plain, selected: SelectedTokens) -> None:
        self._angles = [(selected.of(cos), selected.of(sin)) for cos, sin in every._angles]
        self._selected = selected

    def attend(self, layer: AttentionLayer, qkv: torch.Tensor) -> torch.Tensor:
        heads = qkv.unflatten(-1, (-1, layer.spec.head_dim))  # of queries alone
        query = self.rotated(layer, heads, slice(layer.head_counts[0]))
        return attend_selected(layer.spec, query, self._selected).flatten(1)


class LateLayers(nn.Module):
    """The late layers and the norm before their keys and values. At least one layer.

    ``decoder`` is the config of this part of the model: all of it, or a rank's.
    """

    def __init__(
        self,
        config: SwiftKVConfig,
        decoder: DecoderConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        exchange: Exchange = ALONE,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self._fused = device.type == "cuda" and exchange is ALONE
        self._trained = config.trained
        self.layers = nn.ModuleList(
            LateLayer(decoder, index, device=device, dtype=dtype, exchange=exchange)
            for index in config.late_layers
        )
        first = next(self.late_layers()).attention_norm
        assert first is not None, "checked by SwiftKVConfig"
        self.norm_swiftkv: AnyNorm = (
            empty_norm(decoder, decoder.hidden_size, device=device, dtype=dtype)
            if config.trained
            else first  # one module in two roles, loaded once
        )

    @property
    def attention_specs(self) -> list[AttentionSpec]:
        return [layer.spec for layer in self.late_layers()]

    def late_layers(self) -> Iterator[LateLayer]:
        for layer in self.layers:
            assert isinstance(layer, LateLayer)
            yield layer

    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor, tables: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """States after the last layer for selected tokens; the others keep their ``hidden``.

        ``hidden`` [T, hidden_size]: states of all tokens after the early layers. ``tables``: the
        model's RoPE tables. Afterwards the keys and values of all tokens are in the cache.
        """
        source = self.norm_swiftkv(hidden)
        # A compiler cannot see the context, so all tokens run, including the selected ones.
        selected = (
            None
            if torch.compiler.is_compiling()
            else select_tokens(get_forward_context().attn_metadata, hidden.shape[0])
        )
        if selected is None:
            run: AnyKernels = self._kernels(positions, tables)
            run.source = source
            return run_layers(self.late_layers(), hidden, run)
        every = Plain(tables, positions, self.dtype)
        for layer in self.late_layers():  # one at a time, to save memory
            layer.store(source, every)
        rows = selected.of(hidden)
        rows = run_layers(self.late_layers(), rows, _Selected(every, selected))
        return selected.put_back(rows, hidden)

    def _kernels(self, positions: torch.Tensor, tables: Sequence[torch.Tensor]) -> AnyKernels:
        if self._fused and not torch.compiler.is_compiling():
            return SmallM(tables, positions)
        return Plain(tables, positions, self.dtype)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """The layers' tensors by the names in the model's checkpoint."""
        for slot in self._plain_slots():
            yield slot._replace(name=_trained_name(slot)) if self._trained else slot
        if self._trained:
            yield from norm_slots(_NORM, self.norm_swiftkv)

    def ignored_names(self) -> list[str]:
        """Tensors that a checkpoint may have and that are not used: the teacher's projections."""
        slots = self._plain_slots() if self._trained else ()
        return [slot.name for slot in slots if _trained_name(slot) != slot.name]

    def _plain_slots(self) -> Iterator[WeightSlot]:
        """The same by the names in a plain decoder's checkpoint."""
        for layer in self.late_layers():
            yield from layer.weight_slots(f"model.layers.{layer.spec.layer}")


def _trained_name(slot: WeightSlot) -> str:
    """The SwiftKV checkpoint's name for a plain decoder's tensor of a late layer."""
    module, _, kind = slot.name.rpartition(".")
    own = slot.roles and {"query", "key", "value"}.issuperset(slot.roles)
    return f"{module}_swiftkv.{kind}" if own else slot.name
