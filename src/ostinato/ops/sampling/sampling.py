"""``sample_rows``: the next token of each row, greedy or random, without other features.

It samples like ``sampling.sampler.sample`` for rows without filters, penalties, bias or
log-probabilities, with the same noise. Each row's temperature is read when it runs, so one launch
in a graph serves any mix of rows, and greedy rows compute no noise. To torch it is one operator: on
CUDA two Triton kernels, on the CPU torch operators.
"""

from __future__ import annotations

import torch

from ostinato.errors import BatchError
from ostinato.ops.define import define
from ostinato.ops.sampling.counter_random import exponential_log
from ostinato.ops.triton.launch import launch, num_sms, overlap

_SCHEMA = """sample_rows(
    Tensor logits, Tensor req_indices, Tensor temperature, Tensor seed_key, Tensor lengths,
    Tensor(a!) out_tokens
) -> ()"""

# Columns that a program reads at a time. Rows are split into chunks of such blocks until there are
# enough programs per SM; the split does not change the tokens.
_BLOCK = 1024
_NUM_WARPS = 2
_PROGRAMS_PER_SM = 24
MAX_CHUNKS = 256


def sample_rows(
    logits: torch.Tensor,
    req_indices: torch.Tensor,
    temperature: torch.Tensor,
    seed_key: torch.Tensor,
    lengths: torch.Tensor,
    out_tokens: torch.Tensor,
) -> None:
    """Write each row's next token to ``out_tokens`` [B] int64, and nothing else.

    ``logits`` [B, V] of any float type. ``req_indices`` [B] int64: each row's request in
    ``temperature`` [S] float32 and ``seed_key`` [S] int64, which may be columns of tables.
    ``lengths`` [B] int32: tokens so far, the position of the new one. Padding rows need a valid
    request; their result is meaningless.

    At temperature 0 the highest logit wins, otherwise the highest of the logits minus temperature
    times ``exponential_log``; ties go to the first, and the first NaN beats all, as in
    torch.argmax. A row's token depends on that row alone. Does not synchronise on CUDA.
    """
    _operator(logits, req_indices, temperature, seed_key, lengths, out_tokens)


def sample_rows_cpu(
    logits: torch.Tensor,
    req_indices: torch.Tensor,
    temperature: torch.Tensor,
    seed_key: torch.Tensor,
    lengths: torch.Tensor,
    out_tokens: torch.Tensor,
) -> None:
    """The CPU kernel: reads the temperatures, and computes noise only for rows that need it."""
    row_temperature = temperature[req_indices]
    rows = (row_temperature > 0).nonzero().squeeze(1)
    if rows.numel() < req_indices.numel():
        out_tokens.copy_(logits.argmax(dim=-1))
    if rows.numel():
        noise = exponential_log(seed_key[req_indices[rows]], lengths[rows], logits.shape[1])
        scores = logits[rows].float().sub_(noise.mul_(row_temperature[rows].unsqueeze(1)))
        out_tokens[rows] = scores.argmax(dim=-1)


def triton_sample_rows(
    logits: torch.Tensor,
    req_indices: torch.Tensor,
    temperature: torch.Tensor,
    seed_key: torch.Tensor,
    lengths: torch.Tensor,
    out_tokens: torch.Tensor,
) -> None:
    """The CUDA kernel. CPU tensors are for tests, under Triton's interpreter."""
    from ostinato.ops.sampling.triton.sampling import best_of_chunk_kernel

    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    # The kernels assume unit strides for these.
    req_indices, lengths = req_indices.contiguous(), lengths.contiguous()
    if not out_tokens.is_contiguous():
        raise BatchError(f"out_tokens must be contiguous, its strides are {out_tokens.stride()}")
    blocks_per_chunk, num_chunks = chunks(num_rows, vocab_size, num_sms(logits.device))
    candidates = torch.empty((num_rows, num_chunks), dtype=torch.int64, device=logits.device)
    launch(
        best_of_chunk_kernel,
        (num_rows, num_chunks),
        (logits, req_indices, temperature, seed_key, lengths, candidates),
        (
            logits.stride(0),
            temperature.stride(0),
            seed_key.stride(0),
            vocab_size,
            blocks_per_chunk,
            num_chunks,
        ),
        BLOCK=_BLOCK,
        **overlap(logits.device),
        num_warps=_NUM_WARPS,
        enable_fp_fusion=False,  # torch rounds the product before subtracting it
    )
    best_of_all(candidates, out_tokens)


def best_of_all(candidates: torch.Tensor, out_tokens: torch.Tensor) -> None:
    """The token of each row's best candidate; ``candidates`` [rows, chunks], as kernels pack them.

    To ``out_tokens`` [rows].
    """
    from ostinato.ops.sampling.triton.sampling import best_of_all_kernel

    num_rows, num_chunks = candidates.shape
    launch(
        best_of_all_kernel,
        (num_rows,),
        (candidates, out_tokens),
        (num_chunks,),
        CHUNKS_PAD=MAX_CHUNKS,
        **overlap(candidates.device),
        num_warps=2,
    )


def chunks(
    num_rows: int, vocab_size: int, num_sms: int, *, block: int = _BLOCK, programs: int = 0
) -> tuple[int, int]:
    """How to split a row: blocks per chunk, and chunks.

    ``programs`` is how many are wanted per SM; 0 stands for what suits ``sample_rows``.
    """
    num_blocks = -(-vocab_size // block)
    wanted = -(-num_sms * (programs or _PROGRAMS_PER_SM) // num_rows)
    blocks_per_chunk = -(-num_blocks // min(wanted, num_blocks, MAX_CHUNKS))
    return blocks_per_chunk, -(-num_blocks // blocks_per_chunk)


_operator = define(_SCHEMA, cpu=sample_rows_cpu, cuda=triton_sample_rows)
