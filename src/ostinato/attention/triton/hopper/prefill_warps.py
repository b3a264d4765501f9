# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call,assignment"
"""What the warps of ``prefill_kernel`` do: one copies, two warp groups multiply. In Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ostinato.attention.triton.hopper.pages import (
    ROWS,
    copy_layout,
    copy_pages,
    keep_rows,
    mma_layout,
)
from ostinato.attention.triton.hopper.softmax import LOG2_E, capped
from ostinato.attention.triton.tile_config import PREFILL_ROWS

BLOCK_M = gl.constexpr(PREFILL_ROWS)  # rows of a program, which has two warp groups
STAGES = gl.constexpr(2)


@gluon.jit
def produce(
    key_pages,
    value_pages,
    request_table,
    kv_head,
    first,
    last,
    begin,
    num_tiles,
    k_smem,
    v_smem,
    barriers,
    HEAD_DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    PAGE: gl.constexpr,
):
    """Copy ``num_tiles`` tiles of keys and values, from position ``begin`` on."""
    k_full, k_empty, v_full, v_empty = barriers
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    for tile in range(num_tiles):
        stage = tile % STAGES
        phase = (tile // STAGES + 1) & 1  # passes at once while the ring is new
        rows = ()
        for page in gl.static_range(0, BLOCK_N, PAGE):
            position = begin + tile * BLOCK_N + page
            # Entries of the table that no query needs may hold anything. Rows outside of the cache
            # become zeros.
            needed = (position + PAGE > first) & (position <= last)
            block = gl.load(request_table + position // BLOCK_SIZE, mask=needed, other=0)
            row = block * BLOCK_SIZE + position % BLOCK_SIZE
            row = gl.where(needed, row, key_pages.shape[0])
            rows = rows + (row,)  # noqa: RUF005 (kernels know no stars)
        mbarrier.wait(k_empty.index(stage), phase)
        copy_pages(
            key_pages, rows, kv_head * HEAD_DIM, k_full.index(stage), k_smem.index(stage), PAGE
        )
        mbarrier.wait(v_empty.index(stage), phase)
        copy_pages(
            value_pages, rows, kv_head * VALUE_DIM, v_full.index(stage), v_smem.index(stage), PAGE
        )


@gluon.jit
def num_own(count, part):
    """How many of the first ``count`` keys are in this part."""
    size, rank, interleave = part
    count = gl.maximum(count, 0)
    rest = count % (size * interleave) - rank * interleave
    return count // (size * interleave) * interleave + gl.minimum(gl.maximum(rest, 0), interleave)


@gluon.jit
def _position_of(key, part):
    """The position of this part's key number ``key``."""
    size, rank, interleave = part
    if size > 1:
        key = (key // interleave * size + rank) * interleave + key % interleave
    return key


@gluon.jit
def _softmax(scores, highest, total, position, key_position, scoring, MASKED: gl.constexpr):
    """The weights of a tile to the base 2, and what the rows' highest, total and sums become."""
    _, scale, window, soft_cap = scoring
    scores, factor = capped(scores, scale, soft_cap)
    if MASKED:
        distance = position[:, None] - key_position[None, :]
        visible = distance >= 0
        if window is not None:
            visible = visible & (distance < window)
        scores = gl.where(visible, scores, float("-inf"))
    new_highest = gl.maximum(highest, gl.max(scores, axis=1))
    base = new_highest
    if MASKED:  # an infinity less itself would be NaN
        base = gl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = gl.exp2(scores * factor - (base * factor)[:, None])
    faded = gl.exp2((highest - base) * factor)
    total = total * faded + gl.sum(weights, axis=1)
    return weights, new_highest, total, faded


@gluon.jit
def _tiles(
    first_tile,
    end_tile,
    begin,
    q_smem,
    k_smem,
    v_smem,
    barriers,
    state,
    position,
    scoring,
    part,
    MASKED: gl.constexpr,
):
    """Tiles [first_tile, end_tile): the scores of one while the values of the last are added."""
    k_full, k_empty, v_full, v_empty = barriers
    weights, values, highest, total = state
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    scores_layout: gl.constexpr = mma_layout(BLOCK_N)
    values_layout: gl.constexpr = mma_layout(v_smem.shape[2])
    no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, scores_layout)
    for tile in range(first_tile, end_tile):
        stage = tile % STAGES
        phase = (tile // STAGES) & 1
        mbarrier.wait(k_full.index(stage), phase)
        scores = warpgroup_mma(
            q_smem, k_smem.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True
        )
        previous = (tile - 1) % STAGES
        mbarrier.wait(v_full.index(previous), ((tile - 1) // STAGES) & 1)
        values = warpgroup_mma(weights, v_smem.index(previous), values, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k_empty.index(stage), count=1)
        key_position = begin + tile * BLOCK_N
        key_position += gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores_layout))
        key_position = _position_of(key_position, part)
        new_weights, highest, total, faded = _softmax(
            scores, highest, total, position, key_position, scoring, MASKED
        )
        new_weights = gl.convert_layout(
            new_weights.to(v_smem.dtype), gl.DotOperandLayout(0, values_layout, 2)
        )
        # The weights are passed through to come before the wait. That holds in PTX; ptxas waits
        # first, and the other warp group keeps the tensor cores busy.
        values, weights = warpgroup_mma_wait(0, deps=[values, new_weights])
        mbarrier.arrive(v_empty.index(previous), count=1)
        faded = gl.convert_layout(faded, gl.SliceLayout(1, values_layout))
        values = values * faded[:, None]
    return weights, values, highest, total


@gluon.jit
def consume(
    work,
    rows,
    scoring,
    kv_head,
    q_smem,
    k_smem,
    v_smem,
    barriers,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr,
    FIRST_ROW: gl.constexpr,
    LSE: gl.constexpr,
    SIZE: gl.constexpr,
    RANK: gl.constexpr,
    INTERLEAVE: gl.constexpr,
):
    """Rows FIRST_ROW to FIRST_ROW + 63 of a program's tile."""
    start, query_len, first_query, context, tiles = work
    begin, num_tiles, num_unmasked, stale_to, stale_from = tiles
    query, out, query_token_stride, query_head_stride, out_token_stride, out_head_stride = rows
    sinks, scale, window, soft_cap = scoring
    part = (SIZE, RANK, INTERLEAVE)
    k_full, k_empty, v_full, _ = barriers
    BLOCK_Q: gl.constexpr = BLOCK_M // GROUP
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    HEAD_PAD: gl.constexpr = q_smem.shape[1]
    VALUE_PAD: gl.constexpr = v_smem.shape[2]
    scores_layout: gl.constexpr = mma_layout(BLOCK_N)
    values_layout: gl.constexpr = mma_layout(VALUE_PAD)

    q_layout: gl.constexpr = copy_layout(HEAD_PAD)
    m = FIRST_ROW + gl.arange(0, ROWS, gl.SliceLayout(1, q_layout))
    d = gl.arange(0, HEAD_PAD, gl.SliceLayout(0, q_layout))
    row = first_query + m // GROUP
    owned = (m < BLOCK_Q * GROUP) & (row < query_len)
    token = (start + row).to(gl.int64)
    rows = token * query_token_stride + (kv_head * GROUP + m % GROUP) * query_head_stride
    mask = owned[:, None]
    if HEAD_DIM != HEAD_PAD:
        mask = mask & (d < HEAD_DIM)[None, :]
    q = gl.load(query + (rows[:, None] + d[None, :]), mask=mask, other=0.0)
    q_smem.store(q)
    fence_async_shared()

    m = FIRST_ROW + gl.arange(0, ROWS, gl.SliceLayout(1, scores_layout))
    row = first_query + m // GROUP
    position = context + row
    highest = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, scores_layout))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, scores_layout))
    if sinks is not None:  # as if they were a first key without value
        owned = (m < BLOCK_Q * GROUP) & (row < query_len)
        sink = gl.load(sinks + kv_head * GROUP + m % GROUP, mask=owned, other=0.0).to(gl.float32)
        # In the units of ``highest``: before the scale, or after the soft cap.
        sink = sink * LOG2_E if soft_cap is not None else sink / scale
        highest = gl.where(position >= 0, sink, highest)
        total = gl.where(position >= 0, 1.0, total)

    mbarrier.wait(k_full.index(0), 0)
    no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, scores_layout)
    scores = warpgroup_mma(
        q_smem, k_smem.index(0).permute((1, 0)), no_scores, use_acc=False, is_async=True
    )
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_empty.index(0), count=1)
    key_position = begin + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores_layout))
    key_position = _position_of(key_position, part)
    weights, highest, total, _ = _softmax(
        scores, highest, total, position, key_position, scoring, True
    )
    weights = gl.convert_layout(weights.to(v_smem.dtype), gl.DotOperandLayout(0, values_layout, 2))
    values = gl.zeros([ROWS, VALUE_PAD], gl.float32, values_layout)

    if window is not None:  # noqa: SIM102 (decided when the kernel is compiled)
        if stale_to > 0:
            mbarrier.wait(v_full.index(0), 0)
            keep_rows(v_smem.index(0), stale_to, BLOCK_N)
    state = (weights, values, highest, total)
    if window is None:
        state = _tiles(
            1, num_unmasked, begin, q_smem, k_smem, v_smem, barriers, state,
            position, scoring, part, False,
        )  # fmt: skip
    state = _tiles(
        gl.maximum(num_unmasked, 1), num_tiles, begin, q_smem, k_smem, v_smem, barriers, state,
        position, scoring, part, True,
    )  # fmt: skip
    weights, values, highest, total = state
    last = num_tiles - 1
    mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
    if stale_from < BLOCK_N:
        keep_rows(v_smem.index(last % STAGES), 0, stale_from)
    values = warpgroup_mma(weights, v_smem.index(last % STAGES), values, is_async=True)
    values = warpgroup_mma_wait(0, deps=[values])

    if LSE:
        factor = 1.0 if soft_cap is not None else scale * LOG2_E
        lse = (highest * factor + gl.log2(gl.where(total > 0.0, total, 1.0))) / LOG2_E
        row_end = (start + row).to(gl.int64) * out_token_stride + VALUE_DIM
        row_end += (kv_head * GROUP + m % GROUP) * out_head_stride
        gl.store(out + row_end, lse, mask=(m < BLOCK_Q * GROUP) & (row < query_len))
    total = gl.convert_layout(total, gl.SliceLayout(1, values_layout))
    values = values / gl.where(total > 0.0, total, 1.0)[:, None]
    m = FIRST_ROW + gl.arange(0, ROWS, gl.SliceLayout(1, values_layout))
    e = gl.arange(0, VALUE_PAD, gl.SliceLayout(0, values_layout))
    row = first_query + m // GROUP
    token = (start + row).to(gl.int64)
    rows = token * out_token_stride + (kv_head * GROUP + m % GROUP) * out_head_stride
    there = ((m < BLOCK_Q * GROUP) & (row < query_len))[:, None] & (e < VALUE_DIM)[None, :]
    gl.store(out + (rows[:, None] + e[None, :]), values.to(out.dtype.element_ty), mask=there)
