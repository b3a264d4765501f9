"""Mixture-of-experts layers of transformers' modules, without reading the routing on the host.

transformers lets us choose the implementation of its expert layers. Its eager one loops over the
experts in use, which a graph cannot contain. Its grouped GEMM works if torch has a kernel that
reads the group sizes on the device; elsewhere every expert runs on every token, which is exact but
slow. The choice depends only on the device, dtypes and shapes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ostinato import compat

# Looked up once, since torch.compile traces the code below. Without it no model calls this code.
_transformers: Any = compat.experts_module.find()
EXPERTS = "ostinato"  # the name to ask transformers for

# The grouped GEMM reads its group sizes on the device for bfloat16 on these GPUs; for other GPUs
# and dtypes torch copies them to the host.
_GROUPED_CHIPS = (9, 10)
_GROUPED_ALIGNMENT = 16  # bytes, of every row of its matrices


def experts_forward(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Sum of the chosen experts' outputs for ``hidden_states`` [T, hidden].

    ``top_k_index`` and ``top_k_weights`` [T, k]: the routing. ``experts`` is one of transformers'
    expert modules: weights stacked by expert, with flags that say how they are laid out.
    """
    if _grouped_product_stays_on_device(experts):
        forward: Any = _transformers.grouped_mm_experts_forward
    elif 3 * top_k_index.numel() <= experts.num_experts:
        # For so small a batch, copying the weights of the experts in use moves fewer bytes (read,
        # write, read) than reading all experts.
        forward = _transformers.batched_mm_experts_forward
    else:
        forward = every_expert_forward
    output: torch.Tensor = forward(experts, hidden_states, top_k_index, top_k_weights)
    return output


def _grouped_product_stays_on_device(experts: Any) -> bool:
    weight: torch.Tensor = experts.down_proj
    if any(size * weight.itemsize % _GROUPED_ALIGNMENT for size in weight.shape[1:]):
        return False
    if weight.device.type == "cpu":
        return True  # a single operator, which the CPU recorder replays as a whole
    chip = torch.cuda.get_device_capability(weight.device)[0]
    return weight.dtype is torch.bfloat16 and chip in _GROUPED_CHIPS


def every_expert_forward(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """``experts_forward`` by running every expert on every token."""
    shape, device = (hidden_states.shape[0], experts.num_experts), hidden_states.device
    weights = torch.zeros(shape, dtype=torch.float32, device=device)
    weights.scatter_(1, top_k_index, top_k_weights.float())
    routed = torch.zeros(shape, dtype=torch.bool, device=device).scatter_(1, top_k_index, True)
    total = torch.zeros(hidden_states.shape, dtype=torch.float32, device=device)
    for expert in range(experts.num_experts):
        output = _run_expert(experts, expert, hidden_states) * weights[:, expert, None]
        # An expert may overflow on tokens that are not routed to it, and 0 * inf is NaN.
        total += torch.where(routed[:, expert, None], output, 0.0)
    return total.to(hidden_states.dtype)


def _run_expert(experts: Any, expert: int, hidden_states: torch.Tensor) -> torch.Tensor:
    """One expert on all tokens [T, hidden], unweighted."""
    inner = _linear(
        experts, "gate_up_proj" if experts.has_gate else "up_proj", expert, hidden_states
    )
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    return _linear(experts, "down_proj", expert, inner)


def _linear(experts: Any, name: str, expert: int, inputs: torch.Tensor) -> torch.Tensor:
    weight = getattr(experts, name)[expert]
    bias = getattr(experts, f"{name}_bias")[expert] if experts.has_bias else None
    return F.linear(inputs, weight.T if experts.is_transposed else weight, bias)


if _transformers is not None:
    _transformers.ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)
