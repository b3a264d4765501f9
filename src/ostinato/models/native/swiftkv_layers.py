"""The late layers of a SwiftKV model: those that run only for tokens whose logits are wanted.

Their weights are those of plain layers, in other roles: the same projections, of which the queries'
reads the layer's own input, and the keys' and values' the hidden state before all late layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from ostinato.attention.base import AttentionSpec, attend
from ostinato.attention.rotation import angles_at, rotate
from ostinato.attention.selected import SelectedTokens, attend_selected, select_tokens
from ostinato.attention.store import store_kv
from ostinato.graphs.capture.context import get_forward_context
from ostinato.models.native.decoder import DecoderLayer
from ostinato.models.native.decoder_config import DecoderConfig
from ostinato.models.native.exchange import ALONE, Exchange
from ostinato.models.native.norm import RMSNorm
from ostinato.models.native.swiftkv_config import SwiftKVConfig
from ostinato.models.weight_slot import WeightSlot
from ostinato.ops.linear import Norm, linear

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_NORM = "model.norm_swiftkv.weight"


class LateLayer(DecoderLayer):
    """One block after the early ones. ``source`` is always their normed hidden state."""

    def keys_values(
        self, source: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys, and values, of all tokens: [T, num_kv_heads, head_dim] each."""
        num_heads, num_kv_heads = self._head_counts
        _, (weight, bias) = self._projections()
        key, value = self._heads(F.linear(source, weight, bias)).split(num_kv_heads, dim=1)
        return self._turn(key, slice(num_heads, None), cos, signed_sin), value

    def forward_plain(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
        attention: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """The block for any tokens; ``attention`` mixes their rotated queries."""
        (weight, bias), _ = self._projections()
        query = self._heads(F.linear(self.input_norm(hidden), weight, bias))
        mixed = attention(self._turn(query, slice(self._head_counts[0]), cos, signed_sin))
        hidden = hidden + self.exchange.sum(self.o_proj(mixed.flatten(1)))
        gate, up = self.gate_up_proj(self.post_attention_norm(hidden)).chunk(2, dim=-1)
        return hidden + self.exchange.sum(self.down_proj(F.silu(gate) * up))

    def forward_fused(
        self,
        hidden: torch.Tensor,
        source: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
    ) -> torch.Tensor:
        """The block for all tokens on one device, in few operators."""

        def norm(module: RMSNorm) -> Norm:
            return Norm(module.weight, module.eps)

        queries, keys_values = self._projections()
        qkv = torch.cat(
            (linear(hidden, *queries, norm=norm(self.input_norm)), linear(source, *keys_values)),
            dim=1,
        )
        mixed = self._mix(qkv, positions, table)
        hidden = linear(mixed, self.o_proj.weight, self.o_proj.bias, residual=hidden)
        up, down = self.gate_up_proj, self.down_proj
        gated = linear(hidden, up.weight, up.bias, norm=norm(self.post_attention_norm), gated=True)
        return linear(gated, down.weight, down.bias, residual=hidden)

    def _projections(self) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Weight and bias of the queries', then of the keys' and values' projection: views."""
        boundary = self._head_counts[0] * self.spec.head_dim
        weight, bias = self.qkv_proj.weight, self.qkv_proj.bias
        for part in (slice(boundary), slice(boundary, None)):
            yield weight[part], None if bias is None else bias[part]

    def _heads(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(rows.shape[0], -1, self.spec.head_dim)

    def _turn(
        self, heads: torch.Tensor, part: slice, cos: torch.Tensor, signed_sin: torch.Tensor
    ) -> torch.Tensor:
        if self.qk_norm is not None:
            normed = F.rms_norm(heads, (self.spec.head_dim,), eps=self.qk_norm.eps)
            heads = normed * self.qk_norm.weight[part]
        return rotate(heads, cos, signed_sin)


class LateLayers(nn.Module):
    """The late layers and the norm before their keys and values. At least one layer.

    ``decoder`` is the config of the part of the model that is here: all of it, or a rank's.
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
        first = next(self.late_layers())
        self.norm_swiftkv = (
            RMSNorm((decoder.hidden_size,), decoder.rms_norm_eps, device=device, dtype=dtype)
            if config.trained
            else first.input_norm  # one module in two roles, so that it is loaded once
        )

    @property
    def attention_specs(self) -> list[AttentionSpec]:
        return [layer.spec for layer in self.late_layers()]

    def late_layers(self) -> Iterator[LateLayer]:
        for layer in self.layers:
            assert isinstance(layer, LateLayer)
            yield layer

    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        """States after the last layer for selected tokens; the others keep their ``hidden``.

        ``hidden`` [T, hidden_size]: after the early layers, of all tokens of the batch. ``table``
        is the model's table of angles. Keys and values of all tokens are in the cache afterwards.
        """
        source = self.norm_swiftkv(hidden)
        # A compiler cannot see the context. All tokens include those that are selected.
        selected = (
            None
            if torch.compiler.is_compiling()
            else select_tokens(get_forward_context().attn_metadata, hidden.shape[0])
        )
        if selected is not None:
            return self._forward_selected(hidden, source, positions, table, selected)
        if self._fused and not torch.compiler.is_compiling():
            for layer in self.late_layers():
                hidden = layer.forward_fused(hidden, source, positions, table)
            return hidden
        angles = angles_at(table, positions, self.dtype)
        for layer in self.late_layers():
            key, value = layer.keys_values(source, *angles)
            attention = partial(attend, layer.spec, key=key, value=value)
            hidden = layer.forward_plain(hidden, *angles, attention)
        return hidden

    def _forward_selected(
        self,
        hidden: torch.Tensor,
        source: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        selected: SelectedTokens,
    ) -> torch.Tensor:
        cos, signed_sin = angles_at(table, positions, self.dtype)
        for layer in self.late_layers():  # one after another: all at once would take memory
            store_kv(layer.spec, *layer.keys_values(source, cos, signed_sin))
        rows, cos, signed_sin = (selected.of(tensor) for tensor in (hidden, cos, signed_sin))
        for layer in self.late_layers():
            attention = partial(attend_selected, layer.spec, selected=selected)
            rows = layer.forward_plain(rows, cos, signed_sin, attention)
        return selected.put_back(rows, hidden)

    def plain_slots(self) -> Iterator[WeightSlot]:
        """The layers' tensors as a plain decoder's checkpoint names them."""
        for layer in self.late_layers():
            yield from layer.weight_slots(f"model.layers.{layer.spec.layer}")

    def named_slots(self, plain: Iterable[WeightSlot]) -> Iterator[WeightSlot]:
        """``plain``, or a rank's part of it, by the names in this model's checkpoint."""
        if not self._trained:
            yield from plain
            return
        for slot in plain:
            yield slot._replace(name=_trained_name(slot.name))
        weight = self.norm_swiftkv.weight.detach()
        yield WeightSlot(_NORM, weight, weight.shape)

    def ignored_names(self) -> list[str]:
        """Tensors that a checkpoint may have and that are not used: the teacher's projections."""
        names = [slot.name for slot in self.plain_slots()] if self._trained else []
        return [name for name in names if _trained_name(name) != name]


def _trained_name(plain: str) -> str:
    """What a plain decoder's tensor of a late layer is called in a SwiftKV checkpoint."""
    module, _, kind = plain.rpartition(".")
    return f"{module}_swiftkv.{kind}" if module.endswith(_PROJECTIONS) else plain
