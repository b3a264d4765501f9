"""Runs a recurrence over the tokens of each request: step by step in decode, else by chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ostinato.recurrent.base import RecurrentBatch, initial_state


class Recurrence(Protocol):
    """How a token, or a chunk of tokens, changes a state and reads it; all in float32."""

    def step(
        self, inputs: Sequence[torch.Tensor], state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One token of each request, inputs [R, ...], and states [R, ...] -> results, new states.

        ``state`` may be overwritten.
        """

    def scan(
        self,
        inputs: Sequence[torch.Tensor],
        is_token: torch.Tensor,
        state: torch.Tensor,
        sizes: Sequence[int],
    ) -> torch.Tensor:
        """All tokens in chunks [N, C, ...] -> results [N, C, ...]; ``state`` [P, ...] is updated.

        ``is_token`` [N, C], ``sizes``: as in ``Chunks``. Other entries repeat a token, and must
        leave the state as it is.
        """


def advance(
    batch: RecurrentBatch,
    states: torch.Tensor,
    recurrence: Recurrence,
    inputs: Sequence[torch.Tensor],
    out: torch.Tensor,
) -> None:
    """Advance ``states`` [rows, ...] by ``inputs``, each [T, ...], and write ``out`` [T, ...]."""
    req_indices, is_fresh = batch.req_indices, batch.is_fresh
    if batch.uniform_decode:
        result, state = recurrence.step(inputs, initial_state(states, req_indices, is_fresh))
        out.copy_(result)
        states.index_copy_(0, req_indices, state)
        return
    chunks = batch.chunks
    single = chunks.num_single
    if single:
        state = initial_state(states, req_indices[:single], is_fresh[:single])
        result, state = recurrence.step([each[:single] for each in inputs], state)
        out[:single].copy_(result)
        states.index_copy_(0, req_indices[:single], state)
    if chunks.sizes:
        req_indices, is_fresh = req_indices[chunks.requests], is_fresh[chunks.requests]
        state = initial_state(states, req_indices, is_fresh)
        chunked = [each[chunks.tokens] for each in inputs]
        result = recurrence.scan(chunked, chunks.is_token, state, chunks.sizes)
        out[single : chunks.num_tokens].copy_(result.flatten(0, 1)[chunks.places])
        states.index_copy_(0, req_indices, state)
    out[chunks.num_tokens :].zero_()
