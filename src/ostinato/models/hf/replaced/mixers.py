"""Our forward of transformers' recurrent layers ("mixers"), over a flat row of tokens.

transformers' own takes one sequence per row and keeps its state in a cache object. Ours reads the
same weights, and leaves everything between the projections to ``recur``, which knows the requests
and their states. ``check_mixers`` compares the two when a model is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ostinato.errors import ConfigError
from ostinato.recurrent.base import RecurrentBatch, RecurrentSpec, recur
from ostinato.recurrent.causal_conv import causal_conv
from ostinato.recurrent.scan import Tokens, advance

_NORM_EPSILON = 1e-6  # of the delta rule's queries and keys
_CHECKED_CHUNK_SIZE = 16
_NO_LIMIT = (0.0, float("inf"))


class Mixer(ABC):
    """Replaces the forward of ``module``, the ``index``-th recurrent layer, whose weights it reads.

    It is a ``RecurrentLayer``.
    """

    spec: RecurrentSpec

    def __init__(self, module: Any, index: int) -> None:
        self.module = module

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """[1, T, hidden] -> [1, T, hidden]; caches and masks are ignored."""
        return self.mix(hidden_states.squeeze(0)).unsqueeze(0)

    @abstractmethod
    def mix(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]"""

    @abstractmethod
    def run(self, batch: RecurrentBatch, inputs: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """As in ``RecurrentLayer``."""

    def convolve(
        self, batch: RecurrentBatch, inputs: torch.Tensor, conv: nn.Conv1d
    ) -> torch.Tensor:
        """The layer's convolution of ``inputs`` [T, channels], in float32."""
        state = batch.states[self.spec.layer].window
        return causal_conv(batch, state, inputs, conv.weight.squeeze(1), conv.bias)

    def matrices(self, batch: RecurrentBatch) -> torch.Tensor:
        """The layer's matrices of all rows."""
        state = batch.states[self.spec.layer].matrix
        assert state is not None, "its spec has one"
        return state


class ShortConv(Mixer):
    """LFM2's: a convolution between two gates."""

    def __init__(self, module: Any, index: int) -> None:
        super().__init__(module, index)
        conv = module.conv
        self.spec = RecurrentSpec(layer=index, window=(conv.kernel_size[0] - 1, conv.out_channels))

    def mix(self, hidden: torch.Tensor) -> torch.Tensor:
        before, after, x = self.module.in_proj(hidden).chunk(3, dim=-1)
        x = before * x
        convolved = recur(self, [x], torch.empty_like(x))
        out: torch.Tensor = self.module.out_proj(after * convolved)
        return out

    def run(self, batch: RecurrentBatch, inputs: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        out.copy_(self.convolve(batch, inputs[0], self.module.conv))


class GatedDeltaNet(Mixer):
    """Qwen3-Next's: a convolution, then the gated delta rule, then a gated norm."""

    def __init__(self, module: Any, index: int) -> None:
        super().__init__(module, index)
        self.spec = RecurrentSpec(
            layer=index,
            window=(module.conv_kernel_size - 1, module.conv_dim),
            matrix=(module.num_v_heads, module.head_k_dim, module.head_v_dim),
        )
        _check_activation(module)

    def mix(self, hidden: torch.Tensor) -> torch.Tensor:
        module, num_tokens = self.module, hidden.shape[0]
        qkv, gate, learn, time_step = self.project(hidden)
        log_decay = -module.A_log.float().exp() * F.softplus(time_step.float() + module.dt_bias)
        shape = (num_tokens, module.num_v_heads, module.head_v_dim)
        read = recur(self, [qkv, log_decay, learn.sigmoid()], hidden.new_empty(shape))
        normed = module.norm(read.flatten(0, 1), gate.reshape(-1, module.head_v_dim))
        out: torch.Tensor = module.out_proj(normed.view(num_tokens, -1))
        return out

    def project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values in one; the gate; what becomes beta and the decay."""
        module, num_tokens = self.module, hidden.shape[0]
        # Interleaved by key head, each with the value heads that share it.
        heads, shared = module.num_k_heads, module.num_v_heads // module.num_k_heads
        qkvz = module.in_proj_qkvz(hidden).view(num_tokens, heads, -1)
        values = shared * module.head_v_dim
        *qkv, gate = qkvz.split([module.head_k_dim, module.head_k_dim, values, values], dim=-1)
        ba = module.in_proj_ba(hidden).view(num_tokens, heads, 2, shared)
        learn, time_step = (each.flatten(1) for each in ba.unbind(2))
        return torch.cat([each.flatten(1) for each in qkv], dim=-1), gate, learn, time_step

    def run(self, batch: RecurrentBatch, inputs: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        module = self.module
        qkv, log_decay, beta = inputs
        mixed = F.silu(self.convolve(batch, qkv, module.conv1d))
        query, key, value = mixed.split([module.key_dim, module.key_dim, module.value_dim], dim=-1)
        query, key = (
            _normalized(each.view(len(each), module.num_k_heads, -1)) for each in (query, key)
        )
        query = query * module.head_k_dim**-0.5
        tokens = Tokens(query, key, value.view(out.shape), log_decay, beta.float())
        advance(batch, self.matrices(batch), tokens, out)


class SplitGatedDeltaNet(GatedDeltaNet):
    """Qwen3.5's: Qwen3-Next's with a projection for each part."""

    def project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        module = self.module
        projections = (module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a)
        return tuple(projection(hidden) for projection in projections)


class Mamba2(Mixer):
    """Mamba-2's, and that of Bamba and Granite 4: a convolution, then SSD, then a gated norm."""

    def __init__(self, module: Any, index: int) -> None:
        super().__init__(module, index)
        self.spec = RecurrentSpec(
            layer=index,
            window=(module.conv_kernel_size - 1, module.conv_dim),
            matrix=(module.num_heads, module.ssm_state_size, module.head_dim),
        )
        _check_activation(module)
        # Of transformers' own forward, which only ``check_mixers`` runs: its memory grows with it.
        module.chunk_size = min(module.chunk_size, _CHECKED_CHUNK_SIZE)
        least, most = module.time_step_limit or _NO_LIMIT
        if least > 0 or most != _NO_LIMIT[1]:
            raise ConfigError(
                f"{type(module).__name__} has the time_step_limit ({least}, {most}), which "
                "transformers applies to prompts and not to generated tokens; only (0, inf) can "
                "be run"
            )

    def mix(self, hidden: torch.Tensor) -> torch.Tensor:
        module = self.module
        sizes = [module.intermediate_size, module.conv_dim, module.num_heads]
        gate, conv_inputs, time_step = self.project(hidden).split(sizes, dim=-1)
        read = recur(self, [conv_inputs, time_step], torch.empty_like(gate))
        out: torch.Tensor = module.out_proj(self.gate(read, gate).to(hidden.dtype))
        return out

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.module.in_proj(hidden)
        return projected

    def gate(self, read: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        gated: torch.Tensor = self.module.norm(read, gate)
        return gated

    def run(self, batch: RecurrentBatch, inputs: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        module = self.module
        conv_inputs, time_step = inputs
        groups = module.n_groups * module.ssm_state_size
        convolved = F.silu(self.convolve(batch, conv_inputs, module.conv1d))
        x, b, c = convolved.split([module.intermediate_size, groups, groups], dim=-1)
        x = x.view(len(x), module.num_heads, module.head_dim)
        b, c = (each.view(len(each), module.n_groups, -1) for each in (b, c))
        step = F.softplus(time_step.float() + module.dt_bias.float())
        log_decay = step * -module.A_log.float().exp()
        read = x.new_empty(x.shape)
        tokens = Tokens(c, b, x * step.unsqueeze(-1), log_decay, None)
        advance(batch, self.matrices(batch), tokens, read)
        out.copy_(read.addcmul_(x, module.D.float().unsqueeze(-1)).flatten(1))


class FalconMamba2(Mamba2):
    """Falcon-H1's: Mamba-2's with scaled projections; the norm is optional."""

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        module = self.module
        vector: torch.Tensor = module.mup_vector
        return super().project(hidden * module.ssm_in_multiplier) * vector.flatten()

    def gate(self, read: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        if not self.module.mamba_rms_norm:
            return read * F.silu(gate)
        return super().gate(read.unsqueeze(0), gate.unsqueeze(0)).view(read.shape)


# By the name of transformers' class: importing the classes would import every model.
MIXERS: dict[str, type[Mixer]] = {
    "Lfm2ShortConv": ShortConv,
    "Lfm2MoeShortConv": ShortConv,
    "Qwen3NextGatedDeltaNet": GatedDeltaNet,
    "Qwen3_5GatedDeltaNet": SplitGatedDeltaNet,
    "Qwen3_5MoeGatedDeltaNet": SplitGatedDeltaNet,
    "Mamba2Mixer": Mamba2,
    "BambaMixer": Mamba2,
    "FalconH1Mixer": FalconMamba2,
    "GraniteMoeHybridMambaLayer": Mamba2,
}


def install_mixers(model: nn.Module) -> list[Mixer]:
    """Make ``model``'s recurrent layers run ours; empty if it has none."""
    mixers: list[Mixer] = []
    for module in model.modules():
        kind = MIXERS.get(type(module).__name__)
        if kind is not None:
            mixer = kind(module, len(mixers))
            module.forward = mixer.forward
            mixers.append(mixer)
    return mixers


def _check_activation(module: Any) -> None:
    if module.activation not in ("silu", "swish"):
        raise ConfigError(
            f"{type(module).__name__} has the activation {module.activation!r} after its "
            "convolution; only 'silu' can be run"
        )


def _normalized(vectors: torch.Tensor) -> torch.Tensor:
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + _NORM_EPSILON)
