"""The inputs for the capture of a token batch: the layout of requests, in static buffers.

A graph reads lengths and offsets from its buffers on every replay, so their values at capture only
have to be valid, and to launch the kernels that replays need. Padding never touches the KV cache:
requests after the last have length 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ostinato.errors import ConfigError
from ostinato.graphs.policy.plan import CapturePlan, PlanEntry


@dataclass(frozen=True, kw_only=True)
class TokenBuffers:
    """The static inputs of all batches of an engine, sized for the largest batch.

    ``query_start_loc`` [max_num_seqs + 1], ``seq_lens`` and ``dcp_local_seq_lens`` [max_num_seqs];
    ``block_tables`` one [max_num_seqs, blocks] each and ``slot_mappings`` [groups, max_tokens] per
    KV cache group; ``positions`` [max_tokens] or [3, max_tokens] (M-RoPE); tokens either as
    ``input_ids`` [max_tokens] or as ``inputs_embeds`` [max_tokens, hidden]; the other is None.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: Sequence[torch.Tensor]
    slot_mappings: torch.Tensor
    positions: torch.Tensor
    input_ids: torch.Tensor | None = None
    inputs_embeds: torch.Tensor | None = None
    dcp_local_seq_lens: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if (self.input_ids is None) == (self.inputs_embeds is None):
            raise ConfigError("give the tokens as input_ids or as inputs_embeds, exactly one")


@dataclass(frozen=True, kw_only=True)
class CaptureInputs:
    """One captured shape: ``TokenBuffers`` sliced to its size, under the same names.

    ``num_reqs``, ``num_tokens``: padded. ``max_query_len``: tokens of each request; the last may
    have more. ``max_seq_len``: the model's limit. ``uniform_decode``: the shape is a decode batch.
    ``attn_metadata``: the result of ``build_attn_metadata``; None without it.

    The tensors are ``query_start_loc``, ``seq_lens``, ``dcp_local_seq_lens``, ``block_tables``,
    ``slot_mappings``, ``positions``, and ``input_ids`` or ``inputs_embeds``.
    """

    uniform_decode: bool
    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    dcp_local_seq_lens: torch.Tensor | None
    block_tables: list[torch.Tensor]
    slot_mappings: torch.Tensor
    positions: torch.Tensor
    input_ids: torch.Tensor | None
    inputs_embeds: torch.Tensor | None
    attn_metadata: Any = None


def prepare_inputs_to_capture(
    entry: PlanEntry,
    plan: CapturePlan,
    buffers: TokenBuffers,
    *,
    max_model_len: int,
    build_attn_metadata: Callable[[CaptureInputs], Any] | None = None,
) -> CaptureInputs:
    """Lay out ``entry``'s padded batch in the buffers and slice them to its size.

    ``plan``: the plan of ``entry``. ``max_model_len``: becomes ``max_seq_len``.
    ``build_attn_metadata``: builds attention's metadata from the result; None: there is none.
    """
    num_tokens = entry.descriptor.num_tokens
    if entry.descriptor.uniform:
        query_len = plan.query_len_of(entry.descriptor)
        num_reqs = -(-num_tokens // query_len)
    else:
        num_reqs = min(num_tokens, plan.max_num_seqs)
        query_len = num_tokens // num_reqs
    _check_room(buffers, num_reqs=num_reqs, num_tokens=num_tokens)
    _lay_out(buffers, num_reqs=num_reqs, num_tokens=num_tokens, query_len=query_len)

    ids, embeds, dcp = buffers.input_ids, buffers.inputs_embeds, buffers.dcp_local_seq_lens
    cut: dict[str, Any] = {
        "uniform_decode": entry.descriptor.uniform,
        "num_reqs": num_reqs,
        "num_tokens": num_tokens,
        "max_query_len": query_len,
        "max_seq_len": max_model_len,
        "query_start_loc": buffers.query_start_loc[: num_reqs + 1],
        "seq_lens": buffers.seq_lens[:num_reqs],
        "dcp_local_seq_lens": None if dcp is None else dcp[:num_reqs],
        "block_tables": [table[:num_reqs] for table in buffers.block_tables],
        "slot_mappings": buffers.slot_mappings[:, :num_tokens],
        "positions": buffers.positions[..., :num_tokens],
        "input_ids": None if ids is None else ids[:num_tokens],
        "inputs_embeds": None if embeds is None else embeds[:num_tokens],
    }
    inputs = CaptureInputs(**cut)
    if build_attn_metadata is None:
        return inputs
    return CaptureInputs(**cut, attn_metadata=build_attn_metadata(inputs))


def _check_room(buffers: TokenBuffers, *, num_reqs: int, num_tokens: int) -> None:
    """Raise unless the batch fits into the buffers: slices would be shorter, and say nothing."""
    needed = [("query_start_loc", buffers.query_start_loc, 0, num_reqs + 1)]
    needed += [("seq_lens", buffers.seq_lens, 0, num_reqs)]
    needed += [("block_tables", table, 0, num_reqs) for table in buffers.block_tables]
    needed += [("slot_mappings", buffers.slot_mappings, 1, num_tokens)]
    needed += [("positions", buffers.positions, -1, num_tokens)]
    for name in ("input_ids", "inputs_embeds"):
        tokens = getattr(buffers, name)
        needed += [] if tokens is None else [(name, tokens, 0, num_tokens)]
    if buffers.dcp_local_seq_lens is not None:
        needed += [("dcp_local_seq_lens", buffers.dcp_local_seq_lens, 0, num_reqs)]
    for name, tensor, dim, count in needed:
        if tensor.dim() <= max(dim, 0) or tensor.shape[dim] < count:
            raise ConfigError(
                f"{name} is {tuple(tensor.shape)}, but a batch of {num_tokens} tokens of "
                f"{num_reqs} requests needs {count} in dimension {dim}; size the buffers for the "
                "largest batch"
            )


def _lay_out(buffers: TokenBuffers, *, num_reqs: int, num_tokens: int, query_len: int) -> None:
    starts = buffers.query_start_loc
    # Requests in steps of query_len; the last one takes the rest, and all after it are empty.
    torch.arange(0, num_reqs * query_len, query_len, out=starts[:num_reqs], dtype=starts.dtype)
    starts[num_reqs:].fill_(num_tokens)
    lengths = [buffers.seq_lens]
    if buffers.dcp_local_seq_lens is not None:
        lengths.append(buffers.dcp_local_seq_lens)
    for length in lengths:
        length[:num_reqs].fill_(num_tokens)
        length[num_reqs:].fill_(0)
