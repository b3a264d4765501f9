# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Rows of keys and values in the paged cache: their addresses, and prefetching them into L2."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_pointers(
    cache,
    request_table,
    key_position,
    seen,
    kv_head,
    block_stride,
    slot_stride,
    head_stride,
    BLOCK_SIZE: tl.constexpr,
):
    """Pointers [N, 1] to keys (or values) by position [N]; into block 0 where not ``seen``."""
    block = tl.load(request_table + key_position // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
    offset = key_position % BLOCK_SIZE
    return cache + (block * block_stride + offset * slot_stride + kv_head * head_stride)[:, None]


@triton.jit
def prefetch(rows, HEAD_DIM: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr):
    """Prefetch rows [N, 1] into L2, by cache lines of LINE elements."""
    lines = rows + tl.minimum(tl.arange(0, LINES) * LINE, HEAD_DIM - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [lines.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
