# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call,assignment"
"""Attention of prompts on Hopper, in one warp-specialised kernel over the paged cache.

One warp copies keys and values from their pages to a ring in shared memory; two warp groups
multiply, each with 64 rows of its own. Each asks for two GEMMs at a time, the scores of a tile of
keys and the sum of the previous tile's values; while it computes a softmax, the tensor cores work
for the other. ``paged_attention`` has the same function for every GPU and dtype, and splits keys
where a batch has too few queries to fill the GPU. The cache may hold a part of the keys, as there.

Written in Gluon, Triton's language of explicit layouts, which has no interpreter: the tests of this
file need the GPU.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ostinato.attention.paged import PagedBatch
from ostinato.attention.triton.hopper.pages import ROWS, describe_pages
from ostinato.attention.triton.hopper.prefill_warps import (
    BLOCK_M,
    STAGES,
    consume,
    num_own,
    produce,
)
from ostinato.attention.triton.tile_config import PREFILL_ROWS
from ostinato.ops.triton.launch import launch, next_power_of_2

SEARCH = gl.constexpr(128)


@gluon.jit
def _find_request(query_start_loc, tile, num_reqs, BLOCK_Q: gl.constexpr):
    """The last request whose tiles start at or before ``tile``."""
    count = 0
    for first in range(0, num_reqs, SEARCH):
        request = first + gl.arange(0, SEARCH, gl.BlockedLayout([1], [32], [4], [0]))
        there = request < num_reqs
        start = gl.load(query_start_loc + request, mask=there, other=0)
        first_tile = (start + request * (BLOCK_Q - 1)) // BLOCK_Q
        count += gl.sum((there & (first_tile <= tile)).to(gl.int32), axis=0)
    return count - 1


@gluon.jit(do_not_specialize=["num_reqs", "max_keys"])
def prefill_kernel(
    key_pages,
    value_pages,
    query,
    out,
    query_start_loc,
    seq_lens,
    block_table,
    sinks,
    scale,
    window,
    soft_cap,
    num_reqs,
    max_keys,
    query_token_stride,
    query_head_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    HEAD_PAD: gl.constexpr,
    VALUE_PAD: gl.constexpr,
    PAGE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SEVERAL: gl.constexpr,
    LSE: gl.constexpr,
    SIZE: gl.constexpr,
    RANK: gl.constexpr,
    INTERLEAVE: gl.constexpr,
):
    """One program per tile of at most BLOCK_M // GROUP queries of one request, and KV head.

    Tiles are found as in ``paged_attention.attend_kernel``. The last come first: they have the
    most keys where a prompt is long, and no program is left to work alone at the end. SEVERAL:
    requests of a single query, with keys, are left out. LSE, and SIZE to INTERLEAVE, are as there.
    """
    BLOCK_Q: gl.constexpr = BLOCK_M // GROUP
    program = gl.num_programs(0) - 1 - gl.program_id(0)
    tile = program // NUM_KV_HEADS
    kv_head = program % NUM_KV_HEADS
    request = _find_request(query_start_loc, tile, num_reqs, BLOCK_Q)
    start = gl.load(query_start_loc + request)
    query_len = gl.load(query_start_loc + request + 1) - start
    first_query = (tile - (start + request * (BLOCK_Q - 1)) // BLOCK_Q) * BLOCK_Q
    # Keys beyond the table are promised only by the dummy batches of a capture.
    seq_len = gl.minimum(gl.load(seq_lens + request), max_keys)
    if first_query >= query_len:
        return
    part = (SIZE, RANK, INTERLEAVE)
    context = seq_len - query_len
    if SIZE > 1:
        seq_len = num_own(seq_len, part)
    if SEVERAL:  # noqa: SIM102 (decided when the kernel is compiled)
        if (query_len == 1) & (seq_len > 0):
            return
    last = context + gl.minimum(first_query + BLOCK_Q, query_len) - 1
    first = 0
    if window is not None:
        first = gl.maximum(gl.maximum(context + first_query, 0) - window + 1, 0)
    if SIZE > 1:  # from here on keys are counted as this part has them
        first = num_own(first, part)
        last = num_own(last + 1, part) - 1
    begin = first // BLOCK_N * BLOCK_N
    # At least one tile, which may be all masked: a batch may promise keys that are not there.
    num_tiles = gl.maximum(gl.cdiv(last + 1 - begin, BLOCK_N), 1)
    num_unmasked = gl.maximum(context + first_query + 1, 0) // BLOCK_N
    if SIZE > 1:
        num_unmasked = num_own(context + first_query + 1, part) // BLOCK_N
    if window is not None:
        num_unmasked = 0
    # Pages at both ends may hold more than the queries see: slots that slid out of the window, in
    # the first tile, and slots that the request has not written yet, in the last.
    stale_to = 0
    if first % PAGE != 0:
        stale_to = first - begin
    stale_from = BLOCK_N
    if seq_len < (last // PAGE + 1) * PAGE:
        stale_from = seq_len - begin - (num_tiles - 1) * BLOCK_N
    request_table = block_table + request.to(gl.int64) * table_stride

    dtype: gl.constexpr = query.dtype.element_ty
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_PAD], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_PAD], dtype)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, VALUE_PAD], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [2, ROWS, HEAD_PAD], q_layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_PAD], k_layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, VALUE_PAD], v_layout)
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    barriers = (k_full, k_empty, v_full, v_empty)
    tiles = (begin, num_tiles, num_unmasked, stale_to, stale_from)
    work = (start, query_len, first_query, context, tiles)
    rows = (query, out, query_token_stride, query_head_stride, out_token_stride, out_head_stride)
    scoring = (sinks, scale, window, soft_cap)
    gl.warp_specialize(
        [
            (
                consume,
                (
                    work, rows, scoring, kv_head, q_smem.index(0), k_smem, v_smem, barriers,
                    GROUP, HEAD_DIM, VALUE_DIM, 0, LSE, SIZE, RANK, INTERLEAVE,
                ),
            ),
            (
                consume,
                (
                    work, rows, scoring, kv_head, q_smem.index(1), k_smem, v_smem, barriers,
                    GROUP, HEAD_DIM, VALUE_DIM, ROWS, LSE, SIZE, RANK, INTERLEAVE,
                ),
            ),
            (
                produce,
                (
                    key_pages, value_pages, request_table, kv_head, first, last, begin, num_tiles,
                    k_smem, v_smem, barriers, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, PAGE,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def prefill_attention(
    query: torch.Tensor,
    batch: PagedBatch,
    *,
    leave_single: bool = False,
    part: tuple[int, int, int] | None = None,
) -> None:
    """Attention of ``query`` [T, H, D] over what is in the cache, to ``out``.

    ``leave_single``: leave requests of a single query to ``stream_decode``. ``part``: as for
    ``paged_attention``.
    """
    key_cache, value_cache, out, query_start_loc, seq_lens, block_table = batch[:6]
    num_tokens, num_heads, value_dim = out.shape
    num_kv_heads = key_cache.shape[2]
    group = num_heads // num_kv_heads
    num_reqs = query_start_loc.shape[0] - 1
    block_q = PREFILL_ROWS // group
    num_tiles = (num_tokens + num_reqs * (block_q - 1)) // block_q
    head_dim = query.shape[2]
    head_pad = max(64, next_power_of_2(head_dim))
    value_pad = max(64, next_power_of_2(value_dim))
    block_n = 64 if max(head_pad, value_pad) > 128 else 128
    page = min(key_cache.shape[1], block_n)
    size, rank, interleave = part or (1, 0, 1)
    launch(
        prefill_kernel,
        (num_tiles * num_kv_heads,),
        (
            query,
            out,
            query_start_loc,
            seq_lens,
            block_table,
            batch.sinks,
        ),
        (
            batch.scale,
            batch.window,
            batch.soft_cap,
            num_reqs,
            block_table.shape[1] * key_cache.shape[1] * size,
            *query.stride()[:2],
            *out.stride()[:2],
            block_table.stride(0),
        ),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        BLOCK_SIZE=key_cache.shape[1],
        HEAD_PAD=head_pad,
        VALUE_PAD=value_pad,
        PAGE=page,
        BLOCK_N=block_n,
        SEVERAL=leave_single,
        LSE=part is not None,
        SIZE=size,
        RANK=rank,
        INTERLEAVE=interleave,
        descriptors=(describe_pages(key_cache, page), describe_pages(value_cache, page)),
        num_warps=4,
    )
