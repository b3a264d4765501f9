# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call,assignment"
"""Attention of single queries on Hopper at the pace of memory, however long their contexts are.

One program per SM. All tiles of keys of all requests and KV heads form a line that the programs
share evenly (stream-K), so long contexts among short ones leave no SM idle. In a program one warp
copies pages to a ring in shared memory, without a pause from one request to the next, and a warp
group multiplies. Where programs share a request and KV head, each writes its part of the softmax to
memory and increments a counter; the last to finish combines the parts.

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
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostinato.attention.paged import PagedBatch
from ostinato.attention.triton.hopper_pages import (
    CHUNK,
    LOG2_E,
    ROWS,
    copy_pages,
    describe_pages,
    describe_rows,
    keep_rows,
    mma_layout,
)
from ostinato.attention.triton.softmax import empty_parts
from ostinato.attention.triton.stream_parts import combine_parts, part_of, store_lse, store_rows
from ostinato.attention.triton.tile_config import STREAM_GROUP, StreamRule
from ostinato.ops.triton.counters import take_counters
from ostinato.ops.triton.launch import launch, next_power_of_2, num_sms, overlap

MIN_TILES = gl.constexpr(2)  # of a program, where that leaves enough for one
QUERY_STAGES = gl.constexpr(2)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _tiles_of(batch, request, there, BLOCK_N: gl.constexpr):
    """A request's query, its keys, the first tile that is seen, and the tiles from there on.

    A request of several queries, or of none, has 0 tiles. Without ``query_start_loc``, request r
    has query r, or no keys.
    """
    query_start_loc, seq_lens, max_keys, window = batch
    # Only dummy batches of a capture claim more keys than the table has room for.
    seq_len = gl.minimum(gl.load(seq_lens + request, mask=there, other=0), max_keys)
    seq_len = gl.maximum(seq_len, 0)
    start = request
    if query_start_loc is not None:
        start = gl.load(query_start_loc + request, mask=there, other=0)
        stop = gl.load(query_start_loc + request + 1, mask=there, other=0)
        seq_len = gl.where(stop - start == 1, seq_len, 0)
    first = seq_len * 0
    if window is not None:
        first = gl.maximum(seq_len - window, 0) // BLOCK_N
    return start, seq_len, first, gl.cdiv(seq_len, BLOCK_N) - first


@gluon.jit
def _first_key(seq_len, window):
    first = 0
    if window is not None:
        first = gl.maximum(seq_len - window, 0)
    return first


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
def _produce(
    query_rows,
    key_pages,
    value_pages,
    batch,
    block_table,
    table_stride,
    span,
    q_smem,
    k_smem,
    v_smem,
    barriers,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    PAGE: gl.constexpr,
):
    """Copy the queries, keys and values of the program's tiles, in order."""
    tile, end, request, before = span
    q_full, q_empty, full, empty = barriers
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    Q_ROWS: gl.constexpr = query_rows.block_shape[0]
    CHUNKS: gl.constexpr = k_smem.shape[2] // CHUNK
    step = 0
    segment = 0
    while tile < end:
        token, seq_len, first, count = _tiles_of(batch, request, True, BLOCK_N)
        first_key = _first_key(seq_len, batch[3])
        table = block_table + request.to(gl.int64) * table_stride
        stop = gl.minimum(before + count * NUM_KV_HEADS, end)
        while tile < stop:
            head = (tile - before) // count
            skipped = (tile - before) % count
            num = gl.minimum(count - skipped, end - tile)
            q_stage = segment % QUERY_STAGES
            q_rows = q_smem.index(q_stage)._reinterpret(
                q_smem.dtype, [CHUNKS * (ROWS // Q_ROWS), Q_ROWS, CHUNK], query_rows.layout
            )
            mbarrier.wait(q_empty.index(q_stage), (segment // QUERY_STAGES + 1) & 1)
            mbarrier.expect(q_full.index(q_stage), Q_ROWS * CHUNKS * CHUNK * 2)
            for chunk in gl.static_range(CHUNKS):
                tma.async_copy_global_to_shared(
                    query_rows,
                    [(token * NUM_KV_HEADS + head) * GROUP, chunk * CHUNK],
                    q_full.index(q_stage),
                    q_rows.index(chunk * (ROWS // Q_ROWS)),
                )
            for j in range(num):
                stage = step % STAGES
                rows = ()
                for page in gl.static_range(0, BLOCK_N, PAGE):
                    position = (first + skipped + j) * BLOCK_N + page
                    # Other entries of the table may hold anything. Rows outside of the cache
                    # become zeros.
                    needed = (position + PAGE > first_key) & (position < seq_len)
                    block = gl.load(table + position // BLOCK_SIZE, mask=needed, other=0)
                    row = block * BLOCK_SIZE + position % BLOCK_SIZE
                    rows = rows + (gl.where(needed, row, key_pages.shape[0]),)  # noqa: RUF005
                mbarrier.wait(empty.index(stage), (step // STAGES + 1) & 1)
                barrier = full.index(stage)
                copy_pages(key_pages, rows, head * HEAD_DIM, barrier, k_smem.index(stage), PAGE)
                copy_pages(value_pages, rows, head * VALUE_DIM, barrier, v_smem.index(stage), PAGE)
                step += 1
            segment += 1
            tile += num
        before += count * NUM_KV_HEADS
        request += 1


@gluon.jit
def _softmax(scores, highest, total, low, high, scoring):
    """The weights of a tile to the base 2, and what the rows' highest, total and sums become."""
    _, scale, soft_cap = scoring
    n = gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))
    if soft_cap is not None:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)), right at both infinities.
        doubled = gl.exp2(scores * (scale / soft_cap * 2.0 * LOG2_E))
        scores = (1.0 - 2.0 / (1.0 + doubled)) * (soft_cap * LOG2_E)
        factor = 1.0
    else:
        factor = scale * LOG2_E
    scores = gl.where(((n >= low) & (n < high))[None, :], scores, float("-inf"))
    # Finite: a query sees at least one key of every tile.
    new_highest = gl.maximum(highest, gl.max(scores, axis=1))
    weights = gl.exp2(scores * factor - (new_highest * factor)[:, None])
    faded = gl.exp2((highest - new_highest) * factor)
    return weights, new_highest, total * faded + gl.sum(weights, axis=1), faded


@gluon.jit
def _attend(
    step, num, position, first_key, seq_len, q_smem, k_smem, v_smem, full, empty, state, scoring
):
    """``num`` tiles from ``position`` on: the scores of one while the last one's values are added.

    Slots before ``first_key`` or from ``seq_len`` on, which share a page with keys that are seen,
    may hold anything; ``keep_rows`` drops their values.
    """
    highest, total = state
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    VALUE_PAD: gl.constexpr = v_smem.shape[2]
    scores_layout: gl.constexpr = mma_layout(BLOCK_N)
    values_layout: gl.constexpr = mma_layout(VALUE_PAD)
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, values_layout, 2)
    no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, scores_layout)
    values = gl.zeros([ROWS, VALUE_PAD], gl.float32, values_layout)

    stage = step % STAGES
    mbarrier.wait(full.index(stage), (step // STAGES) & 1)
    scores = warpgroup_mma(
        q_smem, k_smem.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True
    )
    low, high = first_key - position, seq_len - position
    if (low > 0) | (high < BLOCK_N):
        keep_rows(v_smem.index(stage), low, high)
    scores = warpgroup_mma_wait(0, deps=[scores])
    weights, highest, total, _ = _softmax(scores, highest, total, low, high, scoring)
    weights = gl.convert_layout(weights.to(v_smem.dtype), operand_layout)
    for j in range(1, num):
        last = (step + j - 1) % STAGES
        stage = (step + j) % STAGES
        mbarrier.wait(full.index(stage), ((step + j) // STAGES) & 1)
        scores = warpgroup_mma(
            q_smem, k_smem.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True
        )
        values = warpgroup_mma(weights, v_smem.index(last), values, is_async=True)
        high = seq_len - position - j * BLOCK_N
        if high < BLOCK_N:
            keep_rows(v_smem.index(stage), 0, high)
        scores = warpgroup_mma_wait(1, deps=[scores])
        new_weights, highest, total, faded = _softmax(scores, highest, total, 0, high, scoring)
        new_weights = gl.convert_layout(new_weights.to(v_smem.dtype), operand_layout)
        values, weights = warpgroup_mma_wait(0, deps=[values, new_weights])
        mbarrier.arrive(empty.index(last), count=1)
        values = values * gl.convert_layout(faded, gl.SliceLayout(1, values_layout))[:, None]
    last = (step + num - 1) % STAGES
    values = warpgroup_mma(weights, v_smem.index(last), values, is_async=True)
    values = warpgroup_mma_wait(0, deps=[values])
    mbarrier.arrive(empty.index(last), count=1)
    return values, highest, total


@gluon.jit
def _consume(
    batch,
    rows,
    scoring,
    parts,
    counters,
    line,
    span,
    q_smem,
    k_smem,
    v_smem,
    barriers,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    VALUE_DIM: gl.constexpr,
    LSE: gl.constexpr,
):
    """The softmax over the program's tiles. The first GROUP of 64 rows are queries."""
    out, out_token_stride, out_head_stride = rows
    sinks, scale, soft_cap = scoring
    part_values, part_highest, part_total = parts
    program, num_programs, num_tiles = line
    tile, end, request, before = span
    q_full, q_empty, full, empty = barriers
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    VALUE_PAD: gl.constexpr = v_smem.shape[2]
    state_layout: gl.constexpr = gl.SliceLayout(1, mma_layout(BLOCK_N))
    row_layout: gl.constexpr = gl.SliceLayout(1, mma_layout(VALUE_PAD))
    m = gl.arange(0, ROWS, state_layout)
    r = gl.arange(0, ROWS, row_layout)
    step = 0
    segment = 0
    while tile < end:
        token, seq_len, first, count = _tiles_of(batch, request, True, BLOCK_N)
        first_key = _first_key(seq_len, batch[3])
        stop = gl.minimum(before + count * NUM_KV_HEADS, end)
        while tile < stop:
            head = (tile - before) // count
            skipped = (tile - before) % count
            num = gl.minimum(count - skipped, end - tile)
            highest = gl.full([ROWS], float("-inf"), gl.float32, state_layout)
            total = gl.zeros([ROWS], gl.float32, state_layout)
            if sinks is not None:  # as if they were a first key without value
                sink = gl.load(sinks + head * GROUP + m, mask=m < GROUP, other=0.0).to(gl.float32)
                # In the units of ``highest``: before the scale, or after the soft cap.
                sink = sink * LOG2_E if soft_cap is not None else sink / scale
                highest = gl.where(skipped == 0, sink, highest)
                total = gl.where(skipped == 0, 1.0, total)
            q_stage = segment % QUERY_STAGES
            mbarrier.wait(q_full.index(q_stage), (segment // QUERY_STAGES) & 1)
            values, highest, total = _attend(
                step, num, (first + skipped) * BLOCK_N, first_key, seq_len,
                q_smem.index(q_stage), k_smem, v_smem, full, empty, (highest, total), scoring,
            )  # fmt: skip
            mbarrier.arrive(q_empty.index(q_stage), count=1)

            total = gl.convert_layout(total, row_layout)
            target = out + token.to(gl.int64) * out_token_stride + head * GROUP * out_head_stride
            if num == count:
                store_rows(target, values / total[:, None], out_head_stride, GROUP, VALUE_DIM)
                if LSE:
                    factor = 1.0 if soft_cap is not None else scale * LOG2_E
                    peak = gl.convert_layout(highest * factor, row_layout)
                    store_lse(target, peak, total, out_head_stride, GROUP, VALUE_DIM)
            else:
                start = (before + head * count).to(gl.int64)
                first_program = (((start + 1) * num_programs - 1) // num_tiles).to(gl.int32)
                last_program = (((start + count) * num_programs - 1) // num_tiles).to(gl.int32)
                part = part_of(program, first_program) * GROUP
                factor = 1.0 if soft_cap is not None else scale * LOG2_E
                peak = gl.convert_layout(highest * factor, row_layout)
                gl.store(part_highest + part + r, peak, mask=r < GROUP)
                gl.store(part_total + part + r, total, mask=r < GROUP)
                store_rows(part_values + part * VALUE_DIM, values, VALUE_DIM, GROUP, VALUE_DIM)
                gl.thread_barrier()  # all threads have written before one counts the program
                pair = counters + request * NUM_KV_HEADS + head
                arrived = gl.atomic_add(pair, 1, sem="acq_rel", scope="gpu")
                if arrived == last_program - first_program:
                    combine_parts(
                        parts, target, out_head_stride, first_program, last_program,
                        GROUP, VALUE_DIM, VALUE_PAD, LSE,
                    )  # fmt: skip
            step += num
            segment += 1
            tile += num
        before += count * NUM_KV_HEADS
        request += 1


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
    _, seq_len, _, per_head = _tiles_of(batch, r, r < num_reqs, BLOCK_N)
    count = per_head * NUM_KV_HEADS
    end = gl.associative_scan(count, 0, _add)
    num_tiles = gl.sum(count, axis=0)
    num_programs = gl.minimum(gl.num_programs(0), gl.maximum(num_tiles // MIN_TILES, 1))
    if OVERLAP:
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
    if idle:
        return
    first, request, before = _begin(program, num_programs, num_tiles, count, end)
    last, _, _ = _begin(program + 1, num_programs, num_tiles, count, end)
    if last <= first:
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
                _consume,
                (
                    batch, rows, scoring, parts, counters, line, span,
                    q_smem, k_smem, v_smem, barriers, NUM_KV_HEADS, GROUP, VALUE_DIM, LSE,
                ),
            ),
            (
                _produce,
                (
                    query_rows, key_pages, value_pages, batch, block_table, table_stride, span,
                    q_smem, k_smem, v_smem, barriers,
                    NUM_KV_HEADS, GROUP, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, PAGE,
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
    )


def _ring(width: int) -> tuple[int, int]:
    """Keys of a tile, and stages: about 190 KB for all of them."""
    return {64: (128, 6), 128: (64, 6), 256: (32, 5)}[width]
