# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Parts of a softmax that programs of ``stream_decode`` share, and their sum. In Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ostinato.attention.triton.hopper.softmax import LOG2_E


@gluon.jit
def store_rows(target, values, row_stride, GROUP: gl.constexpr, WIDTH: gl.constexpr):
    """The first GROUP rows of ``values``."""
    layout: gl.constexpr = values.type.layout
    m = gl.arange(0, values.shape[0], gl.SliceLayout(1, layout))
    e = gl.arange(0, values.shape[1], gl.SliceLayout(0, layout))
    there = (m < GROUP)[:, None] & (e < WIDTH)[None, :]
    place = target + ((m * row_stride)[:, None] + e[None, :])
    gl.store(place, values.to(target.dtype.element_ty), mask=there)


@gluon.jit
def store_lse(target, highest, total, row_stride, GROUP: gl.constexpr, WIDTH: gl.constexpr):
    """The log-sum-exp of the first GROUP rows, to base e, behind their WIDTH values."""
    m = gl.arange(0, highest.shape[0], highest.type.layout)
    lse = (highest + gl.log2(total)) / LOG2_E
    gl.store(target + (m * row_stride + WIDTH), lse, mask=m < GROUP)


@gluon.constexpr_function
def _power_of_2(number):
    return 1 << (number - 1).bit_length()


@gluon.constexpr_function
def _parts_layout(num_parts, group, width):
    """A thread has some columns of all parts and rows, so that all its loads are in flight."""
    return gl.BlockedLayout(
        [num_parts, group, max(width // 128, 1)], [1, 1, 32], [1, 1, 4], [2, 1, 0]
    )


@gluon.jit
def combine_parts(
    parts,
    target,
    row_stride,
    first_program,
    last_program,
    GROUP: gl.constexpr,
    VALUE_DIM: gl.constexpr,
    VALUE_PAD: gl.constexpr,
    LSE: gl.constexpr,
):
    """The softmax over the parts of all programs that share a request and KV head."""
    part_values, part_highest, part_total = parts
    GROUP_PAD: gl.constexpr = _power_of_2(GROUP)
    NUM: gl.constexpr = max(64 // GROUP_PAD // max(VALUE_PAD // 128, 1), 1)  # parts at a time
    layout: gl.constexpr = _parts_layout(NUM, GROUP_PAD, VALUE_PAD)
    rows_layout: gl.constexpr = gl.SliceLayout(2, layout)
    values_layout: gl.constexpr = gl.SliceLayout(0, layout)
    p = gl.arange(0, NUM, gl.SliceLayout(1, rows_layout))
    g = gl.arange(0, GROUP_PAD, gl.SliceLayout(0, rows_layout))
    e = gl.arange(0, VALUE_PAD, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    highest = gl.full([GROUP_PAD], float("-inf"), gl.float32, gl.SliceLayout(0, rows_layout))
    total = gl.zeros([GROUP_PAD], gl.float32, gl.SliceLayout(0, rows_layout))
    values = gl.zeros([GROUP_PAD, VALUE_PAD], gl.float32, values_layout)
    for first in range(first_program, last_program + 1, NUM):
        program = first + p
        there = (program <= last_program)[:, None] & (g < GROUP)[None, :]
        part = (part_of(program, first_program) * GROUP)[:, None] + g[None, :]
        peaks = gl.load(part_highest + part, mask=there, other=float("-inf"), cache_modifier=".cg")
        totals = gl.load(part_total + part, mask=there, other=0.0, cache_modifier=".cg")
        sums = gl.load(
            part_values + ((part * VALUE_DIM)[:, :, None] + e[None, None, :]),
            mask=there[:, :, None] & (e < VALUE_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_highest = gl.maximum(highest, gl.max(peaks, axis=0))
        base = gl.where(new_highest == float("-inf"), 0.0, new_highest)  # rows of no head
        weights = gl.exp2(peaks - base[None, :])
        faded = gl.exp2(highest - base)
        total = total * faded + gl.sum(totals * weights, axis=0)
        faded = gl.convert_layout(faded, gl.SliceLayout(1, values_layout))
        values = values * faded[:, None] + gl.sum(sums * weights[:, :, None], axis=0)
        highest = new_highest
    if LSE:
        store_lse(target, highest, total, row_stride, GROUP, VALUE_DIM)
    total = gl.convert_layout(total, gl.SliceLayout(1, values_layout))
    values = values / gl.where(total > 0.0, total, 1.0)[:, None]
    store_rows(target, values, row_stride, GROUP, VALUE_DIM)


@gluon.jit
def part_of(program, first_program):
    """A program's part of what several share: the end of one such line, the beginning of another.

    Those in the middle have the same part as those at the end.
    """
    return 2 * program + (program == first_program).to(gl.int32)
