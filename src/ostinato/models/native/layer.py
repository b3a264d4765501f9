"""One transformer layer: what it computes, written once.

The strategy (``layer_kernels.py``) decides which kernels run it, and what they fuse; the exchange
(``exchange.py``) communicates between ranks inside it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import nn

from ostinato.attention.base import AttentionSpec
from ostinato.graphs.capture.pool import WeightOffloader
from ostinato.models.native.config.decoder_config import DecoderConfig
from ostinato.models.native.exchange import ALONE, Exchange
from ostinato.models.native.latent_attention import LatentAttention
from ostinato.models.native.layer_kernels import AnyKernels, AnyNorm, Linear
from ostinato.models.native.mixture import MixtureOfExperts
from ostinato.models.native.norms.layer_norm import LayerNorm
from ostinato.models.native.norms.rms_norm import RMSNorm
from ostinato.models.weight_slot import Role, WeightSlot


class DecoderLayer(nn.Module):
    """Attention, then an MLP or a mixture of them, each added to the residual stream.

    In a ``parallel`` family both read the same norm.

    There is a norm before each (pre-norm), after each (post-norm), or both, as the family's names
    say (``families.py``). A norm that does not exist is None. A layer with a ``mixture`` of experts
    has neither ``gate_up_proj`` nor ``down_proj``. ``latent``: its attention is latent; the two
    GEMMs around it are the layer's.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        exchange: Exchange = ALONE,
    ) -> None:
        super().__init__()
        self.exchange = exchange
        self.head_counts = (config.num_heads, config.num_kv_heads)
        self.rms_norm_eps = config.rms_norm_eps
        self.rotary_table = config.rotary_number(layer)
        self._config = config
        self._activation = config.activation
        self._residual_scale = config.residual_scale
        hidden, width = config.hidden_size, config.intermediate_size
        queries = config.num_heads * config.head_dim
        keys = config.num_kv_heads * config.head_dim

        def linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
            return empty_linear(inputs, outputs, bias=bias, device=device, dtype=dtype)

        def norm(there: object, *shape: int) -> Any:
            return empty_norm(config, *shape, device=device, dtype=dtype) if there else None

        names, full = config.names, config.qk_norm == "full"
        self.attention_norm = norm(names.attention_norm, hidden)
        self.latent: LatentAttention | None = None
        first, last = queries + 2 * keys, queries
        if config.latent is None:
            self.spec = _attention_spec(config, layer)
        else:
            self.latent = LatentAttention(
                config,
                device=device,
                dtype=dtype,
                linear=lambda inputs, outputs: linear(inputs, outputs, False),
            )
            self.spec = self.latent.spec(layer)
            first = self.latent.first_width + config.latent.row_dim
            last = config.num_heads * config.latent.v_head_dim
        self.qkv_proj = linear(hidden, first, config.qkv_bias)
        self.qk_norm = norm(config.qk_norm == "head", sum(self.head_counts), config.head_dim)
        self.query_norm, self.key_norm = norm(full, queries), norm(full, keys)
        self.sinks: nn.Parameter | None = None
        if config.sinks:
            sinks = torch.empty(config.num_heads, device=device, dtype=dtype)
            self.sinks = nn.Parameter(sinks, requires_grad=False)
        self.o_proj = linear(last, hidden, config.output_bias)
        self.attention_output_norm = norm(names.attention_output_norm, hidden)
        self.mlp_norm = norm(names.mlp_norm, hidden)
        self.mixture: MixtureOfExperts | None = None
        if config.experts is not None and layer in config.experts.layers:
            self.mixture = MixtureOfExperts(
                config.experts,
                hidden,
                device=device,
                dtype=dtype,
                linear=lambda inputs, outputs: linear(inputs, outputs, False),
            )
        else:
            # Without a gate, only what is called up.
            self.gate_up_proj = linear(hidden, (1 + config.gated) * width, config.mlp_bias)
            self.down_proj = linear(width, hidden, config.mlp_bias)
        self.mlp_output_norm = norm(names.mlp_output_norm, hidden)

    def forward(
        self, x: Any, residual: torch.Tensor | None, run: AnyKernels
    ) -> tuple[Any, torch.Tensor]:
        """``x``: the value still to be added to the residual stream; at first, all of it.

        Returns the same for the next layer. Only ``run`` knows the form of ``x``.
        """
        x, residual = run.norm(self.attention_norm, x, residual)
        if self._config.parallel:
            residual = run.add(self.attention(x, run), residual)
            return self.mlp(x, run), residual
        x = self.attention(x, run)
        x, residual = run.norm(self.mlp_norm, x, residual)
        x = self.mlp(x, run)
        return x, residual

    def attention(self, x: Any, run: AnyKernels) -> Any:
        if self.latent is None:
            mixed = run.attend(self, self.qkv(x, run))
        else:
            mixed = self.latent(run.project(self.qkv_proj, x), self, run)
        return self._output(self.o_proj, mixed, self.attention_output_norm, run)

    def mlp(self, x: Any, run: AnyKernels) -> Any:
        if self.mixture is not None:
            return self._experts(self.mixture, x, run)
        widen = run.gated if self._config.gated else run.activated
        x = widen(self.gate_up_proj, x, self._activation)
        return self._output(self.down_proj, x, self.mlp_output_norm, run)

    def _experts(self, mixture: MixtureOfExperts, x: Any, run: AnyKernels) -> Any:
        shared, exchange = self._shared(mixture, x, run), self.exchange
        if exchange.gathers:
            own = run.normed(x)
            assert run.slots is not None, "those of all tokens"
            y = run.own_experts(mixture, exchange.tokens_of_all(own, run.slots))
            delta = run.total(exchange.own_tokens(y, own.shape[0]), shared)
        else:
            delta = run.experts(mixture, x, shared)
        return exchange.sum(run.add(delta, None)) if exchange.sums else delta

    def _shared(self, mixture: MixtureOfExperts, x: Any, run: AnyKernels) -> torch.Tensor | None:
        """The output of the expert that runs for every token, if there is one."""
        if mixture.shared_gate_up is None or mixture.shared_down is None:
            return None
        inner = run.gated(mixture.shared_gate_up, x, self._activation)
        y = run.project(mixture.shared_down, inner)
        if mixture.shared_gate is None:
            return y
        return run.project(mixture.shared_gate, x).sigmoid() * y

    @property
    def own_sinks(self) -> torch.Tensor | None:
        """The sinks of the heads that attention has on this rank."""
        return None if self.sinks is None else self.exchange.own_heads(self.sinks)

    def qkv(self, x: Any, run: AnyKernels) -> torch.Tensor:
        qkv = run.project(self.qkv_proj, x)
        if self.query_norm is None or self.key_norm is None:
            return qkv
        queries, keys = self.query_norm.weight.shape[0], self.key_norm.weight.shape[0]
        query, key, value = qkv.split((queries, keys, keys), dim=1)
        if self.exchange.sums:
            query, key = self._norm_over_ranks((self.query_norm, query), (self.key_norm, key))
        else:
            query = run.output_norm(self.query_norm, query)
            key = run.output_norm(self.key_norm, key)
        return torch.cat((query, key, value), dim=1)

    def _norm_over_ranks(self, *parts: tuple[RMSNorm, torch.Tensor]) -> Iterator[torch.Tensor]:
        """Norms over the heads of all ranks, of which each has as many; one all-reduce for all.

        A head that several ranks have counts as often as any other, so the mean is the same.
        """
        squares = torch.stack([x.float().square().mean(1) for _, x in parts])
        for (norm, x), square in zip(parts, self.exchange.mean(squares), strict=True):
            normed = (x.float() * (square + norm.eps).rsqrt().unsqueeze(1)).to(x.dtype)
            yield (normed.to(norm.weight.dtype) * norm.weight).to(x.dtype)

    def _output(
        self, projection: Linear, x: torch.Tensor, norm: AnyNorm | None, run: AnyKernels
    ) -> Any:
        """The value that a sublayer adds to the residual stream."""
        if self._residual_scale != 1.0:
            x = self.exchange.sum(run.project(projection, x))
            return (x if norm is None else run.output_norm(norm, x)) * self._residual_scale
        delta: Any = (
            self.exchange.sum(run.project(projection, x))
            if self.exchange.sums
            else run.output(projection, x)
        )
        return delta if norm is None else run.delta_norm(norm, delta)

    def linear_slots(self, prefix: str) -> Iterator[tuple[nn.Linear, list[WeightSlot]]]:
        """The layer's linears, each with its tensors by their checkpoint names."""
        names, head_dim = self._config.names, self._config.head_dim
        queries, keys = (count * head_dim for count in self.head_counts)
        hidden = self.o_proj.out_features
        linears: list[tuple[nn.Linear, list[_RowRange]]] = []
        if self.latent is None:
            parts: list[_RowRange] = [
                (names.query, "query", queries),
                (names.key, "key", keys),
                (names.value, "value", keys),
            ]
            linears.append((self.qkv_proj, parts))
        else:
            yield self.qkv_proj, list(self.latent.first_slots(prefix, self.qkv_proj))
        linears.append((self.o_proj, [(names.output, "output", hidden)]))
        if self.mixture is None:
            width = self.down_proj.in_features
            widened: list[_RowRange] = [(names.gate, "gate", width), (names.up, "up", width)]
            linears += [
                (self.gate_up_proj, widened if self._config.gated else widened[1:]),
                (self.down_proj, [(names.down, "down", hidden)]),
            ]
        for linear, row_ranges in linears:
            yield linear, list(_linear_slots(prefix, linear, row_ranges))

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """The layer's tensors by their checkpoint names."""
        names, head_dim = self._config.names, self._config.head_dim
        for _, slots in self.linear_slots(prefix):
            yield from slots
        if self.latent is not None:
            yield from self.latent.weight_slots(prefix)
        if self.mixture is not None:
            yield from self.mixture.weight_slots(prefix)
        if self.sinks is not None:
            sinks = self.sinks.detach()
            yield WeightSlot(f"{prefix}.{names.sinks}", sinks, sinks.shape, roles=("sinks",))
        norms: tuple[tuple[str | None, AnyNorm | None, tuple[Role, ...]], ...] = (
            (names.attention_norm, self.attention_norm, ()),
            (names.attention_output_norm, self.attention_output_norm, ()),
            (names.mlp_norm, self.mlp_norm, ()),
            (names.mlp_output_norm, self.mlp_output_norm, ()),
            (names.query_norm, self.query_norm, ("query",)),
            (names.key_norm, self.key_norm, ("key",)),
        )
        for name, norm, roles in norms:
            if norm is not None:
                yield from norm_slots(f"{prefix}.{name}", norm, roles)
        if self.qk_norm is not None:  # one weight, repeated for each head
            per_head = self.qk_norm.weight.detach().split(self.head_counts)
            rotary = self._config.rotary
            # In the order of the rows that it norms.
            parts = rotary.head_rows if rotary.interleaved or rotary.num_fixed else None
            for name, target in zip((names.query_norm, names.key_norm), per_head, strict=True):
                shape = torch.Size([head_dim])
                offset = self.qk_norm.offset
                name = f"{prefix}.{name}.weight"
                yield WeightSlot(name, target, shape, parts=parts, offset=offset)


