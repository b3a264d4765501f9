"""Runs a linear recurrence over the tokens of each request: in chunks, or one token in decode."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ostinato.ops.recurrent_step import recurrent_step
from ostinato.recurrent.base import RecurrentBatch, initial_state
from ostinato.recurrent.chunks import Chunks


class Tokens(NamedTuple):
    """The inputs of a linear recurrence, one row per token, as ``recurrent_step`` takes them.

    ``beta``: with the gated delta rule. Without it the recurrence is that of state-space models
    (SSD): ``query`` and ``key`` are then called C and B.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor | None

    def first(self, count: int) -> Tokens:
        """The first ``count`` tokens."""
        query, key, value, log_decay = (each[:count] for each in self[:4])
        return Tokens(
            query, key, value, log_decay, None if self.beta is None else self.beta[:count]
        )


def advance(batch: RecurrentBatch, states: torch.Tensor, tokens: Tokens, out: torch.Tensor) -> None:
    """Advance ``states`` [rows, H, K, V] by ``tokens``, and write ``out`` [T, H, V]."""
    if batch.uniform_decode:
        recurrent_step(*tokens, states, batch.req_indices, batch.is_fresh, out)
        return
    chunks = batch.chunks
    single = chunks.num_single
    if single:
        req_indices, is_fresh = batch.req_indices[:single], batch.is_fresh[:single]
        recurrent_step(*tokens.first(single), states, req_indices, is_fresh, out[:single])
    if chunks.sizes:
        req_indices = batch.req_indices[chunks.requests]
        state = initial_state(states, req_indices, batch.is_fresh[chunks.requests])
        result = _scan(tokens, chunks, state)
        out[single : chunks.num_tokens].copy_(result.flatten(0, 1)[chunks.places])
        states.index_copy_(0, req_indices, state)
    out[chunks.num_tokens :].zero_()


def _scan(tokens: Tokens, chunks: Chunks, state: torch.Tensor) -> torch.Tensor:
    """The results of all chunks [N, C, H, V]; ``state`` [P, H, K, V] is updated."""
    absent = ~chunks.is_token.unsqueeze(-1)
    # Without decay, and with a change of 0, a repeated token changes nothing.
    log_decay = tokens.log_decay[chunks.tokens].masked_fill_(absent, 0).transpose(1, 2)
    query, key, value = (each[chunks.tokens].transpose(1, 2) for each in tokens[:3])
    shared = value.shape[1] // key.shape[1]
    # By the end of token i, what token j <= i wrote has decayed by exp(total[i] - total[j]).
    total = log_decay.cumsum(-1)
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).exp().tril()
    from_start = total.exp().unsqueeze(-1)
    scores = (query @ key.mT).repeat_interleave(shared, 1) * decay
    shared_key, reads = key, None
    query, key = (each.repeat_interleave(shared, 1) for each in (query, key))
    if tokens.beta is None:
        value = value.masked_fill(absent.transpose(1, 2).unsqueeze(-1), 0)
    else:
        # What a token changes depends on what earlier ones of its chunk changed: a triangular
        # system, solved for the values and for what is read from the state before the chunk.
        beta = tokens.beta[chunks.tokens].masked_fill_(absent, 0).transpose(1, 2).unsqueeze(-1)
        overlap = (shared_key @ shared_key.mT).repeat_interleave(shared, 1)
        wanted = torch.cat([value, key * from_start], dim=-1) * beta
        solved = torch.linalg.solve_triangular(
            overlap * decay * beta, wanted, upper=False, unitriangular=True
        )
        value, reads = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    query = query * from_start
    key = key * (total[..., -1:] - total).exp().unsqueeze(-1)
    end = total[..., -1].exp()[..., None, None]

    results, first = [], 0
    for size in chunks.sizes:
        rows, before = slice(first, first + size), state[:size]
        first += size
        change = value[rows] if reads is None else value[rows] - reads[rows] @ before
        results.append(query[rows] @ before + scores[rows] @ change)
        before.mul_(end[rows]).add_(key[rows].mT @ change)
    return torch.cat(results).transpose(1, 2)
