"""One token of each request through a causal depthwise convolution: windows at request rows."""

from __future__ import annotations

import torch

from ostinato.ops.define import define
from ostinato.ops.triton.launch import launch

_BLOCK = 256


def conv_step(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    windows: torch.Tensor,
    req_indices: torch.Tensor,
    is_fresh: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Convolve ``inputs`` [R, D] after those in ``windows`` [rows, W, D] at ``req_indices`` [R].

    Writes ``out`` [R, D] in float32, and moves the inputs into the windows. ``weight`` [D, W + 1]
    and ``bias`` [D] are contiguous, and so are ``windows`` and ``out``. Requests that are
    ``is_fresh`` [R] start from zeros. A row that several requests share becomes that of one.
    """
    _step(inputs, weight, bias, windows, req_indices, is_fresh, out)


def conv_step_reference(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    windows: torch.Tensor,
    req_indices: torch.Tensor,
    is_fresh: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """In plain torch."""
    # Not by multiplication: a row may hold anything, NaN included.
    before = windows[req_indices].masked_fill_(is_fresh[:, None, None], 0)
    window = torch.cat([before, inputs.unsqueeze(1)], dim=1)
    torch.sum(window.float() * weight.float().T, dim=1, out=out)
    if bias is not None:
        out += bias
    windows.index_copy_(0, req_indices, window[:, 1:])


def triton_conv_step(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    windows: torch.Tensor,
    req_indices: torch.Tensor,
    is_fresh: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """The CUDA kernel. CPU tensors are for tests, under Triton's interpreter."""
    from ostinato.ops.triton.conv_step import conv_step_kernel

    num_reqs, num_channels = inputs.shape
    launch(
        conv_step_kernel,
        (num_reqs, -(-num_channels // _BLOCK)),
        (inputs, weight, bias, windows, req_indices, is_fresh, out),
        (inputs.stride(0), num_channels),
        WIDTH=windows.shape[1],
        BLOCK=_BLOCK,
        num_warps=4,
    )


_step = define(
    """conv_step(
    Tensor inputs, Tensor weight, Tensor? bias, Tensor(a!) windows, Tensor req_indices,
    Tensor is_fresh, Tensor(b!) out
) -> ()""",
    cpu=conv_step_reference,
    cuda=triton_conv_step,
)