class LayerOffloader(WeightOffloader, Protocol):
    """Keeps the weights of some layers in host memory."""

    def place(self, layer: DecoderLayer) -> None:
        """Take a new layer's parameters off the device, if it is one of these."""

    def over(self, layers: Iterable[DecoderLayer]) -> Generator[DecoderLayer, None, None]:
        """The layers in order, each with its weights in place until the next one is asked for."""


_RowRange = tuple[str, Role, int]  # of a fused linear: the name of its tensor, its role, its rows


def run_layers(
    layers: Iterable[DecoderLayer],
    hidden: torch.Tensor,
    run: AnyKernels,
    aux: Mapping[int, torch.Tensor] | None = None,
    *,
    weights_leave: bool = False,
) -> torch.Tensor:
    """Run ``hidden`` through ``layers``; copy the input of those in ``aux`` there.

    ``weights_leave``: a layer's weights are gone when the next one runs.
    """
    stream: list[Any] = [hidden, None]
    for layer in layers:  # handed over, not kept here: a layer's values end with their last reader
        if aux and layer.spec.layer in aux:
            hidden = run.add(*stream)
            aux[layer.spec.layer][: hidden.shape[0]].copy_(hidden)
            stream = [hidden, None]
        stream += layer.forward(stream.pop(0), stream.pop(0), run)
        if weights_leave:
            stream += run.finish(stream.pop(0), stream.pop(0))
    return run.add(*stream)


