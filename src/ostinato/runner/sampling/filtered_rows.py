"""Rows of a batch that need the full sampler: top-k, top-p, penalties, log-probabilities.

A step samples every row by its temperature alone. These rows are then sampled again from the same
logits, and their tokens are overwritten. This is for steps with prompts and without a decode graph;
behind a decode graph ``sampler_graphs`` does the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ostinato.runner.request_state import RequestState
from ostinato.sampling.sampler import SamplingFeatures, sample


@dataclass(frozen=True, kw_only=True)
class FilteredRows:
    """``positions`` in the batch, and the same ``on_device``, or None if they are all its rows."""

    positions: list[int]
    on_device: torch.Tensor | None
    features: SamplingFeatures

    @classmethod
    def among(
        cls, req_indices: Sequence[int], state: RequestState, query_len: int = 1
    ) -> FilteredRows | None:
        """The filtered rows of a batch of the requests in ``req_indices``; None if it has none.

        Each request has ``query_len`` rows.
        """
        req_indices = [index for index in req_indices for _ in range(query_len)]
        positions = state.sampling.filtered_rows(req_indices)
        if not positions:
            return None
        on_device = None
        if len(positions) < len(req_indices):
            on_device = torch.tensor(positions).to(state.device, non_blocking=True)
        features = state.sampling.features(req_indices[position] for position in positions)
        return cls(positions=positions, on_device=on_device, features=features)

    def sample(
        self,
        state: RequestState,
        token_ids: torch.Tensor,
        logits: torch.Tensor,
        req_indices: torch.Tensor,
        lengths: torch.Tensor,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        """Return the tokens of all rows, and the logprobs (tokens and values) of these rows.

        The logprobs are None unless a request asked for them. May write to ``token_ids`` [N]; the
        other tensors may have more rows.
        """
        rows = self.on_device
        chosen = slice(token_ids.shape[0]) if rows is None else rows
        logits, req_indices, lengths = logits[chosen], req_indices[chosen], lengths[chosen]
        output = sample(
            logits, req_indices, lengths, state.sampling, state.token_ids, self.features
        )
        state.token_ids[req_indices, lengths] = output.token_ids.to(torch.int32)
        if rows is None:
            token_ids = output.token_ids
        else:
            token_ids[rows] = output.token_ids
        if output.logprobs is None:
            return token_ids, None
        assert output.logprob_token_ids is not None
        return token_ids, (output.logprob_token_ids, output.logprobs)
