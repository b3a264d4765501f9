"""One token of each request through a linear recurrence, in place: states at request rows.

With a state S [K, V], a token decays it, S = exp(a) S, then adds the outer product of its key and a
change: its value, or with the delta rule beta (value - key S). Its result is query S.
"""

from __future__ import annotations

import torch

from ostinato.ops.define import define
from ostinato.ops.triton.launch import launch, next_power_of_2

_TILE = 4096  # elements of a state that a program holds


def recurrent_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    states: torch.Tensor,
    req_indices: torch.Tensor,
    is_fresh: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Advance ``states`` [rows, H, K, V] at ``req_indices`` [R], and write ``out`` [R, H, V].

    ``query`` and ``key`` [R, G, K]: H / G consecutive heads share each. ``value`` [R, H, V];
    ``log_decay`` and ``beta`` (None: no delta rule) [R, H]. All are float32 but ``out``, and
    contiguous but for the rows of the first three. Requests that are ``is_fresh`` [R] start from
    zeros. A row that several requests share becomes that of one of them.
    """
    _step(query, key, value, log_decay, beta, states, req_indices, is_fresh, out)


def recurrent_step_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    states: torch.Tensor,
    req_indices: torch.Tensor,
    is_fresh: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """In plain torch."""
    shared = value.shape[1] // key.shape[1]
    query, key = (each.repeat_interleave(shared, dim=1) for each in (query, key))
    # Not by multiplication: a row may hold anything, NaN included.
    state = states[req_indices].masked_fill_(is_fresh[:, None, None, None], 0)
    state *= log_decay.exp()[..., None, None]
    if beta is not None:
        value = (value - (key.unsqueeze(-2) @ state).squeeze(-2)) * beta.unsqueeze(-1)
    state += key.unsqueeze(-1) * value.unsqueeze(-2)
    out.copy_((query.unsqueeze(-2) @ state).squeeze(-2))
    states.index_copy_(0, req_indices, state)


def triton_recurrent_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    states: torch.Tensor,
    req_indices: torch.Tensor,
    is_fresh: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """The CUDA kernel. CPU tensors are for tests, under Triton's interpreter."""
    from ostinato.ops.triton.recurrent_step import recurrent_step_kernel

    num_reqs, num_heads, num_values = value.shape
    num_groups, num_keys = key.shape[1:]
    block_k = next_power_of_2(num_keys)
    block_v = min(next_power_of_2(num_values), max(1, _TILE // block_k))
    launch(
        recurrent_step_kernel,
        (num_reqs, num_heads, -(-num_values // block_v)),
        (query, key, value, log_decay, beta, states, req_indices, is_fresh, out),
        (query.stride(0), key.stride(0), value.stride(0)),
        SHARED=num_heads // num_groups,
        KEYS=num_keys,
        VALUES=num_values,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        num_warps=4,
    )


_step = define(
    """recurrent_step(
    Tensor query, Tensor key, Tensor value, Tensor log_decay, Tensor? beta, Tensor(a!) states,
    Tensor req_indices, Tensor is_fresh, Tensor(b!) out
) -> ()""",
    cpu=recurrent_step_reference,
    cuda=triton_recurrent_step,
)
