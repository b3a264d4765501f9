"""``sample_filtered``: the next token of each row, with every parameter that the sampler has.

What each parameter does is in ``sampling_reference``, which is the CPU's kernel; on CUDA a few
Triton kernels choose the same tokens. Every row's parameters are read when it runs, so one launch
in a graph serves any mix of rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ostinato.errors import BatchError
from ostinato.ops.define import define
from ostinato.ops.sampling.sampling import MAX_CHUNKS, best_of_all, chunks
from ostinato.ops.sampling.sampling_reference import (
    SamplingTables,
    Steps,
    sample_reference,
)
from ostinato.ops.triton.counters import take_counters
from ostinato.ops.triton.launch import launch, next_power_of_2, num_sms, overlap

_SCHEMA = """sample_filtered(
    Tensor logits, Tensor req_indices, Tensor lengths,
    Tensor floats, Tensor ints, Tensor bias_ids, Tensor bias_values, Tensor stop_ids, Tensor masks,
    Tensor token_ids, bool noise, bool filters, bool penalties, bool bias, bool min_tokens,
    bool use_masks, Tensor(a!) out_tokens
) -> ()"""

# Columns that a program of the search reads, by how many warps.
_SEARCH_BLOCK = 4096
_SEARCH_WARPS = 8
_COLLECT_BLOCK = 1024
_COLLECT_WARPS = 8
# Tokens of a row among which its last kernel, one program per row, looks for the exact cutoff. If
# there are more, it reads the row in blocks, which is slower; if there are few, it is faster.
_CAPACITY = 8192
_SMALL_LIST = 1024
_CUTOFF_BLOCK = 2048
_CUTOFF_WARPS = 16
# The same for the kernel that samples. Noise takes registers, so its blocks are small.
_SAMPLE_BLOCK = 512
_SAMPLE_PROGRAMS = 24
# Columns copied at a time, by how many programs per SM, and positions of a history read at a time,
# by how many programs.
_COPY_BLOCK = 2048
_COPY_PROGRAMS = 12
_HISTORY_BLOCK = 512
_HISTORY_CHUNKS = 32


def sample_filtered(
    logits: torch.Tensor,
    req_indices: torch.Tensor,
    lengths: torch.Tensor,
    tables: SamplingTables,
    token_ids: torch.Tensor,
    steps: Steps,
    out_tokens: torch.Tensor,
) -> None:
    """Write each row's next token to ``out_tokens`` [B] int64, and nothing else.

    ``logits`` [B, V] of any float type. ``req_indices`` [B] int64: each row's request in
    ``tables``, and its history in ``token_ids`` [S, max_model_len] int32. ``lengths`` [B] int32:
    tokens so far. ``steps`` covers what the rows use. Padding rows need a valid request; their
    result is meaningless.

    A row's token depends on that row alone. Does not synchronise on CUDA.
    """
    _operator(logits, req_indices, lengths, *tables, token_ids, *steps, out_tokens)


def sample_filtered_cpu(
    logits: torch.Tensor, req_indices: torch.Tensor, lengths: torch.Tensor, *rest: Any
) -> None:
    """The CPU kernel."""
    tables, token_ids, steps, out_tokens = _unpacked(rest)
    out_tokens.copy_(sample_reference(logits, req_indices, lengths, tables, token_ids, steps))


def triton_sample_filtered(
    logits: torch.Tensor, req_indices: torch.Tensor, lengths: torch.Tensor, *rest: Any
) -> None:
    """The CUDA kernel. CPU tensors are for tests, under Triton's interpreter."""
    tables, token_ids, steps, out_tokens = _unpacked(rest)
    if logits.shape[0] == 0:
        return
    if not out_tokens.is_contiguous():
        raise BatchError(f"out_tokens must be contiguous, its strides are {out_tokens.stride()}")
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    if token_ids.stride(-1) != 1:
        token_ids = token_ids.contiguous()
    # The kernels assume unit strides for these.
    req_indices, lengths = req_indices.contiguous(), lengths.contiguous()
    if steps.penalties or steps.bias or steps.min_tokens or steps.masks:
        rows = changed_rows(logits, req_indices, lengths, tables, token_ids, steps)
    else:
        rows = Rows(logits, logits, req_indices, req_indices)
    fields = cutoffs(rows, tables) if steps.filters else req_indices
    sample_kept(rows, lengths, tables, fields, out_tokens)


