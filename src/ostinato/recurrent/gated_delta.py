"""The gated delta rule: a state that forgets, and learns what it does not predict yet.

With a state S [K, V], a token decays it by exp(g), reads what it predicts for its key, k S, and
adds the outer product of k and beta (v - k S). Its result is q S.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class GatedDelta:
    """A ``Recurrence`` of H heads: query, key [.., H, K], value [.., H, V], g and beta [.., H]."""

    def step(
        self, inputs: Sequence[torch.Tensor], state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value, log_decay, beta = inputs
        state *= log_decay.exp()[..., None, None]
        predicted = (key.unsqueeze(-2) @ state).squeeze(-2)
        change = (value - predicted) * beta.unsqueeze(-1)
        state += key.unsqueeze(-1) * change.unsqueeze(-2)
        return (query.unsqueeze(-2) @ state).squeeze(-2), state

    def scan(
        self,
        inputs: Sequence[torch.Tensor],
        is_token: torch.Tensor,
        state: torch.Tensor,
        sizes: Sequence[int],
    ) -> torch.Tensor:
        # Without decay and without learning, a repeated token changes nothing.
        absent = ~is_token.unsqueeze(-1)
        *vectors, log_decay, beta = inputs
        log_decay, beta = (each.masked_fill(absent, 0) for each in (log_decay, beta))
        query, key, value, log_decay, beta = (
            each.transpose(1, 2) for each in (*vectors, log_decay, beta)
        )
        # By the end of token i, what token j <= i wrote has decayed by exp(total[i] - total[j]).
        total = log_decay.cumsum(-1)
        decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).exp().tril()
        scores = query @ key.mT * decay
        # What each token writes depends on what earlier ones of its chunk wrote: a triangular
        # system, solved for the values and for what is read from the state before the chunk.
        overlap = key @ key.mT * decay * beta.unsqueeze(-1)
        from_start = total.exp().unsqueeze(-1)
        wanted = torch.cat([value, key * from_start], dim=-1) * beta.unsqueeze(-1)
        solved = torch.linalg.solve_triangular(overlap, wanted, upper=False, unitriangular=True)
        values, reads = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
        query = query * from_start
        key = key * (total[..., -1:] - total).exp().unsqueeze(-1)
        end = total[..., -1].exp()[..., None, None]

        results, first = [], 0
        for size in sizes:
            rows = slice(first, first + size)
            first += size
            before = state[:size]
            change = values[rows] - reads[rows] @ before
            results.append(query[rows] @ before + scores[rows] @ change)
            before.mul_(end[rows]).add_(key[rows].mT @ change)
        return torch.cat(results).transpose(1, 2)
