"""Runs a mixture of experts by our kernels: which ones, with which tiles.

One token takes three kernels: the router's logits with the norm, gate and up, and down with the
residual. More take four, or five with a norm of more than ``_MOST_ROUTED_ROWS`` rows: logits, the
routing, and the two GEMMs; the results of a token's experts are parts that the next norm adds up.
Nothing is read back to the host, and only shapes decide, so a graph and an eager call agree.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ostinato.ops.experts.expert_tiles import block_rows, expert_tiles, most_blocks
from ostinato.ops.experts.mixture import Mixture
from ostinato.ops.gemm.linear import Norm
from ostinato.ops.gemm.tile_config import gpu_of
from ostinato.ops.norm import rms_norm, triton_rms_norm
from ostinato.ops.triton.counters import take_counters
from ostinato.ops.triton.launch import launch, next_power_of_2, num_sms, overlap

_MOST_ROUTED_ROWS = 32  # beyond, the router's weight is better read by tiles of rows
_WIDEST_ROW = 8192  # that a program of the router holds in registers
_EVICT = "evict_first"  # a weight is read once a step
_ROW_PROGRAMS = 4  # programs of the row kernels per SM


class RoutedToken(NamedTuple):
    """One token after gate and up: what ``down_row`` needs."""

    mixture: Mixture
    logits: torch.Tensor  # [1, E] float32
    inner: torch.Tensor  # [top_k, width]
    slots: torch.Tensor | None


def expert_parts(
    x: torch.Tensor,
    mixture: Mixture,
    slots: torch.Tensor | None,
    norm: Norm | None = None,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """[top_k, T, hidden] that add up to the mixture's output for norm(x), ``x`` [T, hidden].

    Rows of padding (``slots`` < 0) are zero. ``shared`` [T, hidden] becomes one part more.
    """
    x, logits = _logits(x, mixture, norm)
    return parts_of(x, logits, mixture, slots, shared)


def parts_of(
    x: torch.Tensor,
    logits: torch.Tensor,
    mixture: Mixture,
    slots: torch.Tensor | None,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """``expert_parts`` of rows that are normed, with their router ``logits`` [T, E] float32."""
    from ostinato.ops.experts.triton.routing import route_kernel

    (num_tokens, hidden), options = x.shape, mixture.options
    own, top_k = mixture.num_own, options.top_k
    device, num_pairs = x.device, num_tokens * top_k
    block_m = block_rows(-(-num_pairs * own // mixture.num_experts), own)
    num_parts = top_k if shared is None else top_k + 1
    # Only the chosen experts that are here write to their part.
    new = torch.empty if own == mixture.num_experts else torch.zeros
    parts = new(num_parts, num_tokens, hidden, device=device, dtype=x.dtype)
    if shared is not None:
        parts[top_k].copy_(shared)
    if num_tokens == 0:
        return parts
    num_blocks = most_blocks(num_tokens * min(top_k, own), own, block_m)
    counters = take_counters(device, own + 1)
    weights = torch.empty(num_tokens, top_k, device=device, dtype=torch.float32)
    buckets = torch.empty(own, num_tokens, device=device, dtype=torch.int32)
    blocks = torch.empty(1 + 3 * num_blocks, device=device, dtype=torch.int32)
    launch(
        route_kernel,
        (num_tokens,),
        (
            logits,
            slots,
            mixture.correction,
            counters,
            mixture.load,
            weights,
            buckets,
            blocks,
            parts,
        ),
        (num_tokens, options.scale),
        **_routing_constants(mixture),
        FIRST=mixture.first,
        OWN=own,
        OWN_PAD=next_power_of_2(own),
        WIDTH=hidden,
        BLOCK_M=block_m,
        **overlap(device),
        num_warps=1,
    )
    inner = torch.empty(num_pairs, mixture.width, device=device, dtype=x.dtype)
    routing = (buckets, blocks)
    _tiles(x, mixture, weights, inner, routing, (num_tokens, num_blocks, block_m), gated=True)
    _tiles(inner, mixture, weights, parts, routing, (num_tokens, num_blocks, block_m), gated=False)
    return parts


def _tiles(
    x: torch.Tensor,
    mixture: Mixture,
    pair_weights: torch.Tensor,
    out: torch.Tensor,
    routing: tuple[torch.Tensor, torch.Tensor],
    sizes: tuple[int, int, int],
    *,
    gated: bool,
) -> None:
    """One of the two GEMMs; ``sizes``: tokens, blocks at most, and tokens of a block."""
    from ostinato.ops.experts.triton.experts import expert_tile_kernel

    num_tokens, num_blocks, block_m = sizes
    weight = mixture.gate_up if gated else mixture.down
    bias = mixture.gate_up_bias if gated else mixture.down_bias
    outputs, inner = out.shape[-1], x.shape[1]
    device = x.device
    memory = gpu_of(device).shared_memory if x.is_cuda else 227 * 1024
    tiles = expert_tiles(
        block_m, outputs, inner, x.element_size(), gated=gated, shared_memory=memory
    )
    launch(
        expert_tile_kernel,
        (-(-outputs // tiles.block_n), num_blocks),
        (x, weight, bias, pair_weights, out, *routing),
        (num_tokens, x.stride(0)),
        N=outputs,
        K=inner,
        TOP_K=mixture.options.top_k,
        GATED=gated,
        CLAMPED=mixture.activation == "clamped_swiglu",
        BLOCK_M=block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        STAGES=tiles.num_stages,
        PREFETCH=tiles.prefetch,
        EVICT=_EVICT if block_m <= 32 else "",
        **overlap(device),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


# --- the router's logits --------------------------------------------------------------------------


def _logits(
    x: torch.Tensor, mixture: Mixture, norm: Norm | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """norm(x), dense, and its router logits [T, E] float32."""
    x = x if x.stride(1) == 1 else x.contiguous()
    num_tokens, hidden = x.shape
    logits = torch.empty(num_tokens, mixture.num_experts, device=x.device, dtype=torch.float32)
    if num_tokens <= _MOST_ROUTED_ROWS and hidden <= _WIDEST_ROW:
        return _row_logits(x, mixture, norm, logits), logits
    if norm is not None:
        run_norm = rms_norm if x.is_cuda else triton_rms_norm
        x = run_norm(x, norm.weight, norm.eps)
    _tile_logits(x, mixture, logits)
    return x, logits


def _row_logits(
    x: torch.Tensor, mixture: Mixture, norm: Norm | None, logits: torch.Tensor
) -> torch.Tensor:
    from ostinato.ops.experts.triton.routing import router_row_kernel

    num_tokens, hidden = x.shape
    if num_tokens == 0:
        return x
    normed = x if norm is None else torch.empty(x.shape, device=x.device, dtype=x.dtype)
    norm_weight, eps = (None, 0.0) if norm is None else norm
    padded = next_power_of_2(hidden)
    # Registers for all weights of a program: 64 of each thread's.
    block_e = max(1, min(2 if num_tokens == 1 else 8, 16384 * 2 // (padded * x.element_size())))
    launch(
        router_row_kernel,
        (-(-mixture.num_experts // block_e), num_tokens),
        (x, norm_weight, mixture.router, mixture.router_bias, normed, logits),
        (eps, x.stride(0)),
        E=mixture.num_experts,
        K=hidden,
        K_PAD=padded,
        BLOCK_E=block_e,
        **overlap(x.device),
        num_warps=4,
    )
    return normed


def _tile_logits(x: torch.Tensor, mixture: Mixture, logits: torch.Tensor) -> None:
    from ostinato.ops.experts.triton.routing import router_tile_kernel

    num_tokens, hidden = x.shape
    many = num_tokens >= 2048
    block_m = 64 if many else 16
    block_e = max(16, min(128 if many else 32, next_power_of_2(mixture.num_experts)))
    launch(
        router_tile_kernel,
        (-(-num_tokens // block_m), -(-mixture.num_experts // block_e)),
        (x, mixture.router, mixture.router_bias, logits),
        (num_tokens, x.stride(0)),
        E=mixture.num_experts,
        K=hidden,
        BLOCK_M=block_m,
        BLOCK_E=block_e,
        BLOCK_K=(128 if many else 256) // x.element_size(),
        STAGES=4,
        **overlap(x.device),
        num_warps=4,
        num_stages=4,
    )


# --- one token ------------------------------------------------------------------------------------


def gate_up_row(
    x: torch.Tensor, mixture: Mixture, slots: torch.Tensor | None, norm: Norm | None = None
) -> RoutedToken:
    """The routing, gate and up of one token, norm(x) with ``x`` [1, hidden]."""
    from ostinato.ops.experts.triton.experts import gate_up_row_kernel

    x, logits = _logits(x, mixture, norm)
    hidden, width, top_k = x.shape[1], mixture.width, mixture.options.top_k
    inner = torch.empty(top_k, width, device=x.device, dtype=x.dtype)
    block_n, block_k = 2, min(2048, max(64, next_power_of_2(hidden)))
    if 2048 < hidden <= 4096:
        block_n, block_k = 1, 4096
    # All programs at once: each works out the experts before it reads any weight.
    programs = max(1, _ROW_PROGRAMS * num_sms(x.device) // top_k)
    tiles = max(1, -(-width // (block_n * programs)))
    launch(
        gate_up_row_kernel,
        (top_k, -(-width // (block_n * tiles))),
        (
            x,
            logits,
            slots,
            mixture.correction,
            mixture.gate_up,
            mixture.gate_up_bias,
            mixture.load,
            inner,
        ),
        N=width,
        K=hidden,
        CLAMPED=mixture.activation == "clamped_swiglu",
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        TILES=tiles,
        **_choice_constants(mixture),
        **_row_constants(x.device),
    )
    return RoutedToken(mixture, logits, inner, slots)


def down_row(token: RoutedToken, residual: torch.Tensor | None) -> torch.Tensor:
    """The mixture's output for one token, plus ``residual``: [1, hidden]."""
    from ostinato.ops.experts.triton.experts import down_row_kernel

    mixture, logits, inner, slots = token
    hidden, width = mixture.down.shape[1:]
    out = torch.empty(1, hidden, device=inner.device, dtype=inner.dtype)
    block_n = 4 if hidden >= 2048 else 2
    launch(
        down_row_kernel,
        (-(-hidden // block_n),),
        (
            inner,
            logits,
            slots,
            mixture.correction,
            mixture.down,
            mixture.down_bias,
            residual,
            out,
        ),
        (mixture.options.scale,),
        N=hidden,
        K=width,
        BLOCK_N=block_n,
        BLOCK_K=min(1024, max(64, next_power_of_2(width))),
        **_routing_constants(mixture),
        **_row_constants(inner.device),
    )
    return out


def _row_constants(device: torch.device) -> dict[str, Any]:
    return {"EVICT": _EVICT, **overlap(device), "num_warps": 4, "num_stages": 1}


def _routing_constants(mixture: Mixture) -> dict[str, Any]:
    """Of kernels that choose all experts of a token."""
    options = mixture.options
    return {
        **_choice_constants(mixture),
        "TOP_K": options.top_k,
        "K_PAD": next_power_of_2(options.top_k),
        "RENORMALIZE": options.renormalize,
    }


def _choice_constants(mixture: Mixture) -> dict[str, Any]:
    options = mixture.options
    return {
        "E": mixture.num_experts,
        "E_PAD": next_power_of_2(mixture.num_experts),
        "SIGMOID": options.scoring == "sigmoid",
        "NUM_GROUPS": options.num_groups,
        "TOP_GROUPS": options.top_groups,
        "GROUP_BEST": options.group_best,
    }
