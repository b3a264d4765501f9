"""A mixture of experts: a router chooses a few of many gated MLPs for each token.

``run_experts`` is the torch reference; on the CPU it is an operator that runs only the chosen
experts, which a CPU replay calls as a whole. On CUDA our kernels run it
(``ops.experts.expert_kernels``). No form reads anything back from the device, and padding chooses
no expert.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ostinato.ops.define import define
from ostinato.ops.experts.expert_kernels import parts_of
from ostinato.ops.experts.mixture import ExpertActivation, Mixture
from ostinato.ops.experts.routing import RouterOptions, route

_CLAMP, _SLOPE = 7.0, 1.702


def run_experts(x: torch.Tensor, mixture: Mixture, slots: torch.Tensor | None) -> torch.Tensor:
    """The output [T, hidden] of ``mixture`` for ``x`` [T, hidden], of the dtype of ``x``.

    ``slots`` [T]: rows with a negative one are padding; they become zero. A single operator for
    torch.compile and for CPU graphs.
    """
    # In float32, as our kernels do: rounded logits tie, and choose other experts.
    bias = None if mixture.router_bias is None else mixture.router_bias.float()
    logits = F.linear(x.float(), mixture.router.float(), bias)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    options = mixture.options
    _operator(
        x,
        logits,
        slots,
        mixture.router,
        mixture.gate_up,
        mixture.gate_up_bias,
        mixture.down,
        mixture.down_bias,
        mixture.correction,
        mixture.load,
        out,
        *options,
        mixture.activation,
        mixture.first,
    )
    return out


def activate_gated(gate_up: torch.Tensor, activation: ExpertActivation) -> torch.Tensor:
    """The activation of an expert, [..., 2 * width] -> [..., width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    gate, up = gate.clamp(max=_CLAMP), up.clamp(-_CLAMP, _CLAMP)
    return gate * torch.sigmoid(gate * _SLOPE) * (up + 1)


def _run_chosen(
    x: torch.Tensor,
    logits: torch.Tensor,
    slots: torch.Tensor | None,
    mixture: Mixture,
    out: torch.Tensor,
) -> None:
    """Run every expert on the tokens that chose it, on the CPU, where reading them costs nothing.

    Experts are added up in float32, in the order of their numbers.
    """
    experts, weights = route(logits, mixture.options, correction=mixture.correction, slots=slots)
    total = torch.zeros(x.shape, dtype=torch.float32)
    for expert in experts.unique().tolist():
        if not 0 <= expert - mixture.first < mixture.num_own:  # padding, or another rank's
            continue
        tokens, numbers = (experts == expert).nonzero(as_tuple=True)
        y = _run_one(x[tokens], mixture, expert - mixture.first)
        total.index_add_(0, tokens, y.float() * weights[tokens, numbers, None])
        if mixture.load is not None:
            mixture.load[expert] += tokens.shape[0]
    out.copy_(total)


def _run_one(x: torch.Tensor, mixture: Mixture, place: int) -> torch.Tensor:
    """The expert at this place among those here, unweighted."""
    biases = (mixture.gate_up_bias, mixture.down_bias)
    gate_up_bias, down_bias = (None if bias is None else bias[place] for bias in biases)
    gate_up = F.linear(x, mixture.gate_up[place], gate_up_bias)
    return F.linear(activate_gated(gate_up, mixture.activation), mixture.down[place], down_bias)


def _run_kernels(
    x: torch.Tensor,
    logits: torch.Tensor,
    slots: torch.Tensor | None,
    mixture: Mixture,
    out: torch.Tensor,
) -> None:
    torch.sum(parts_of(x, logits, mixture, slots), 0, out=out)


def _packed(
    x: torch.Tensor,
    logits: torch.Tensor,
    slots: torch.Tensor | None,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    correction: torch.Tensor | None,
    load: torch.Tensor | None,
    out: torch.Tensor,
    *options: Any,
) -> tuple[Any, ...]:
    mixture = Mixture(
        options=RouterOptions(*options[:-2]),
        router=router,
        gate_up=gate_up,
        down=down,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        correction=correction,
        load=load,
        activation=options[-2],
        first=options[-1],
    )
    return x, logits, slots, mixture, out


_operator = define(
    """experts(
    Tensor x, Tensor logits, Tensor? slots, Tensor router,
    Tensor gate_up, Tensor? gate_up_bias, Tensor down, Tensor? down_bias,
    Tensor? correction, Tensor(a!)? load, Tensor(b!) out,
    int top_k, str scoring, bool renormalize, int num_groups, int top_groups, float scale,
    int group_best, str activation, int first
) -> ()""",
    cpu=_run_chosen,
    cuda=_run_kernels,
    pack=_packed,
)
