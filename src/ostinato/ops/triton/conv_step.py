# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""A token of each request through a causal depthwise convolution, whose window moves on."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def conv_step_kernel(
    inputs,
    weight,
    bias,
    windows,
    req_indices,
    is_fresh,
    out,
    input_stride,
    num_channels,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per request and BLOCK channels."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = channel < num_channels
    known = there & (tl.load(is_fresh + row) == 0)
    window = windows + tl.load(req_indices + row) * (WIDTH * num_channels) + channel
    weights = weight + channel * (WIDTH + 1)
    x = tl.load(inputs + row * input_stride + channel, mask=there, other=0.0)
    result = x.to(tl.float32) * tl.load(weights + WIDTH, mask=there, other=0.0).to(tl.float32)
    for tap in tl.static_range(WIDTH):
        value = tl.load(window + tap * num_channels, mask=known, other=0.0)
        factor = tl.load(weights + tap, mask=there, other=0.0).to(tl.float32)
        result += value.to(tl.float32) * factor
        if tap > 0:
            tl.store(window + (tap - 1) * num_channels, value, mask=there)
    tl.store(window + (WIDTH - 1) * num_channels, x, mask=there)
    if bias is not None:
        result += tl.load(bias + channel, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * num_channels + channel, result, mask=there)