class _EmptyLinear(nn.Linear):
    """Skips initialisation. torch's skip_init runs it on ``meta``, which imports all of Dynamo."""

    def reset_parameters(self) -> None:
        pass


def empty_linear(
    inputs: int, outputs: int, *, bias: bool, device: torch.device, dtype: torch.dtype
) -> nn.Linear:
    """An uninitialised linear module."""
    linear = _EmptyLinear(inputs, outputs, bias=bias, device=device, dtype=dtype)
    linear = linear.requires_grad_(False)
    if device.type == "cpu" and outputs >= inputs:
        # The CPU reads it fastest with the longer dimension contiguous: up to a quarter less time
        # for small batches. Only the strides differ.
        linear.weight.data = torch.empty(inputs, outputs, device=device, dtype=dtype).T
    return linear


def empty_norm(
    config: DecoderConfig, *shape: int, device: torch.device, dtype: torch.dtype
) -> AnyNorm:
    """An uninitialised norm; its weight is float32 if the family adds an offset to it."""
    dtype = torch.float32 if config.norm_offset else dtype
    eps = config.rms_norm_eps
    norm: AnyNorm = (
        LayerNorm(shape, eps, bias=config.norm_bias, device=device, dtype=dtype)
        if config.layer_norm
        else RMSNorm(shape, eps, device=device, dtype=dtype)
    )
    norm.offset = config.norm_offset
    return norm


