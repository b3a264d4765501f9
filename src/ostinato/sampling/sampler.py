"""``sample``: logits to tokens, entirely on the device.

Nothing here reads a value back to the host, so it runs the same eagerly and inside a captured
graph. A row's token depends on that row alone, bit for bit: noise is a hash, and sums over the
vocabulary that determine a cutoff are integer sums.

In order: logit bias, min_tokens and penalties change the logits; top-k, then top-p on the rest,
then min-p filter them, each under the temperature; Gumbel noise scaled by the temperature decides.
Temperature 0 removes the noise and leaves the plain argmax, a token that no filter removes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ostinato.ops.counter_random import exponential_log
from ostinato.sampling.sampling_state import SamplingFeatures, SamplingRows, SamplingState

__all__ = ["SamplerOutput", "SamplingFeatures", "SamplingState", "sample"]

# The weight of the most likely token. A sum of 2**22 such weights still fits into an int64.
_FULL_WEIGHT = 2.0**40


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

    ``logits`` [B, V] float32, not modified. ``req_indices`` [B] int64: each row's request in
    ``state`` and its history in ``token_ids`` [S, max_model_len]. ``lengths`` [B]: tokens of prompt
    and output so far, which is the position of the new token. Padding rows may have any ``logits``,
    any valid index and any length; their result is meaningless and affects no other row.
    ``features`` must cover what the real rows use.

    Does not synchronise, and writes only its result.
    """
    scores = process_logits(logits, req_indices, lengths, state, token_ids, features)
    if features.any_random:
        noise = exponential_log(state.seed_key[req_indices], lengths, logits.shape[1])
        scores = scores - noise.mul_(state.temperature[req_indices].unsqueeze(1))
    chosen = scores.argmax(dim=-1)
    if features.num_logprobs < 0:
        return SamplerOutput(token_ids=chosen)
    return _with_logprobs(logits, chosen, features.num_logprobs)


def process_logits(
    logits: torch.Tensor,
    req_indices: torch.Tensor,
    lengths: torch.Tensor,
    state: SamplingState,
    token_ids: torch.Tensor,
    features: SamplingFeatures,
) -> torch.Tensor:
    """The logits to sample from: biased, penalised, and -inf where ruled out.

    Arguments as for ``sample``. Not divided by the temperature. Returns a new tensor, or ``logits``
    itself if nothing changes them.
    """
    scores = logits
    lengths = lengths.long().unsqueeze(1)
    if features.any_bias:
        scores = _add_bias(scores, state.bias_ids[req_indices], state.bias_values[req_indices])
    if features.any_min_tokens or features.any_penalty or features.any_filter:
        rows = state.rows(req_indices)
        if features.any_min_tokens:
            scores = _hold_back_stops(scores, state.stop_ids[req_indices], rows, lengths)
        if features.any_penalty:
            scores = _penalise(scores, token_ids[req_indices], rows, lengths)
        if features.any_filter:
            scores = _filter(scores, rows)
    return scores


def _with_logprobs(logits: torch.Tensor, chosen: torch.Tensor, num_top: int) -> SamplerOutput:
    reported = chosen.unsqueeze(1)
    if num_top > 0:
        top = logits.topk(min(num_top, logits.shape[1]), dim=1).indices
        reported = torch.cat((reported, top), dim=1)
    return SamplerOutput(
        token_ids=chosen,
        logprobs=logits.log_softmax(dim=-1).gather(1, reported),
        logprob_token_ids=reported,
    )


def _add_bias(logits: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    # Entries outside this vocabulary add 0 to some token, because every index must be valid.
    valid = (ids >= 0) & (ids < logits.shape[1])
    return logits.scatter_add(1, torch.where(valid, ids, 0), torch.where(valid, values, 0.0))


def _hold_back_stops(
    logits: torch.Tensor, stop_ids: torch.Tensor, rows: SamplingRows, lengths: torch.Tensor
) -> torch.Tensor:
    too_short = lengths - rows.prompt_len < rows.min_tokens
    held_back = torch.where(too_short, -torch.inf, 0.0).expand(stop_ids.shape)
    return _add_bias(logits, stop_ids, held_back)


def _penalise(
    logits: torch.Tensor, history: torch.Tensor, rows: SamplingRows, lengths: torch.Tensor
) -> torch.Tensor:
    """Repetition penalty over prompt and output; frequency and presence over the output."""
    vocab_size = logits.shape[1]
    places = torch.arange(history.shape[1], device=logits.device)
    valid = (places < lengths) & (history >= 0) & (history < vocab_size)
    # Positions that do not count add 0, each to a different token: atomics on one address queue.
    tokens = torch.where(valid, history.long(), places % vocab_size)
    seen = torch.zeros_like(logits).scatter_add_(1, tokens, valid.float())
    generated = valid & (places >= rows.prompt_len)
    counts = torch.zeros_like(logits).scatter_add_(1, tokens, generated.float())

    penalised = torch.where(logits > 0, logits / rows.repetition, logits * rows.repetition)
    scores = torch.where(seen > 0, penalised, logits)
    return scores - rows.frequency * counts - rows.presence * (counts > 0)


def _filter(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Set what top-k, top-p or min-p rule out to -inf. The most likely token always stays.

    Among equally likely tokens at the cutoff, top-k keeps all, and top-p the first ones, only as
    many as it needs.
    """
    vocab_size = logits.shape[1]
    behind, order = (logits.amax(dim=-1, keepdim=True) - logits).sort(dim=-1, stable=True)
    last = torch.where(rows.top_k > 0, rows.top_k, vocab_size).clamp(max=vocab_size) - 1
    keep = behind <= behind.gather(1, last)

    temperature = torch.where(rows.temperature > 0, rows.temperature, 1.0)
    likelihood = behind.div_(temperature).neg_().exp_()  # relative to the most likely token
    # Integer sums do not depend on their order, so a cutoff does not move with the batch.
    weights = (likelihood * _FULL_WEIGHT).nan_to_num_(0.0).long().mul_(keep)
    reached = weights.cumsum(dim=-1)
    needed = (reached[:, -1:].double() * rows.top_p.double()).ceil().long().clamp(min=1)
    keep &= (reached.sub_(weights) < needed) | (rows.top_p >= 1)
    keep &= ~(likelihood < rows.min_p)
    return logits.masked_fill(torch.zeros_like(keep).scatter_(1, order, ~keep), -torch.inf)