class Rows(NamedTuple):
    """Logits, the changed copies of some rows, and which rows those are.

    Without changes the kernels read neither, and any tensors take their place.
    """

    logits: torch.Tensor
    copies: torch.Tensor
    is_changed: torch.Tensor
    req_indices: torch.Tensor

    @property
    def has_changes(self) -> bool:
        return self.copies is not self.logits


def _unpacked(rest: tuple[Any, ...]) -> tuple[SamplingTables, torch.Tensor, Steps, torch.Tensor]:
    return SamplingTables(*rest[:6]), rest[6], Steps(*rest[7:13]), rest[13]


def changed_rows(
    logits: torch.Tensor,
    req_indices: torch.Tensor,
    lengths: torch.Tensor,
    tables: SamplingTables,
    token_ids: torch.Tensor,
    steps: Steps,
) -> Rows:
    """Apply masks, bias, min_tokens and penalties to copies of the rows that use them."""
    from ostinato.ops.sampling.triton.logit_changes import (
        copy_logits_kernel,
        count_tokens_kernel,
        penalise_kernel,
    )

    (num_rows, vocab_size), device = logits.shape, logits.device
    copies = torch.empty((num_rows, vocab_size), dtype=torch.float32, device=device)
    counts = torch.empty((num_rows, vocab_size), dtype=torch.int32, device=device)
    is_changed = torch.empty(num_rows, dtype=torch.int32, device=device)
    floats, ints, bias_ids, bias_values, stop_ids, masks = tables
    max_len = token_ids.shape[1]
    blocks_per_chunk, num_chunks = chunks(
        num_rows, vocab_size, num_sms(device), block=_COPY_BLOCK, programs=_COPY_PROGRAMS
    )
    options: dict[str, Any] = {**overlap(device), "num_warps": 4, "enable_fp_fusion": False}
    launch(
        copy_logits_kernel,
        (num_rows, num_chunks),
        (
            *(logits, copies, is_changed, req_indices, lengths),
            *(floats, ints, bias_ids, token_ids, masks, counts),
        ),
        (
            *(logits.stride(0), floats.stride(0), ints.stride(0), bias_ids.stride(0)),
            *(token_ids.stride(0), masks.stride(0)),
            *(max_len, vocab_size, blocks_per_chunk, num_chunks),
        ),
        MASKED=steps.masks,
        BLOCK=_COPY_BLOCK,
        **options,
    )
    num_chunks = max(1, min(-(-max_len // _HISTORY_BLOCK), _HISTORY_CHUNKS))
    launch(
        count_tokens_kernel,
        (num_rows, num_chunks),
        (
            *(copies, req_indices, lengths, floats, ints),
            *(bias_ids, bias_values, stop_ids, token_ids, counts),
        ),
        (
            *(floats.stride(0), ints.stride(0), bias_ids.stride(0), stop_ids.stride(0)),
            *(token_ids.stride(0), bias_ids.shape[1], stop_ids.shape[1]),
            *(max_len, vocab_size, num_chunks),
        ),
        BIAS_PAD=next_power_of_2(bias_ids.shape[1]),
        STOPS_PAD=next_power_of_2(stop_ids.shape[1]),
        BLOCK=_HISTORY_BLOCK,
        **options,
    )
    if steps.penalties:
        launch(
            penalise_kernel,
            (num_rows, num_chunks),
            (copies, req_indices, lengths, floats, token_ids, counts),
            (floats.stride(0), token_ids.stride(0), max_len, vocab_size, num_chunks),
            BLOCK=_HISTORY_BLOCK,
            **options,
        )
    return Rows(logits, copies, is_changed, req_indices)


def cutoffs(rows: Rows, tables: SamplingTables) -> torch.Tensor:
    """Where top-k and top-p cut off each row: the columns CUT_KEY and CUT_TOKEN of the result."""
    from ostinato.ops.sampling.triton.cutoffs import collect_candidates_kernel, histogram_kernel
    from ostinato.ops.sampling.triton.filters import BINS, NUM_FIELDS, logit_range_kernel
    from ostinato.ops.sampling.triton.find_cutoff import find_cutoff_kernel

    logits = rows.logits
    (num_rows, vocab_size), device = logits.shape, logits.device
    blocks_per_chunk, num_chunks = chunks(
        num_rows,
        vocab_size,
        num_sms(device),
        block=_SEARCH_BLOCK,
        programs=MAX_CHUNKS * num_rows,  # as many chunks as there can be
    )
    ranges = torch.empty((num_rows, num_chunks, 2), dtype=torch.float32, device=device)
    counts = torch.empty((num_rows, BINS.value), dtype=torch.int32, device=device)
    totals = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=device)
    fields = torch.empty((num_rows, NUM_FIELDS.value), dtype=torch.int32, device=device)
    sums = torch.empty((num_rows, num_chunks, 2), dtype=torch.int64, device=device)
    spans = torch.empty((num_rows, num_chunks, 3), dtype=torch.int32, device=device)
    listed = torch.empty((num_rows, _CAPACITY), dtype=torch.int64, device=device)

    parameters = (*rows, tables.floats, tables.ints)
    strides = (logits.stride(0), tables.floats.stride(0), tables.ints.stride(0), vocab_size)
    sizes = (*strides, blocks_per_chunk * _SEARCH_BLOCK, num_chunks)
    options: dict[str, Any] = {
        "CHANGED": rows.has_changes,
        **overlap(device),
        "enable_fp_fusion": False,
    }
    grid = (num_rows, num_chunks)
    search: dict[str, Any] = {"BLOCK": _SEARCH_BLOCK, "num_warps": _SEARCH_WARPS}
    pad: dict[str, Any] = {"CHUNKS_PAD": next_power_of_2(num_chunks)}
    tensors = (*parameters, counts, fields)
    arrivals = take_counters(device, num_rows)
    first = (*tensors, ranges, arrivals)
    launch(logit_range_kernel, grid, first, sizes, **search, **pad, **options)
    options["CAPACITY"] = _CAPACITY
    launch(histogram_kernel, grid, (*tensors, totals), sizes, **search, **pad, **options)
    lists = (fields, sums, spans, listed)
    launch(
        collect_candidates_kernel,
        grid,
        (*parameters, *lists),
        sizes,
        BLOCK=min(_COLLECT_BLOCK, _SEARCH_BLOCK),
        num_warps=_COLLECT_WARPS,
        **options,
    )
    launch(
        find_cutoff_kernel,
        (num_rows,),
        (*parameters, counts, *lists),
        sizes,
        BLOCK=_CUTOFF_BLOCK,
        num_warps=_CUTOFF_WARPS,
        SMALL=min(_SMALL_LIST, _CAPACITY),
        **pad,
        **options,
    )
    return fields


def sample_kept(
    rows: Rows,
    lengths: torch.Tensor,
    tables: SamplingTables,
    fields: torch.Tensor,
    out_tokens: torch.Tensor,
    *,
    again: bool = False,
) -> None:
    """Sample each row within its cutoffs (``rows.req_indices`` in place of ``fields``: all of it).

    ``again``: rows that are neither filtered nor changed are skipped, and get any token.
    """
    from ostinato.ops.sampling.triton.filtered_sampling import best_kept_kernel

    logits = rows.logits
    (num_rows, vocab_size), device = logits.shape, logits.device
    blocks_per_chunk, num_chunks = chunks(
        num_rows,
        vocab_size,
        num_sms(device),
        block=_SAMPLE_BLOCK,
        programs=_SAMPLE_PROGRAMS,
    )
    candidates = torch.empty((num_rows, num_chunks), dtype=torch.int64, device=device)
    launch(
        best_kept_kernel,
        (num_rows, num_chunks),
        (*rows, lengths, tables.floats, tables.ints, fields, candidates),
        (
            logits.stride(0),
            tables.floats.stride(0),
            tables.ints.stride(0),
            vocab_size,
            blocks_per_chunk,
            num_chunks,
        ),
        FILTERED=fields is not rows.req_indices,
        CHANGED=rows.has_changes,
        AGAIN=again,
        BLOCK=_SAMPLE_BLOCK,
        **overlap(device),
        num_warps=2,
        enable_fp_fusion=False,  # torch rounds the product before subtracting it
    )
    best_of_all(candidates, out_tokens)


_operator = define(_SCHEMA, cpu=sample_filtered_cpu, cuda=triton_sample_filtered)
