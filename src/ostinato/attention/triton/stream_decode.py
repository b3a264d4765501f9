# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call,assignment"
"""Attention of single queries on Hopper at the pace of memory, however long their contexts are.

One program per SM. All tiles of keys of all requests and KV heads form a line that the programs
share evenly (stream-K), so long contexts among short ones leave no SM idle. In a program one warp
copies pages to a ring in shared memory, without a pause from one request to the next, and a warp
group multiplies. Where programs share a request and KV head, each writes its part of the softmax to
memory and increments a counter; the last to finish combines the parts.

OVERLAP: before the wait, the ring is filled with keys and values that were written before the
forward began: of a decode batch, all but the last of each request. Those are complete: a forward
begins with the lookup of embeddings, a kernel of torch's that starts when all before it have ended,
and nothing of the forward starts before that one has.

With a ``StreamRule`` the kernel leaves batches to ``decode_attention`` that the rule does not ask
even shares for.

With LSE, the log-sum-exp of a row's scores goes behind its values, for caches that hold a part of
the keys; in a decode batch, that of requests without keys is -inf.

Requests with several queries are left to ``prefill_attention``. Written in Gluon, like that kernel,
and so tested on the GPU only.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostinato.attention.paged import PagedBatch
from ostinato.attention.triton.hopper.pages import ROWS, describe_pages, describe_rows
from ostinato.attention.triton.hopper.stream_warps import (
    QUERY_STAGES,
    consume,
    produce,
    tiles_of,
)
from ostinato.attention.triton.softmax import empty_parts
from ostinato.attention.triton.tile_config import STREAM_GROUP, StreamRule
from ostinato.ops.triton.counters import take_counters
from ostinato.ops.triton.launch import launch, next_power_of_2, num_sms, overlap

MIN_TILES = gl.constexpr(2)  # of a program, where that leaves enough for one


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _begin(program, num_programs, total, count, end):
    """Where a program begins: its tile, the tile's request, and the tiles before that request."""
    tile = (program.to(gl.int64) * total // num_programs).to(gl.int32)
    passed = end <= tile
    return (
        tile,
        gl.sum(passed.to(gl.int32), axis=0),
        gl.sum(gl.where(passed, count, 0), axis=0),
    )


@gluon.jit
def _shares_evenly(seq_len, min_longest, min_spread):
    """Whether ``StreamRule`` asks for even shares; ``decode_attention`` computes the same."""
    seq_len = seq_len.to(gl.int64)
    longest = gl.max(seq_len, axis=0)
    all_keys = gl.sum(seq_len, axis=0)
    with_keys = gl.sum((seq_len > 0).to(gl.int64), axis=0)
    return (longest >= min_longest) & (2 * longest * with_keys >= min_spread * all_keys)


@gluon.jit(do_not_specialize=["num_reqs", "max_keys", "min_longest", "min_spread"])
def stream_decode_kernel(
    query_rows,
    key_pages,
    value_pages,
    out,
    query_start_loc,
    seq_lens,
    block_table,
    sinks,
    part_values,
    part_highest,
    part_total,
    counters,
    scale,
    window,
    soft_cap,
    num_reqs,
    max_keys,
    min_longest,
    min_spread,
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
    REQS: gl.constexpr,
    STAGES: gl.constexpr,
    LSE: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """One program per SM, of which as many work as there are tiles for."""
    if OVERLAP:
        gdc_launch_dependents()
    program = gl.program_id(0)
    batch = (query_start_loc, seq_lens, max_keys, window)
    r = gl.arange(0, REQS, gl.BlockedLayout([REQS // 128], [32], [4], [0]))
    _, seq_len, _, per_head = tiles_of(batch, r, r < num_reqs, BLOCK_N)
    count = per_head * NUM_KV_HEADS
    end = gl.associative_scan(count, 0, _add)
    num_tiles = gl.sum(count, axis=0)
    num_programs = gl.minimum(gl.num_programs(0), gl.maximum(num_tiles // MIN_TILES, 1))
    AHEAD: gl.constexpr = OVERLAP and not LSE and query_start_loc is None
    if OVERLAP and not AHEAD:
        gdc_wait()  # in every program: the next kernel waits for this one alone
    if LSE and query_start_loc is None:
        nothing = gl.full([REQS], float("-inf"), gl.float32, r.type.layout)
        row_end = out + r.to(gl.int64) * out_token_stride + VALUE_DIM
        for head in range(program, NUM_KV_HEADS * GROUP, gl.num_programs(0)):
            keyless = (r < num_reqs) & (count == 0)
            gl.store(row_end + head * out_head_stride, nothing, mask=keyless)
    idle = program >= num_programs
    if min_longest is not None:
        idle = idle | ~_shares_evenly(seq_len, min_longest, min_spread)
    first, request, before = _begin(program, num_programs, num_tiles, count, end)
    last, _, _ = _begin(program + 1, num_programs, num_tiles, count, end)
    if idle | (last <= first):
        if AHEAD:
            gdc_wait()
        return

    dtype: gl.constexpr = key_pages.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_PAD], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_PAD], dtype)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, VALUE_PAD], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [QUERY_STAGES, ROWS, HEAD_PAD], q_layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_PAD], k_layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, VALUE_PAD], v_layout)
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [QUERY_STAGES, 1], barrier_layout)
    q_empty = gl.allocate_shared_memory(gl.int64, [QUERY_STAGES, 1], barrier_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    for stage in gl.static_range(QUERY_STAGES):
        mbarrier.init(q_full.index(stage), count=1)
        mbarrier.init(q_empty.index(stage), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2)  # the keys have come, and so have the values
        mbarrier.init(empty.index(stage), count=1)
    barriers = (q_full, q_empty, full, empty)
    rows = (out, out_token_stride, out_head_stride)
    scoring = (sinks, scale, soft_cap)
    parts = (part_values, part_highest, part_total)
    line = (program, num_programs, num_tiles)
    span = (first, last, request, before)
    gl.warp_specialize(
        [
            (
                consume,
                (
                    batch, rows, scoring, parts, counters, line, span,
                    q_smem, k_smem, v_smem, barriers, NUM_KV_HEADS, GROUP, VALUE_DIM, LSE,
                ),
            ),
            (
                produce,
                (
                    query_rows, key_pages, value_pages, batch, block_table, table_stride, span,
                    q_smem, k_smem, v_smem, barriers,
                    NUM_KV_HEADS, GROUP, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, PAGE, AHEAD,
                ),
            ),
        ],
        [1],
        [64],
    )  # fmt: skip


def stream_decode(
    query: torch.Tensor,
    batch: PagedBatch,
    *,
    rule: StreamRule | None = None,
    lse: bool = False,
) -> None:
    """Attention of requests with one query and at least one key, to their rows of ``out``.

    ``query`` [T, H, D] must be contiguous, and H at most ``STREAM_GROUP`` times the KV heads.
    ``rule``: of a decode batch, for which ``decode_attention`` ran with the same rule.
    ``lse``: write the log-sum-exp; rows of ``out``, in float32, must have room behind their values.
    """
    key_cache, value_cache, out, query_start_loc, seq_lens, block_table = batch[:6]
    _, num_heads, value_dim = out.shape
    _, block_size, num_kv_heads, head_dim = key_cache.shape
    num_reqs, group = seq_lens.shape[0], num_heads // num_kv_heads
    head_pad, value_pad = (max(64, next_power_of_2(width)) for width in (head_dim, value_dim))
    block_n, stages = _ring(max(head_pad, value_pad))
    page = min(block_size, block_n)
    num_programs = num_sms(out.device)
    launch(
        stream_decode_kernel,
        (num_programs,),
        (
            out,
            None if batch.uniform_decode else query_start_loc,
            seq_lens,
            block_table,
            batch.sinks,
            *empty_parts(2 * num_programs * group, value_dim, out.device),
            take_counters(out.device, num_reqs * num_kv_heads),
        ),
        (
            batch.scale,
            batch.window,
            batch.soft_cap,
            num_reqs,
            block_table.shape[1] * block_size,
            *(rule or (None, None)),
            *out.stride()[:2],
            block_table.stride(0),
        ),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        BLOCK_SIZE=block_size,
        HEAD_PAD=head_pad,
        VALUE_PAD=value_pad,
        PAGE=page,
        BLOCK_N=block_n,
        REQS=max(128, next_power_of_2(num_reqs)),
        STAGES=stages,
        LSE=lse,
        descriptors=(
            describe_rows(query.view(-1, head_dim), STREAM_GROUP),
            describe_pages(key_cache, page),
            describe_pages(value_cache, page),
        ),
        **overlap(out.device),
        num_warps=4,
        # 255, which the compiler would take, for 256 threads are all registers of an SM.
        maxnreg=168,
    )


def _ring(width: int) -> tuple[int, int]:
    """Keys of a tile, and stages: 128 KB for all of them.

    More would leave no room for the kernel before, beside which the ring is filled, and the one
    after, which loads its weight. With 192 KB, 8,192 keys took 10% and 32,768 5% more time.
    """
    return {64: (128, 4), 128: (64, 4), 256: (32, 4)}[width]
