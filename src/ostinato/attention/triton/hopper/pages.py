# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Pages of the KV cache in the shared memory of a Hopper SM: bulk copies, layouts, stale rows.

For kernels in Gluon. A tile [keys, width] in shared memory holds 64 columns of all its rows after
another, 128 bytes a row, which is how the tensor cores read it; so a page is one copy per 64
columns.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

CHUNK = gl.constexpr(64)  # columns of a copy
ROWS = gl.constexpr(64)  # of a warp group: what one wgmma takes


@gluon.constexpr_function
def mma_layout(width):
    """What a warp group's tile [ROWS, width] looks like in registers."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])


@gluon.constexpr_function
def copy_layout(width):
    """16 bytes a thread, whole rows by neighbouring threads."""
    threads = min(width // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // threads, threads], [4, 1], [1, 0])


@gluon.jit
def copy_pages(descriptor, rows, column, barrier, smem, PAGE: gl.constexpr):
    """Start the copies of a tile's pages, from ``rows`` of the cache, to ``smem``."""
    PAGES: gl.constexpr = smem.shape[0] // PAGE
    CHUNKS: gl.constexpr = smem.shape[1] // CHUNK
    pages = smem._reinterpret(smem.dtype, [CHUNKS * PAGES, PAGE, CHUNK], descriptor.layout)
    mbarrier.expect(barrier, smem.shape[0] * smem.shape[1] * 2)
    for chunk in gl.static_range(CHUNKS):
        for page in gl.static_range(PAGES):
            tma.async_copy_global_to_shared(
                descriptor,
                [rows[page], column + chunk * CHUNK],
                barrier,
                pages.index(chunk * PAGES + page),
            )


@gluon.jit
def keep_rows(smem, first, stop):
    """Zero all rows but ``first`` to ``stop``: a weight of 0 does not help against a value of NaN.

    Several warp groups may do it to the same tile; each writes what the others do.
    """
    layout: gl.constexpr = copy_layout(smem.shape[1])
    row = gl.arange(0, smem.shape[0], gl.SliceLayout(1, layout))
    rows = smem.load(layout)
    smem.store(gl.where(((row >= first) & (row < stop))[:, None], rows, 0.0))
    fence_async_shared()


def describe_pages(kv_cache: torch.Tensor, page: int) -> TensorDescriptor:
    """``kv_cache`` as rows of all heads, for copies of ``page`` rows and CHUNK columns."""
    return describe_rows(kv_cache.view(-1, kv_cache.shape[2] * kv_cache.shape[3]), page)


def describe_rows(rows: torch.Tensor, num_rows: int) -> TensorDescriptor:
    """``rows`` [N, width], contiguous, for copies of ``num_rows`` rows and CHUNK columns."""
    shape, strides = list(rows.shape), list(rows.stride())
    return TensorDescriptor(rows, shape, strides, [num_rows, CHUNK.value], _layout(rows.dtype))


@cache
def _layout(dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=dtype.itemsize * 8)
