"""The gated activation of a feed-forward layer: SiLU of the first half times the second half.

SwiGLU and GeGLU are computed in float32 throughout, and rounded once. On CUDA each is one Triton
kernel; on the CPU SwiGLU is a Numba kernel, and all else plain torch operators, which CPU graphs
can replay in place.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from ostinato.ops.define import define_for_cpu
from ostinato.ops.numba import MOST_ROWS, prepare_kernel, runs_compiled
from ostinato.ops.triton.launch import launch, overlap

_BLOCK = 1024
Activation = Literal["silu", "gelu_tanh", "gelu", "relu2"]


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """SiLU, GELU in its tanh approximation, GELU, or the square of ReLU, in torch operators."""
    if activation == "silu":
        return F.silu(x)
    if activation == "relu2":
        return F.relu(x).square()
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def activate_and_mul(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """``silu_and_mul``, or the same with another activation."""
    if activation == "silu":
        return silu_and_mul(gate_up)
    if gate_up.is_cuda:
        return triton_activate_and_mul(gate_up, activation)
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (activate(gate, activation) * up).to(gate_up.dtype)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``gate_up`` [..., 2 I] from a fused projection -> a new, dense tensor [..., I]."""
    if gate_up.is_cuda:
        return triton_silu_and_mul(gate_up)
    few_pairs = gate_up.dim() == 2 and gate_up.shape[0] <= MOST_ROWS and gate_up.shape[1] % 2 == 0
    if few_pairs and runs_compiled(gate_up):
        out = _half_as_wide(gate_up)
        _compiled_silu_and_mul(gate_up, out)
        return out
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def triton_silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu_and_mul`` in Triton. CPU tensors are for the tests, under Triton's interpreter."""
    return triton_activate_and_mul(gate_up, "silu")


def triton_activate_and_mul(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """``activate_and_mul`` in Triton."""
    from ostinato.ops.triton.activation import activate_and_mul_kernel

    out = _half_as_wide(gate_up)
    if out.numel() == 0:
        return out
    width = out.shape[-1]
    rows = gate_up.reshape(-1, 2 * width)  # a view, if the leading dimensions can be merged
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    launch(
        activate_and_mul_kernel,
        (rows.shape[0], -(-width // _BLOCK)),
        (rows, out),
        (rows.stride(0), width),
        ACTIVATION=activation,
        BLOCK=_BLOCK,
        **overlap(out.device),
        num_warps=4,
    )
    return out


def _half_as_wide(gate_up: torch.Tensor) -> torch.Tensor:
    shape = (*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    return torch.empty(shape, dtype=gate_up.dtype, device=gate_up.device)


_compiled_silu_and_mul = define_for_cpu(
    "compiled_silu_and_mul(Tensor gate_up, Tensor(a!) out) -> ()",
    prepare=prepare_kernel("silu_and_mul"),
)
