"""``write_logprobs``: log-probabilities of the chosen token and of the most likely ones.

``write_requested_logprobs`` writes as many for each row as its request wants, in a graph too. To
torch each is one operator: on CUDA two Triton kernels, on the CPU torch operators.
"""

from __future__ import annotations

from typing import Any

import torch

from ostinato.errors import BatchError
from ostinato.ops.define import define
from ostinato.ops.sampling.sampling import MAX_CHUNKS, chunks
from ostinato.ops.sampling.sampling_reference import NUM_REPORTED
from ostinato.ops.triton.launch import launch, next_power_of_2, num_sms, overlap

_SCHEMA = """write_logprobs(
    Tensor logits, Tensor chosen, Tensor(a!) out_logprobs, Tensor(b!) out_token_ids
) -> ()"""

_REQUESTED_SCHEMA = """write_requested_logprobs(
    Tensor logits, Tensor chosen, Tensor req_indices, Tensor ints,
    Tensor(a!) out_logprobs, Tensor(b!) out_token_ids
) -> ()"""

_GROUP = 128  # of triton/logprobs.py
_GROUPS = 8  # that a program reads at a time
_PROGRAMS_PER_SM = 12


def write_logprobs(
    logits: torch.Tensor,
    chosen: torch.Tensor,
    out_logprobs: torch.Tensor,
    out_token_ids: torch.Tensor,
) -> None:
    """Write ``out_logprobs`` float32 and ``out_token_ids`` int64, both [B, 1 + n].

    Column 0 is the token in ``chosen`` [B] int64, followed by the n most likely tokens, n at most
    V. ``logits`` [B, V] of any float type. Among equally likely tokens, CUDA takes the first.
    """
    _operator(logits, chosen, out_logprobs, out_token_ids)


def write_requested_logprobs(
    logits: torch.Tensor,
    chosen: torch.Tensor,
    req_indices: torch.Tensor,
    ints: torch.Tensor,
    out_logprobs: torch.Tensor,
    out_token_ids: torch.Tensor,
) -> None:
    """``write_logprobs`` of the rows whose request wants some, and of each as many as it wants.

    ``req_indices`` [B] int64: each row's request in ``ints`` (``SamplingTables``). What else is in
    the two outputs is meaningless. The numbers are read when it runs, so a graph can contain it.
    """
    _requested(logits, chosen, req_indices, ints, out_logprobs, out_token_ids)


def write_logprobs_cpu(
    logits: torch.Tensor,
    chosen: torch.Tensor,
    out_logprobs: torch.Tensor,
    out_token_ids: torch.Tensor,
) -> None:
    """The CPU kernel."""
    logits = logits.float()
    out_token_ids[:, 0] = chosen
    if out_token_ids.shape[1] > 1:
        out_token_ids[:, 1:] = logits.topk(out_token_ids.shape[1] - 1, dim=1).indices
    out_logprobs.copy_(logits.log_softmax(dim=-1).gather(1, out_token_ids))


def write_requested_logprobs_cpu(
    logits: torch.Tensor,
    chosen: torch.Tensor,
    req_indices: torch.Tensor,
    ints: torch.Tensor,
    out_logprobs: torch.Tensor,
    out_token_ids: torch.Tensor,
) -> None:
    """The CPU kernel."""
    num_reported = ints[req_indices, NUM_REPORTED]
    rows = num_reported.nonzero().squeeze(1)
    if rows.numel() == 0:
        return
    shape = rows.numel(), min(int(num_reported.max()), out_logprobs.shape[1])
    logprobs = torch.empty(shape, dtype=torch.float32)
    token_ids = torch.empty(shape, dtype=torch.int64)
    write_logprobs_cpu(logits[rows], chosen[rows], logprobs, token_ids)
    out_logprobs[rows, : shape[1]] = logprobs
    out_token_ids[rows, : shape[1]] = token_ids


def triton_write_logprobs(
    logits: torch.Tensor,
    chosen: torch.Tensor,
    out_logprobs: torch.Tensor,
    out_token_ids: torch.Tensor,
) -> None:
    """The CUDA kernel. CPU tensors are for tests, under Triton's interpreter."""
    _launch(logits, chosen, None, out_logprobs, out_token_ids)


def triton_write_requested_logprobs(
    logits: torch.Tensor,
    chosen: torch.Tensor,
    req_indices: torch.Tensor,
    ints: torch.Tensor,
    out_logprobs: torch.Tensor,
    out_token_ids: torch.Tensor,
) -> None:
    """The CUDA kernel. CPU tensors are for tests, under Triton's interpreter."""
    _launch(logits, chosen, (req_indices.contiguous(), ints), out_logprobs, out_token_ids)


def _launch(
    logits: torch.Tensor,
    chosen: torch.Tensor,
    requests: tuple[torch.Tensor, torch.Tensor] | None,
    out_logprobs: torch.Tensor,
    out_token_ids: torch.Tensor,
) -> None:
    from ostinato.ops.sampling.triton.logprobs import logprob_sums_kernel, top_logprobs_kernel

    (num_rows, vocab_size), device = logits.shape, logits.device
    if num_rows == 0:
        return
    if not (out_logprobs.is_contiguous() and out_token_ids.is_contiguous()):
        raise BatchError("out_logprobs and out_token_ids must be contiguous")
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_groups = -(-vocab_size // _GROUP)
    # As for one row: the order of a row's sum must not follow from how many rows there are.
    blocks_per_chunk, num_chunks = chunks(
        1,
        vocab_size,
        num_sms(device),
        block=_GROUPS * _GROUP,
        programs=_PROGRAMS_PER_SM,
    )
    partials = torch.empty((num_rows, num_chunks, 2), dtype=torch.float32, device=device)
    group_best = torch.empty((num_rows, num_groups), dtype=torch.int64, device=device)
    chosen = chosen.contiguous()
    # Without requests the kernels read neither, and any tensors take their place.
    req_indices, ints = (chosen, chosen) if requests is None else requests
    sizes = (logits.stride(0), ints.stride(0), vocab_size, num_groups)
    options: dict[str, Any] = {
        "REQUESTED": requests is not None,
        **overlap(device),
        "num_warps": 4,
    }
    launch(
        logprob_sums_kernel,
        (num_rows, num_chunks),
        (logits, req_indices, ints, partials, group_best),
        (*sizes, blocks_per_chunk, num_chunks),
        GROUPS=_GROUPS,
        **options,
    )
    launch(
        top_logprobs_kernel,
        (num_rows,),
        (logits, chosen, req_indices, ints, partials, group_best, out_logprobs, out_token_ids),
        (*sizes, num_chunks, out_token_ids.shape[1] - 1),
        GROUPS_PAD=next_power_of_2(num_groups),
        CHUNKS_PAD=MAX_CHUNKS,
        **options,
    )


_operator = define(_SCHEMA, cpu=write_logprobs_cpu, cuda=triton_write_logprobs)
_requested = define(
    _REQUESTED_SCHEMA, cpu=write_requested_logprobs_cpu, cuda=triton_write_requested_logprobs
)
