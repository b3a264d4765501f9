"""``sample``: logits to tokens and their log-probabilities, entirely on the device.

Nothing here reads a value back to the host, so it runs the same eagerly and inside a captured
graph. A row's token depends on that row alone, bit for bit. ``ops.sampling.sampling_reference``
says what each parameter does; on CUDA the kernels of ``ops.sampling.filtered_sampling`` compute
the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ostinato.ops.sampling.filtered_sampling import sample_filtered
from ostinato.ops.sampling.logprobs import write_logprobs
from ostinato.sampling.sampling_state import SamplingFeatures, SamplingState

__all__ = ["SamplerOutput", "SamplingFeatures", "SamplingState", "sample"]


@dataclass(frozen=True, kw_only=True)
class SamplerOutput:
    """``token_ids`` [B] int64. The others are None unless log-probabilities were requested.

    ``logprobs`` float32 and ``logprob_token_ids`` int64, both [B, 1 + n]: column 0 is the sampled
    token, then the n most likely ones, from the model's unmodified logits.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor | None = None
    logprob_token_ids: torch.Tensor | None = None


def sample(
    logits: torch.Tensor,
    req_indices: torch.Tensor,
    lengths: torch.Tensor,
    state: SamplingState,
    token_ids: torch.Tensor,
    features: SamplingFeatures,
) -> SamplerOutput:
    """Sample the next token of each row.

    ``logits`` [B, V] of any float type, not modified. ``req_indices`` [B] int64: each row's request
    in ``state``, with its history in ``token_ids`` [S, length]. ``lengths`` [B]: tokens of prompt
    and output so far, which is the position of the new token. Padding rows may have any ``logits``,
    any valid req_index and any length; their result is meaningless and affects no other row.
    ``features`` must cover what the real rows use.

    Does not synchronise, and writes only its result.
    """
    chosen = torch.empty(req_indices.shape, dtype=torch.int64, device=logits.device)
    sample_filtered(logits, req_indices, lengths, state.tables, token_ids, features.steps, chosen)
    if features.num_logprobs < 0:
        return SamplerOutput(token_ids=chosen)
    return _with_logprobs(logits, chosen, features.num_logprobs)


def _with_logprobs(logits: torch.Tensor, chosen: torch.Tensor, num_top: int) -> SamplerOutput:
    shape = chosen.shape[0], 1 + min(num_top, logits.shape[1])
    logprobs = torch.empty(shape, dtype=torch.float32, device=logits.device)
    reported = torch.empty(shape, dtype=torch.int64, device=logits.device)
    write_logprobs(logits, chosen, logprobs, reported)
    return SamplerOutput(token_ids=chosen, logprobs=logprobs, logprob_token_ids=reported)
