"""Split-K: a GEMM as partial sums, when one program per output tile would leave SMs idle.

A GEMM of a few hundred rows with a narrow output and a long inner dimension uses only part of a
GPU. Split along the inner dimension it becomes several GEMMs at once, and the consumer adds up the
partial sums: ``add_rms_norm`` does so at no extra cost. On an H200 this takes a quarter off the
last GEMM of Llama-3.2-1B's layers at 256 rows (19.9 to 14.5 us), and a tenth off 3.1-8B's (48.3 to
43.9). Partial sums are rounded to the dtype of the inputs; each is smaller than the whole, and
together their rounding error is about that of the whole.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_TILE = 128  # rows and columns of the result that one program computes
_PROGRAMS = 128  # enough to keep a GPU busy
_FEWEST_ROWS, MOST_ROWS = 65, 256  # our kernels handle fewer; more fill a GPU anyway
_MOST_PARTS = 4
_SHORTEST = 1024  # fewest inner elements of a part


def split_k_gemm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x`` [M, K] and ``weight`` [N, K] -> [P, M, N], which add up to x @ weight.T; or [M, N].

    Only the shapes determine the number of parts, so a graph and an eager call agree.
    """
    (num_rows, inner), outputs = x.shape, weight.shape[0]
    parts = num_parts(num_rows, outputs, inner) if x.is_cuda and x.itemsize == 2 else 1
    if parts == 1 or not (x.is_contiguous() and weight.is_contiguous()):
        return F.linear(x, weight)
    return in_parts(x, weight, parts)


def in_parts(x: torch.Tensor, weight: torch.Tensor, parts: int) -> torch.Tensor:
    """[``parts``, M, N] of dense ``x`` and ``weight``; K is a multiple of ``parts``."""
    (num_rows, inner), outputs = x.shape, weight.shape[0]
    x_parts = x.view(num_rows, parts, inner // parts).transpose(0, 1)
    weight_parts = weight.view(outputs, parts, inner // parts).permute(1, 2, 0)
    return torch.bmm(x_parts, weight_parts)


def num_parts(num_rows: int, outputs: int, inner: int) -> int:
    """The number of parts that fills a GPU, a power of 2; 1 if splitting is not worth it."""
    if not _FEWEST_ROWS <= num_rows <= MOST_ROWS:
        return 1
    tiles = -(-num_rows // _TILE) * -(-outputs // _TILE)
    parts = 1
    while 2 * parts <= _MOST_PARTS and 2 * parts * tiles <= _PROGRAMS:
        # Four parts of 1,024 were slower than two of 2,048.
        if inner % (2 * parts) or inner // (2 * parts) < _SHORTEST * parts:
            break
        parts *= 2
    return parts
