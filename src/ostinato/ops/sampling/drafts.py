"""The operators of speculative decoding: look drafts up in earlier tokens, and verify drafts.

A request's drafts are the tokens behind its last one in the request state. ``look_up_drafts``
writes them, a decode step of Q tokens per request computes what the model samples after each of
them, and ``accept_drafts`` keeps the tokens up to the first that was drafted differently. Each is
one operator that reads its integers when it runs: torch operators on the CPU, Triton kernels on
CUDA.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ostinato.ops.decode_state import DecodeState
from ostinato.ops.define import define
from ostinato.ops.triton.launch import launch, next_power_of_2, overlap

_STATE_SCHEMA = """Tensor req_indices, Tensor{} num_computed, Tensor({}!) token_ids,
    Tensor state_block_table, int padding_req_index, int block_size, int query_len"""
_LOOK_UP_SCHEMA = f"""look_up_drafts(
    {_STATE_SCHEMA.format("", "a")}, Tensor history, int min_match, int max_match
) -> ()"""
_ACCEPT_SCHEMA = f"""accept_drafts(
    {_STATE_SCHEMA.format("(a!)", "b")},
    Tensor sampled, Tensor input_ids, Tensor positions, Tensor(c!) accepted
) -> ()"""

# Tokens that a program compares at a time, and in all.
_BLOCK = 1024
_CHUNK = 8192


class LookUp(NamedTuple):
    """Where drafts are looked up: in the request's own tokens and in ``history`` [H] int32.

    ``history`` may be empty; -1 in it separates texts. The last tokens of a request must be found
    again, ``min_match`` of them at least; more than ``max_match`` are not compared.
    """

    history: torch.Tensor
    min_match: int
    max_match: int


def look_up_drafts(state: DecodeState, where: LookUp) -> None:
    """Write Q - 1 drafts behind the last token of each real row: what followed the last time.

    The longest match counts, of equally long ones the last, and the request's own tokens before the
    history. Where the request's text ends, what follows the match is repeated. Without a match, the
    drafts repeat the last token.
    """
    _look_up(*state, *where)


def accept_drafts(
    state: DecodeState,
    sampled: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    accepted: torch.Tensor,
) -> None:
    """Append the sampled tokens of each real row, up to the first that differs from its draft.

    ``input_ids``, ``positions`` and ``sampled`` [R * Q] int64: the last token and the drafts of
    each row, their positions, and what was sampled after each. Writes the tokens and their number
    to ``accepted`` [R, Q + 1] int64: all Q sampled tokens, then how many count, at least 1.

    Relies on ``positions``, not on the number of computed tokens in the state, so it can run again
    in the same step after some tokens were sampled again.
    """
    _accept(*state, sampled, input_ids, positions, accepted)


def look_up_drafts_cpu(state: DecodeState, where: LookUp) -> None:
    """The CPU kernel, and the reference."""
    num_drafts = state.query_len - 1
    rows = state.req_indices[state.req_indices != state.padding_req_index].tolist()
    for row in rows:
        last = int(state.num_computed[row])
        tokens = state.token_ids[row, : last + 1]
        suffix = tokens[-where.max_match :].flip(0)
        length, end = _longest_match(tokens, suffix)
        past_length, past_end = _longest_match(where.history, suffix)
        if max(length, past_length) < where.min_match:
            drafts = tokens[-1:].expand(num_drafts)
        elif length >= past_length:
            source = tokens[end + 1 :]
            drafts = source.repeat(-(-num_drafts // len(source)))[:num_drafts]
        else:
            source = where.history[past_end + 1 :][:num_drafts].clamp(min=0)
            drafts = torch.cat((source, source.new_zeros(num_drafts - len(source))))
        state.token_ids[row, last + 1 : last + 1 + num_drafts] = drafts


def _longest_match(text: torch.Tensor, suffix: torch.Tensor) -> tuple[int, int]:
    """How many tokens of ``suffix`` (last one first) end at which place of ``text``.

    The last place does not count, because nothing follows it.
    """
    num_ends = len(text) - 1
    if num_ends < 1:
        return 0, 0
    matches = torch.ones(num_ends, dtype=torch.bool)
    lengths = torch.zeros(num_ends, dtype=torch.int64)
    for offset, token in enumerate(suffix):
        matches[:offset] = False
        matches[offset:] &= text[: max(num_ends - offset, 0)] == token
        lengths += matches
    best = int((lengths * num_ends + torch.arange(num_ends)).argmax())
    return int(lengths[best]), best


def accept_drafts_cpu(
    state: DecodeState,
    sampled: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    accepted: torch.Tensor,
) -> None:
    """The CPU kernel, and the reference."""
    length = state.query_len
    sampled, inputs = sampled.view(-1, length), input_ids.view(-1, length)
    is_right = sampled[:, :-1] == inputs[:, 1:]
    counts = is_right.long().cumprod(dim=1).sum(dim=1) + 1
    accepted[:, :length] = sampled
    accepted[:, length] = counts
    is_real = state.req_indices != state.padding_req_index
    rows, counts = state.req_indices[is_real], counts[is_real]
    first = positions.view(-1, length)[is_real, 0] + 1
    state.num_computed[rows] = (first + counts - 1).int()
    for index in range(length):
        kept = counts > index
        state.token_ids[rows[kept], first[kept] + index] = sampled[is_real][kept, index].int()


def triton_look_up_drafts(state: DecodeState, where: LookUp) -> None:
    """The CUDA kernel. CPU tensors are for tests, under Triton's interpreter."""
    from ostinato.ops.sampling.triton.drafts import find_match_kernel, write_drafts_kernel

    req_indices, num_computed, token_ids = state[:3]
    num_rows, num_drafts = req_indices.shape[0], state.query_len - 1
    num_own = -(-token_ids.shape[1] // _CHUNK)
    num_chunks = num_own + -(-where.history.shape[0] // _CHUNK)
    candidates = torch.empty((num_rows, num_chunks), dtype=torch.int64, device=token_ids.device)
    common = req_indices, num_computed, token_ids, where.history, candidates
    numbers = state.padding_req_index, token_ids.stride(0), where.history.shape[0], num_chunks
    launch(
        find_match_kernel,
        (num_rows, num_chunks),
        common,
        (*numbers, num_own, where.max_match),
        CHUNK=_CHUNK,
        BLOCK=_BLOCK,
        **overlap(token_ids.device),
        num_warps=4,
    )
    launch(
        write_drafts_kernel,
        (num_rows,),
        common,
        (*numbers, where.min_match, num_drafts),
        CHUNKS_PAD=next_power_of_2(num_chunks),
        DRAFTS_PAD=next_power_of_2(num_drafts),
        **overlap(token_ids.device),
        num_warps=1,
    )


def triton_accept_drafts(
    state: DecodeState,
    sampled: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    accepted: torch.Tensor,
) -> None:
    """The CUDA kernel. CPU tensors are for tests, under Triton's interpreter."""
    from ostinato.ops.sampling.triton.drafts import accept_drafts_kernel

    launch(
        accept_drafts_kernel,
        (state.req_indices.shape[0],),
        (
            state.req_indices,
            sampled,
            input_ids,
            positions,
            state.num_computed,
            state.token_ids,
            accepted,
        ),
        (state.padding_req_index, state.token_ids.stride(0)),
        QUERY_LEN=state.query_len,
        **overlap(sampled.device),
        num_warps=1,
    )


def _pack_look_up(*args: Any) -> tuple[DecodeState, LookUp]:
    return DecodeState(*args[:7]), LookUp(*args[7:])


def _pack_accept(*args: Any) -> tuple[Any, ...]:
    return DecodeState(*args[:7]), *args[7:]


_look_up = define(
    _LOOK_UP_SCHEMA, cpu=look_up_drafts_cpu, cuda=triton_look_up_drafts, pack=_pack_look_up
)
_accept = define(
    _ACCEPT_SCHEMA, cpu=accept_drafts_cpu, cuda=triton_accept_drafts, pack=_pack_accept
)
