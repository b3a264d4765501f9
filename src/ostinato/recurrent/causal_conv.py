"""A causal depthwise convolution over the tokens of each request, continued from step to step."""

from __future__ import annotations

import torch

from ostinato.ops.conv_step import conv_step
from ostinato.recurrent.base import ConvIndices, RecurrentBatch, initial_state


def causal_conv(
    batch: RecurrentBatch,
    state: torch.Tensor,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Convolve ``inputs`` [T, D] -> [T, D], in float32; the last inputs replace those in ``state``.

    ``state`` [rows, W, D]: the W inputs of each request before this batch. ``weight`` [D, W + 1].
    Shapes follow the padded sizes alone, and nothing is read on the host.
    """
    result = inputs.new_empty(inputs.shape, dtype=torch.float32)
    if batch.uniform_decode:
        conv_step(inputs, weight, bias, state, batch.req_indices, batch.is_fresh, result)
        return result
    # The inputs, then the window of each request: both are found by one index.
    before = initial_state(state, batch.req_indices, batch.is_fresh)
    source, width = torch.cat([inputs, before.flatten(0, 1)]), state.shape[1]
    if width not in batch.conv_indices:  # layers share them
        batch.conv_indices[width] = _indices(batch, inputs.shape[0], width)
    index, last = batch.conv_indices[width]
    result.zero_()
    if bias is not None:
        result += bias
    for rows, factor in zip(index, weight.float().unbind(1), strict=True):
        result.addcmul_(source[rows], factor)
    state.index_copy_(0, batch.req_indices, source[last])
    return result


def _indices(batch: RecurrentBatch, num_tokens: int, width: int) -> ConvIndices:
    """Indices below T are tokens; the windows follow, request by request."""
    starts = batch.query_start_loc.long()
    device, num_reqs = starts.device, batch.num_reqs
    token = torch.arange(num_tokens, device=device)
    owner = torch.searchsorted(starts[1:], token, right=True).clamp_(max=num_reqs - 1)
    offset = token - starts[owner]
    window = num_tokens + width * (owner + 1)  # where the window of the token's request ends
    index = tuple(
        torch.where(offset >= back, token - back, window + offset - back)
        for back in range(width, -1, -1)
    )
    # The last inputs are those from ``kept`` on, in the request's window and tokens together.
    kept = torch.arange(width, device=device) + starts.diff().unsqueeze(1)
    request = torch.arange(num_reqs, device=device).unsqueeze(1)
    of_window = num_tokens + width * request + kept
    last = torch.where(kept >= width, starts[:-1].unsqueeze(1) + kept - width, of_window)
    return ConvIndices(index, last)
