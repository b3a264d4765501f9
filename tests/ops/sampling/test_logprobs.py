"""Log-probabilities and the most likely tokens, against torch.

"public" is what the runtime calls; "kernel" is Triton, in its interpreter without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.errors import BatchError
from ostinato.ops.sampling import logprobs

pytest.importorskip("triton")
INF, NAN = torch.inf, torch.nan
few = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=["public", "kernel"])
def run(request: pytest.FixtureRequest, device: torch.device) -> Callable[..., None]:
    if request.param == "public":
        return logprobs.write_logprobs
    if device.type == "cpu" and torch.cuda.is_available():
        pytest.skip("where there is a GPU, the kernels are not interpreted")
    return logprobs.triton_write_logprobs


def check(run: Callable[..., None], logits: Tensor, num_top: int) -> Tensor:
    """Against torch in float64. Returns the tokens."""
    num_rows, vocab_size = logits.shape
    chosen = torch.randint(vocab_size, (num_rows,)).to(logits.device)
    values = torch.full((num_rows, 1 + num_top), NAN, device=logits.device)
    tokens = torch.full((num_rows, 1 + num_top), -1, device=logits.device)
    run(logits, chosen, values, tokens)
    exact = logits.double().log_softmax(dim=-1)
    assert torch.equal(tokens[:, 0], chosen)
    torch.testing.assert_close(
        values.double(), exact.gather(1, tokens), rtol=1e-5, atol=1e-5, equal_nan=True
    )
    # The logits of the most likely tokens, in order; which of equal ones is not specified.
    top = logits.topk(num_top, dim=-1).values
    assert torch.equal(logits.gather(1, tokens[:, 1:]), top)
    for row in tokens[:, 1:].tolist():
        assert len(set(row)) == num_top
    return tokens


@pytest.mark.slow
@few
@given(
    num_rows=st.integers(1, 3),
    vocab_size=st.integers(1, 3000),
    num_top=st.integers(0, 8),
    scale=st.sampled_from([0.0, 1.0, 50.0]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_logprobs_are_torchs(
    run: Any,
    num_rows: int,
    vocab_size: int,
    num_top: int,
    scale: float,
    dtype: torch.dtype,
    seed: int,
    device: torch.device,
) -> None:
    torch.manual_seed(seed)
    logits = (torch.randn(num_rows, vocab_size) * scale).to(dtype).to(device)
    check(run, logits, min(num_top, vocab_size))


@pytest.mark.slow
def test_neighbours_and_the_whole_row(run: Any, device: torch.device) -> None:
    """All in one group, in every group, and as many as there are."""
    logits = torch.randn(2, 2000, device=device)
    logits[0, 256:384] += 100
    logits[1, ::128] += 100
    check(run, logits, 64)
    check(run, torch.randn(2, 33, device=device), 33)
    check(run, torch.randn(2, 90, device=device)[:, 5:45], 3)
    check(run, torch.randn(40, 2, device=device).T, 3)


@pytest.mark.slow
def test_odd_logits(run: Any, device: torch.device) -> None:
    logits = torch.randn(4, 300)
    logits[0, 10:] = -INF
    logits[1] = -INF
    logits[1, 200] = 3.0
    logits[2, ::2], logits[2, 1::2] = 0.0, -0.0
    logits[3, :250] = -1e30
    tokens = check(run, logits.to(device), 12)
    if run is logprobs.triton_write_logprobs:  # the first of equals
        assert tokens[2, 1:].tolist() == [*range(12)]
    nothing = torch.full((1, 3), 7.0, device=device)
    bad = torch.randn(2, 300, device=device)
    bad[0, 7] = NAN
    bad[1, 7] = INF
    chosen = torch.tensor([7, 7], device=device)
    values = torch.zeros(2, 3, device=device)
    tokens = torch.zeros(2, 3, dtype=torch.int64, device=device)
    run(bad, chosen, values, tokens)
    assert values.isnan().all()
    assert tokens[:, 1].tolist() == [7, 7]
    run(bad[:0], chosen[:0], nothing[:0], tokens[:0])
    assert nothing.tolist() == [[7.0] * 3]


def test_results_with_gaps_are_refused(device: torch.device) -> None:
    logits, chosen = torch.randn(2, 9, device=device), torch.zeros(2, device=device).long()
    values = torch.zeros(2, 6, device=device)[:, ::2]
    with pytest.raises(BatchError, match="must be contiguous"):
        logprobs.triton_write_logprobs(logits, chosen, values, values.long().contiguous())


@pytest.mark.slow
def test_the_operator_says_what_it_writes(device: torch.device) -> None:
    arguments = (
        torch.randn(2, 30, device=device),
        torch.tensor([1, 2], device=device),
        torch.zeros(2, 4, device=device),
        torch.zeros(2, 4, dtype=torch.int64, device=device),
    )
    torch.library.opcheck(
        torch.ops.ostinato.write_logprobs.default,
        arguments,
        test_utils=["test_schema", "test_faketensor"],
    )