def norm_slots(name: str, norm: AnyNorm, roles: tuple[Role, ...] = ()) -> Iterator[WeightSlot]:
    """The tensors of the norm called ``name``, which are whole on every rank without ``roles``."""
    weight = norm.weight.detach()
    yield WeightSlot(f"{name}.weight", weight, weight.shape, offset=norm.offset, roles=roles)
    if isinstance(norm, LayerNorm) and norm.bias is not None:
        bias = norm.bias.detach()
        yield WeightSlot(f"{name}.bias", bias, bias.shape)


def _attention_spec(config: DecoderConfig, layer: int) -> AttentionSpec:
    return AttentionSpec(
        layer=layer,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        value_dim=config.head_dim,
        scale=config.attention_scale or config.head_dim**-0.5,
        window=config.windows[layer],
        soft_cap=config.attention_soft_cap,
    )


def _linear_slots(
    prefix: str, linear: nn.Linear, row_ranges: Iterable[_RowRange]
) -> Iterator[WeightSlot]:
    """The tensors that make up a linear, in the order of ``row_ranges``."""
    start = 0
    for name, group in groupby(row_ranges, key=itemgetter(0)):
        _, roles, sizes = zip(*group, strict=True)
        rows = slice(start, start + sum(sizes))
        for kind, parameter in (("weight", linear.weight), ("bias", linear.bias)):
            if parameter is not None:
                target = parameter.detach()[rows]
                slot = WeightSlot(f"{prefix}.{name}.{kind}", target, target.shape, roles=roles)
                yield slot
        start = rows.stop
