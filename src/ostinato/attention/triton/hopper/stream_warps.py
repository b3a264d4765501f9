# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call,assignment"
"""What the warps of ``stream_decode_kernel`` do: one copies, a warp group multiplies. In Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from ostinato.attention.triton.hopper.pages import (
    CHUNK,
    ROWS,
    copy_pages,
    keep_rows,
    mma_layout,
)
from ostinato.attention.triton.hopper.softmax import LOG2_E, capped
from ostinato.attention.triton.hopper.stream_parts import (
    combine_parts,
    part_of,
    store_lse,
    store_rows,
)

QUERY_STAGES = gl.constexpr(2)


@gluon.jit
def tiles_of(batch, request, there, BLOCK_N: gl.constexpr):
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
def _copy_tile(
    key_pages,
    value_pages,
    tiles,
    j,
    step,
    k_smem,
    v_smem,
    full,
    empty,
    HEAD_DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    PAGE: gl.constexpr,
):
    """Copy tile ``j`` of ``tiles``, once its stage of the ring is free."""
    table, first_tile, first_key, seq_len, head = tiles
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    stage = step % STAGES
    rows = ()
    for page in gl.static_range(0, BLOCK_N, PAGE):
        position = (first_tile + j) * BLOCK_N + page
        # Other entries of the table may hold anything. Rows outside of the cache become zeros.
        needed = (position + PAGE > first_key) & (position < seq_len)
        block = gl.load(table + position // BLOCK_SIZE, mask=needed, other=0)
        row = block * BLOCK_SIZE + position % BLOCK_SIZE
        rows = rows + (gl.where(needed, row, key_pages.shape[0]),)  # noqa: RUF005
    mbarrier.wait(empty.index(stage), (step // STAGES + 1) & 1)
    barrier = full.index(stage)
    copy_pages(key_pages, rows, head * HEAD_DIM, barrier, k_smem.index(stage), PAGE)
    copy_pages(value_pages, rows, head * VALUE_DIM, barrier, v_smem.index(stage), PAGE)


@gluon.jit
def produce(
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
    AHEAD: gl.constexpr,
):
    """Copy the queries, keys and values of the program's tiles, in order.

    AHEAD: before the wait for the previous kernel, which writes the queries and each request's last
    key, fill the ring with tiles of older keys.
    """
    tile, end, request, before = span
    q_full, q_empty, full, empty = barriers
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    Q_ROWS: gl.constexpr = query_rows.block_shape[0]
    CHUNKS: gl.constexpr = k_smem.shape[2] // CHUNK
    step = 0
    segment = 0
    while tile < end:
        token, seq_len, first, count = tiles_of(batch, request, True, BLOCK_N)
        first_key = _first_key(seq_len, batch[3])
        table = block_table + request.to(gl.int64) * table_stride
        stop = gl.minimum(before + count * NUM_KV_HEADS, end)
        while tile < stop:
            head = (tile - before) // count
            skipped = (tile - before) % count
            num = gl.minimum(count - skipped, end - tile)
            tiles = (table, first + skipped, first_key, seq_len, head)
            ahead = 0
            if AHEAD:
                if segment == 0:
                    older = (seq_len - 1) // BLOCK_N - (first + skipped)
                    ahead = gl.minimum(gl.minimum(num, STAGES), gl.maximum(older, 0))
                for j in range(ahead):
                    _copy_tile(
                        key_pages, value_pages, tiles, j, step + j, k_smem, v_smem, full, empty,
                        HEAD_DIM, VALUE_DIM, BLOCK_SIZE, PAGE,
                    )  # fmt: skip
                gdc_wait()
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
            for j in range(ahead, num):
                _copy_tile(
                    key_pages, value_pages, tiles, j, step + j, k_smem, v_smem, full, empty,
                    HEAD_DIM, VALUE_DIM, BLOCK_SIZE, PAGE,
                )  # fmt: skip
            step += num
            segment += 1
            tile += num
        before += count * NUM_KV_HEADS
        request += 1


@gluon.jit
def _softmax(scores, highest, total, low, high, scoring):
    """The weights of a tile to the base 2, and what the rows' highest, total and sums become."""
    _, scale, soft_cap = scoring
    n = gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))
    scores, factor = capped(scores, scale, soft_cap)
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
def consume(
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
        token, seq_len, first, count = tiles_of(batch, request, True, BLOCK_N)
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
