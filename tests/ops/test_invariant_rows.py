"""Norms, activations, log-probabilities and samplers of batch-invariant models: a row's bits are
the same at every place of every batch. (GEMMs and attention have tests of their own.)

"public" is what the runtime calls; "kernel" is Triton, in its interpreter without a GPU, where a
program's arithmetic is NumPy's, for each row by itself.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ostinato.ops import layer_norm, norm
from ostinato.ops.activation import activate
from ostinato.ops.gemm.invariant import each_row
from ostinato.ops.sampling import logprobs, sampling

pytest.importorskip("triton")

WIDTH = 1200  # more than a block of every kernel, and no power of 2
NUM_ROWS = 13

Run = Callable[[Tensor, slice], tuple[Tensor, ...]]  # of these rows of a batch


def _norms(run: Callable[..., Tensor], parameters: int, *, by_row: bool) -> Run:
    draw = torch.Generator().manual_seed(1)
    made = [torch.randn(WIDTH, generator=draw) for _ in range(parameters)]

    def norms(x: Tensor, rows: slice) -> tuple[Tensor, ...]:
        given = [each.to(x.device, x.dtype) for each in made]

        def of(part: Tensor) -> Tensor:
            return run(part, *given, 1e-5)

        return (each_row(of, x[rows]) if by_row else of(x[rows]),)

    return norms


def _activations(x: Tensor, rows: slice) -> tuple[Tensor, ...]:
    return tuple(
        each_row(lambda part, name=name: activate(part, name), x[rows])  # type: ignore[misc]
        for name in ("silu", "gelu_tanh", "relu2")
    )


def _logprobs(run: Callable[..., None]) -> Run:
    def of(x: Tensor, rows: slice) -> tuple[Tensor, ...]:
        part = x[rows]
        chosen = torch.arange(NUM_ROWS, device=x.device)[rows] * 7
        values = torch.empty((len(part), 4), device=x.device)
        tokens = torch.empty((len(part), 4), dtype=torch.int64, device=x.device)
        run(part, chosen, values, tokens)
        return values, tokens

    return of


def _samples(run: Callable[..., None]) -> Run:
    def of(x: Tensor, rows: slice) -> tuple[Tensor, ...]:
        part = x[rows]
        requests = torch.arange(NUM_ROWS, device=x.device)
        temperature = (requests % 3).float() * 0.6
        tokens = torch.empty(len(part), dtype=torch.int64, device=x.device)
        lengths = (requests + 5).int()[rows]
        run(part, requests[rows], temperature, requests * 99991, lengths, tokens)
        return (tokens,)

    return of


CASES: dict[str, Run] = {
    "rms norm, public": _norms(norm.rms_norm, 1, by_row=True),
    "rms norm, kernel": _norms(norm.triton_rms_norm, 1, by_row=False),
    "layer norm, public": _norms(layer_norm.layer_norm, 2, by_row=True),
    "layer norm, kernel": _norms(layer_norm.triton_layer_norm, 2, by_row=False),
    "activations, public": _activations,
    "log-probabilities, public": _logprobs(logprobs.write_logprobs),
    "log-probabilities, kernel": _logprobs(logprobs.triton_write_logprobs),
    "samples, public": _samples(sampling.sample_rows),
    "samples, kernel": _samples(sampling.triton_sample_rows),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_row_has_the_same_bits_in_every_batch(device: torch.device, case: str) -> None:
    if "kernel" in case and device.type == "cpu" and torch.cuda.is_available():
        pytest.skip("where there is a GPU, the kernels are not interpreted")
    run = CASES[case]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    draw = torch.Generator().manual_seed(0)
    x = (torch.randn((NUM_ROWS, WIDTH), generator=draw) * 3).to(device, dtype)
    whole = run(x, slice(None))
    for first, last in ((0, 1), (NUM_ROWS - 1, NUM_ROWS), (4, 6), (1, 9), (3, NUM_ROWS)):
        rows = slice(first, last)
        for got, wanted in zip(run(x, rows), whole, strict=True):
            assert torch.equal(got, wanted[rows]), (case, rows)
