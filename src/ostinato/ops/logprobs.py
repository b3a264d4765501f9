"""``write_logprobs``: log-probabilities of the chosen token and of the most likely ones.

To torch it is one operator: on CUDA two Triton kernels, on the CPU torch operators.
"""

from __future__ import annotations

import torch

from ostinato.errors import BatchError
from ostinato.ops.define import define
from ostinato.ops.sampling import MAX_CHUNKS, chunks
from ostinato.ops.triton.launch import launch, next_power_of_2, num_sms, overlap

_SCHEMA = """write_logprobs(
    Tensor logits, Tensor chosen, Tensor(a!) out_logprobs, Tensor(b!) out_token_ids
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


def triton_write_logprobs(
    logits: torch.Tensor,
    chosen: torch.Tensor,
    out_logprobs: torch.Tensor,
    out_token_ids: torch.Tensor,
) -> None:
    """The CUDA kernel. CPU tensors are for tests, under Triton's interpreter."""
    from ostinato.ops.triton.logprobs import logprob_sums_kernel, top_logprobs_kernel

    (num_rows, vocab_size), device = logits.shape, logits.device
    if num_rows == 0:
        return
    if not (out_logprobs.is_contiguous() and out_token_ids.is_contiguous()):
        raise BatchError("out_logprobs and out_token_ids must be contiguous")
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_groups = -(-vocab_size // _GROUP)
    blocks_per_chunk, num_chunks = chunks(
        num_rows,
        vocab_size,
        num_sms(device),
        block=_GROUPS * _GROUP,
        programs=_PROGRAMS_PER_SM,
    )
    partials = torch.empty((num_rows, num_chunks, 2), dtype=torch.float32, device=device)
    group_best = torch.empty((num_rows, num_groups), dtype=torch.int64, device=device)
    sizes = (logits.stride(0), vocab_size, num_groups)
    launch(
        logprob_sums_kernel,
        (num_rows, num_chunks),
        (logits, partials, group_best),
        (*sizes, blocks_per_chunk, num_chunks),
        GROUPS=_GROUPS,
        **overlap(device),
        num_warps=4,
    )
    launch(
        top_logprobs_kernel,
        (num_rows,),
        (logits, chosen.contiguous(), partials, group_best, out_logprobs, out_token_ids),
        (*sizes, num_chunks, out_token_ids.shape[1] - 1),
        GROUPS_PAD=next_power_of_2(num_groups),
        CHUNKS_PAD=MAX_CHUNKS,
        **overlap(device),
        num_warps=4,
    )


_operator = define(_SCHEMA, cpu=write_logprobs_cpu, cuda=triton_write_logprobs)
