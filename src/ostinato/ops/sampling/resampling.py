"""``resample_rows``: samples those rows of a batch again that use more than a temperature.

A decode step samples every row by its temperature alone. This replaces the tokens of rows with
filters, masks, penalties, bias or min_tokens, in a graph too: which rows these are, and what each
of them uses, is read from the sampling state when it runs. On CUDA the other rows cost a launch and
nothing more; on the CPU nothing at all.
"""

from __future__ import annotations

from typing import Any

import torch

from ostinato.ops.define import define
from ostinato.ops.sampling.filtered_sampling import Rows, changed_rows, cutoffs, sample_kept
from ostinato.ops.sampling.sampling_reference import (
    SamplingTables,
    Steps,
    sample_reference,
    steps_of_rows,
)
from ostinato.ops.triton.launch import launch, overlap

_SCHEMA = """resample_rows(
    Tensor logits, Tensor req_indices, Tensor lengths,
    Tensor floats, Tensor ints, Tensor bias_ids, Tensor bias_values, Tensor stop_ids, Tensor masks,
    bool changes, bool use_masks, Tensor(a!) token_ids, Tensor(b!) tokens
) -> ()"""

_STORE_ROWS = 128  # per program


def resample_rows(
    logits: torch.Tensor,
    req_indices: torch.Tensor,
    lengths: torch.Tensor,
    tables: SamplingTables,
    changes: bool,
    masks: bool,
    token_ids: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    """Replace the tokens of rows that use more than a temperature, and leave the others.

    ``logits`` [B, V] of any float type. ``req_indices`` [B] int64: each row's request in
    ``tables``, and its history in ``token_ids`` [S, max_model_len] int32. ``lengths`` [B] int32:
    tokens so far. Without ``changes``, only filters apply: no row may have penalties, a bias or
    min_tokens; and without ``masks`` none may have a mask. A row's token is written to ``tokens``
    [B] int64, contiguous, and to its place in ``token_ids``. The request of padding rows must use
    nothing, as a row that was never written.

    A row's token depends on that row alone. Does not synchronise on CUDA.
    """
    _operator(logits, req_indices, lengths, *tables, changes, masks, token_ids, tokens)


def resample_rows_cpu(
    logits: torch.Tensor, req_indices: torch.Tensor, lengths: torch.Tensor, *rest: Any
) -> None:
    """The CPU kernel: reads which rows need it, and runs only the steps that these use."""
    tables, _, _, token_ids, tokens = _unpacked(rest)
    steps = steps_of_rows(tables, req_indices, lengths)
    rows = [row for row, used in enumerate(steps) if any(used[1:])]
    if not rows:
        return
    used = Steps(*map(any, zip(*(steps[row] for row in rows), strict=True)))
    these = rows if len(rows) < len(steps) else slice(None)
    req_indices, lengths = req_indices[these], lengths[these]
    chosen = sample_reference(logits[these], req_indices, lengths, tables, token_ids, used)
    tokens[these] = chosen
    token_ids[req_indices, lengths] = chosen.int()


def triton_resample_rows(
    logits: torch.Tensor, req_indices: torch.Tensor, lengths: torch.Tensor, *rest: Any
) -> None:
    """The CUDA kernel. CPU tensors are for tests, under Triton's interpreter."""
    from ostinato.ops.sampling.triton.filtered_sampling import store_resampled_kernel

    tables, changes, masks, token_ids, tokens = _unpacked(rest)
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    if changes or masks:
        steps = Steps(
            noise=True, filters=True, penalties=True, bias=True, min_tokens=True, masks=masks
        )
        rows = changed_rows(logits, req_indices, lengths, tables, token_ids, steps)
    else:
        rows = Rows(logits, logits, req_indices, req_indices)
    chosen = torch.empty_like(tokens)
    sample_kept(rows, lengths, tables, cutoffs(rows, tables), chosen, again=True)
    floats, ints = tables.floats, tables.ints
    launch(
        store_resampled_kernel,
        (-(-num_rows // _STORE_ROWS),),
        (chosen, rows.is_changed, req_indices, lengths, floats, ints, token_ids, tokens),
        (floats.stride(0), ints.stride(0), token_ids.stride(0), vocab_size, num_rows),
        CHANGED=rows.has_changes,
        BLOCK=_STORE_ROWS,
        **overlap(logits.device),
        num_warps=4,
    )


def _unpacked(
    rest: tuple[Any, ...],
) -> tuple[SamplingTables, bool, bool, torch.Tensor, torch.Tensor]:
    return SamplingTables(*rest[:6]), *rest[6:]


_operator = define(_SCHEMA, cpu=resample_rows_cpu, cuda=triton_resample_rows)
