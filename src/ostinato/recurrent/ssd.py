"""The state-space recurrence of Mamba-2 (SSD): a state that decays and adds up outer products.

With a state S [P, N], a token decays it by exp(a), and adds the outer product of x and B. Its
result is S C.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class StateSpace:
    """A ``Recurrence`` of H heads: x [.., H, P], a [.., H]; B and C [.., G, N].

    G groups of heads share B and C.
    """

    def step(
        self, inputs: Sequence[torch.Tensor], state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, log_decay, b, c = inputs
        num_heads = x.shape[-2]
        b, c = _for_heads(b, num_heads), _for_heads(c, num_heads)
        state *= log_decay.exp()[..., None, None]
        state += x.unsqueeze(-1) * b.unsqueeze(-2)
        return (state @ c.unsqueeze(-1)).squeeze(-1), state

    def scan(
        self,
        inputs: Sequence[torch.Tensor],
        is_token: torch.Tensor,
        state: torch.Tensor,
        sizes: Sequence[int],
    ) -> torch.Tensor:
        # Without decay and input, a repeated token changes nothing.
        absent = ~is_token.unsqueeze(-1)
        x, log_decay, b, c = inputs
        x, log_decay = x.masked_fill(absent.unsqueeze(-1), 0), log_decay.masked_fill(absent, 0)
        x, log_decay, b, c = (each.transpose(1, 2) for each in (x, log_decay, b, c))
        num_heads = x.shape[1]
        # By the end of token i, what token j <= i wrote has decayed by exp(total[i] - total[j]).
        total = log_decay.cumsum(-1)
        decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).exp().tril()
        scores = (c @ b.mT).repeat_interleave(num_heads // c.shape[1], 1) * decay
        within = scores @ x
        b, c = (each.repeat_interleave(num_heads // each.shape[1], 1) for each in (b, c))
        reads = c * total.exp().unsqueeze(-1)
        added = (x * (total[..., -1:] - total).exp().unsqueeze(-1)).mT @ b
        end = total[..., -1].exp()[..., None, None]

        results, first = [], 0
        for size in sizes:
            rows = slice(first, first + size)
            first += size
            before = state[:size]
            results.append(within[rows] + reads[rows] @ before.mT)
            before.mul_(end[rows]).add_(added[rows])
        return torch.cat(results).transpose(1, 2)


def _for_heads(groups: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[R, G, N] -> [R, H, N]"""
    return groups.repeat_interleave(num_heads // groups.shape[-2], dim=-2)
