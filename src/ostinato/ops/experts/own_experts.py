"""The experts of one rank, for the tokens of all ranks: what they add to every token's output.

Every rank sees all tokens and leaves out the experts that it does not have. Which tokens choose its
experts is known to the device alone, so all buffers have room for all tokens; chunks bound them.
"""

from __future__ import annotations

import torch

from ostinato.ops.experts.expert_kernels import expert_parts
from ostinato.ops.experts.experts import run_experts
from ostinato.ops.experts.mixture import Mixture

# Tokens at a time: enough that experts are bound by arithmetic, so that reading their weights again
# for the next chunk costs nothing.
_CHUNK = 16384


def run_own_experts(x: torch.Tensor, mixture: Mixture, slots: torch.Tensor | None) -> torch.Tensor:
    """The weighted sum of the outputs of ``mixture``'s own experts, [T, hidden], for ``x``.

    Zero for tokens that chose none of them, and for padding (``slots`` < 0). Rounded to the dtype
    of ``x`` once per expert and once for the sum.
    """
    if not x.is_cuda:
        return run_experts(x, mixture, slots)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for first in range(0, x.shape[0], _CHUNK):
        rows = slice(first, first + _CHUNK)
        parts = expert_parts(x[rows], mixture, None if slots is None else slots[rows])
        torch.sum(parts, 0, out=out[rows])
    return out
