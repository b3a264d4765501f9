"""Sampling with every parameter, in plain torch: what the kernels compute, and the CPU's kernel.

In order: a mask, logit bias, min_tokens and penalties change the logits; top-k, then top-p on the
rest, then min-p filter them, each under the temperature; Gumbel noise scaled by the temperature
decides. Temperature 0 removes the noise and leaves the plain argmax, a token that no filter
removes.

Nothing here reads a value back to the host. A row's token depends on that row alone, bit for bit:
noise is a hash, and sums over the vocabulary that determine a cutoff are integer sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ostinato.ops.sampling.counter_random import exponential_log

# The weight of the most likely token. A sum of 2**22 such weights still fits into an int64.
_FULL_WEIGHT = 2.0**40

NUM_REPORTED, IS_MASKED = 4, 5  # columns of ``SamplingTables.ints``


class SamplingTables(NamedTuple):
    """The parameters of all requests, one row each; ``SamplingState`` owns and describes them.

    ``floats`` [S, 6] float32: temperature, top-p, min-p, presence, frequency, repetition.
    ``ints`` [S, 6] int64: top-k, key of the seed, length of the prompt, min_tokens, the number of
    log-probabilities to report (``NUM_REPORTED``; 0: none), and whether the row has a mask
    (``IS_MASKED``). Lists that -1 ends: ``bias_ids`` int64 with ``bias_values`` float32, and
    ``stop_ids`` int64. ``masks`` [S, ceil(V / 32)] int32: a bit per token, the lowest first; only
    tokens whose bit is 1 may be sampled. Of any shape if no row has one.
    """

    floats: torch.Tensor
    ints: torch.Tensor
    bias_ids: torch.Tensor
    bias_values: torch.Tensor
    stop_ids: torch.Tensor
    masks: torch.Tensor


class Steps(NamedTuple):
    """Which steps of the sampler run; the others would change nothing."""

    noise: bool
    filters: bool
    penalties: bool
    bias: bool
    min_tokens: bool
    masks: bool = False


@dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """The parameters of a batch's rows, each [B, 1]."""

    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    repetition: torch.Tensor
    top_k: torch.Tensor
    seed_key: torch.Tensor
    prompt_len: torch.Tensor
    min_tokens: torch.Tensor


def _rows(tables: SamplingTables, req_indices: torch.Tensor) -> SamplingRows:
    floats = tables.floats.index_select(0, req_indices).split(1, dim=1)
    ints = tables.ints.index_select(0, req_indices).split(1, dim=1)
    return SamplingRows(
        temperature=floats[0],
        top_p=floats[1],
        min_p=floats[2],
        presence=floats[3],
        frequency=floats[4],
        repetition=floats[5],
        top_k=ints[0],
        seed_key=ints[1],
        prompt_len=ints[2],
        min_tokens=ints[3],
    )


def steps_of_rows(
    tables: SamplingTables, req_indices: torch.Tensor, lengths: torch.Tensor
) -> list[Steps]:
    """The steps that have an effect on each row. Reads the tables on the host."""
    floats, ints = (table[req_indices].tolist() for table in (tables.floats, tables.ints))
    first_bias_ids = tables.bias_ids[req_indices, 0].tolist()
    steps = []
    for row_floats, row_ints, first_bias_id, length in zip(
        floats, ints, first_bias_ids, lengths.tolist(), strict=True
    ):
        temperature, top_p, min_p, presence, frequency, repetition = row_floats
        top_k, _, prompt_len, min_tokens, _, is_masked = row_ints
        is_random = temperature > 0
        steps.append(
            Steps(
                noise=is_random,
                filters=is_random and (top_k > 0 or top_p < 1 or min_p > 0),
                penalties=presence != 0 or frequency != 0 or repetition != 1,
                bias=first_bias_id >= 0,
                min_tokens=max(length - prompt_len, 0) < min_tokens,
                masks=bool(is_masked),
            )
        )
    return steps


def sample_reference(
    logits: torch.Tensor,
    req_indices: torch.Tensor,
    lengths: torch.Tensor,
    tables: SamplingTables,
    token_ids: torch.Tensor,
    steps: Steps,
) -> torch.Tensor:
    """The next token of each row, [B] int64. Arguments as for ``sampling.sampler.sample``."""
    scores = processed_logits(logits, req_indices, lengths, tables, token_ids, steps)
    if steps.noise:
        rows = _rows(tables, req_indices)
        noise = exponential_log(rows.seed_key.squeeze(1), lengths, logits.shape[1])
        scores = scores - noise.mul_(rows.temperature)
    return scores.argmax(dim=-1)


def processed_logits(
    logits: torch.Tensor,
    req_indices: torch.Tensor,
    lengths: torch.Tensor,
    tables: SamplingTables,
    token_ids: torch.Tensor,
    steps: Steps,
) -> torch.Tensor:
    """The logits to sample from: float32, biased, penalised, and -inf where ruled out.

    Not divided by the temperature. Returns a new tensor, or ``logits`` itself if nothing changes
    them.
    """
    scores = logits.float()
    lengths = lengths.long().unsqueeze(1)
    if steps.masks:
        scores = _apply_masks(scores, tables, req_indices)
    if steps.bias:
        scores = _add_bias(scores, tables.bias_ids[req_indices], tables.bias_values[req_indices])
    if steps.min_tokens or steps.penalties or steps.filters:
        rows = _rows(tables, req_indices)
        if steps.min_tokens:
            scores = _hold_back_stops(scores, tables.stop_ids[req_indices], rows, lengths)
        if steps.penalties:
            scores = _penalise(scores, token_ids[req_indices], rows, lengths)
        if steps.filters:
            scores = _filter(scores, rows)
    return scores


def _apply_masks(
    logits: torch.Tensor, tables: SamplingTables, req_indices: torch.Tensor
) -> torch.Tensor:
    """Set what a row's mask does not allow to -inf; rows without one keep everything."""
    words = tables.masks[req_indices]
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((words.unsqueeze(2) >> bits) & 1).flatten(1)[:, : logits.shape[1]] != 0
    has_mask = tables.ints[req_indices, IS_MASKED].unsqueeze(1) != 0
    return logits.masked_fill(has_mask & ~allowed, -torch.inf)


def _add_bias(logits: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    # Entries outside this vocabulary add 0 to some token, because every index must be valid.
    valid = (ids >= 0) & (ids < logits.shape[1])
    return logits.scatter_add(1, torch.where(valid, ids, 0), torch.where(valid, values, 0.0))


def _hold_back_stops(
    logits: torch.Tensor, stop_ids: torch.Tensor, rows: SamplingRows, lengths: torch.Tensor
) -> torch.Tensor:
    # Set, not added: a stop token whose logit is NaN or +inf would win as NaN.
    too_short = (lengths - rows.prompt_len).clamp(min=0) < rows.min_tokens
    marks = _add_bias(torch.zeros_like(logits), stop_ids, too_short.float().expand(stop_ids.shape))
    return logits.masked_fill(marks > 0, -torch.inf)


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
    many as it needs. Rows that are greedy or have no filter keep everything, NaN and +inf too.
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
    has_filter = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)
    keep |= ~has_filter | (rows.temperature <= 0)
    return logits.masked_fill(torch.zeros_like(keep).scatter_(1, order, ~keep), -torch.inf)
