"""The full sampler on a real GPU: real vocabularies, and replays with other rows.

Its results in general are tested in tests/ops, on CUDA as well.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato import GraphPool
from ostinato.ops.sampling.counter_random import exponential_log
from ostinato.ops.sampling.filtered_sampling import sample_filtered
from ostinato.ops.sampling.sampling_reference import Steps, processed_logits, sample_reference
from ostinato.sampling.sampler import sample
from ostinato.sampling.sampling_state import SamplingFeatures, SamplingState
from ostinato.sampling_params import SamplingParams
from ostinato.scheduling.request import Request

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = torch.device("cuda", 0)
VOCAB, MAX_LEN = 151_936, 512
ALL_STEPS = Steps(noise=True, filters=True, penalties=True, bias=True, min_tokens=True)

PARAMS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "greedy": {"temperature": 0.0},
    "top-k": {"top_k": 50},
    "top-k, cold": {"top_k": 50, "temperature": 0.05},
    "large top-k": {"top_k": 20_000},
    "top-p": {"top_p": 0.9},
    "small top-p": {"top_p": 0.2, "temperature": 0.7},
    "large top-p": {"top_p": 0.999, "temperature": 1.5},
    "hot top-p": {"top_p": 0.5, "temperature": 1e6},
    "min-p": {"min_p": 0.05},
    "usual": {"top_k": 20, "top_p": 0.8, "temperature": 0.7},
    "all filters": {"top_k": 20_000, "top_p": 0.95, "min_p": 0.001, "temperature": 1.3},
    "penalties": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "temperature": 0.0,
    },
    "everything": {
        "top_k": 1000,
        "top_p": 0.9,
        "min_p": 0.01,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.3,
        "logit_bias": {0: 50.0, 77: -100.0, VOCAB - 1: 3.0, VOCAB: 9.0},
        "min_tokens": 400,
    },
}


class Batch:
    def __init__(self, params: list[dict[str, Any]], logits: Tensor) -> None:
        num_rows = len(params)
        self.state = SamplingState(num_rows + 1, CUDA)
        self.req_indices = torch.randperm(num_rows + 1, device=CUDA)[:num_rows]
        self.logits = logits
        self.token_ids = torch.randint(
            VOCAB, (num_rows + 1, MAX_LEN), dtype=torch.int32, device=CUDA
        )
        self.token_ids[:, ::3] = 77
        self.lengths = torch.randint(50, MAX_LEN, (num_rows,), dtype=torch.int32, device=CUDA)
        self.tokens = torch.empty(num_rows, dtype=torch.int64, device=CUDA)
        self.write(params)

    def write(self, params: list[dict[str, Any]], seed: int = 0) -> None:
        for index, (req_index, each) in enumerate(
            zip(self.req_indices.tolist(), params, strict=True)
        ):
            request = Request(
                request_id="r",
                prompt_token_ids=[1] * 40,
                params=SamplingParams(**each, max_tokens=None),
                max_total_tokens=MAX_LEN,
                seed=seed * 1000 + index,
                stop_token_ids=frozenset({5, 77}),
                output_token_ids=[],
            )
            self.state.write(req_index, request)

    def arguments(self) -> tuple[Any, ...]:
        return (
            self.logits,
            self.req_indices,
            self.lengths,
            self.state.tables,
            self.token_ids,
            ALL_STEPS,
        )

    def run(self) -> None:
        sample_filtered(*self.arguments(), self.tokens)

    def check(self) -> int:
        """Against the reference; another token may win only if float32 cannot distinguish them.

        Returns the number of such tokens.
        """
        expected = sample_reference(*self.arguments())
        different = (self.tokens != expected).nonzero().flatten().tolist()
        kept = processed_logits(*self.arguments()).gather(1, self.tokens.unsqueeze(1))
        assert kept.isfinite().all()
        for row in different:
            one = slice(row, row + 1)
            scores = processed_logits(
                self.logits[one], self.req_indices[one], self.lengths[one], *self.arguments()[3:]
            )
            req_index = self.req_indices[row]
            noise = exponential_log(self.state.seed_key[req_index][None], self.lengths[one], VOCAB)
            scores = scores - noise * self.state.temperature[req_index]
            torch.testing.assert_close(
                scores[0, self.tokens[row]], scores[0, expected[row]], rtol=1e-6, atol=0
            )
        return len(different)


def random_logits(num_rows: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator(CUDA).manual_seed(seed)
    return (torch.randn(num_rows, VOCAB, generator=generator, device=CUDA) * 2.5).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_rows", [1, 3, 64])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
def test_tokens_are_the_references(
    params: dict[str, Any], num_rows: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    batch = Batch([params] * num_rows, random_logits(num_rows, dtype))
    different = 0
    for seed in range(5):
        batch.write([params] * num_rows, seed)
        batch.run()
        different += batch.check()
    assert different <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mixes_of_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    params = [*PARAMS.values()] * 4
    batch = Batch(params, random_logits(len(params), dtype))
    for seed in range(10):
        batch.write(params, seed)
        batch.run()
        batch.check()


@pytest.mark.parametrize("name", ["top-k", "top-p", "usual", "all filters", "everything"])
def test_rows_on_which_the_bins_are_of_no_help(name: str) -> None:
    """Flat, in two levels, with an outlier, masked, and with a few values in bfloat16."""
    torch.manual_seed(0)
    logits = random_logits(6, torch.float32)
    logits[0] = 1.0
    logits[1] = (logits[1] > 0).float() * 1e-3
    logits[2] *= 1e-6
    logits[2, 500] = -5e4
    logits[3, 100:] = -torch.inf
    logits[4] = logits[4].round()
    logits[5] = torch.finfo(torch.float32).min
    logits[5, -3:] = 1.0
    batch = Batch([PARAMS[name]] * 6, logits)
    for seed in range(10):
        batch.write([PARAMS[name]] * 6, seed)
        batch.run()
        batch.check()


def test_a_replay_reads_the_parameters_of_its_rows() -> None:
    torch.manual_seed(0)
    every = [*PARAMS.values()]
    batch = Batch(every, random_logits(len(every), torch.bfloat16))
    batch.run()
    with GraphPool(CUDA, lazy_capture=True) as pool:
        captured = pool.capture(batch.run)
        for turn in range(4):
            every = every[3:] + every[:3]
            batch.write(every, seed=turn)
            batch.logits.copy_(random_logits(len(every), torch.bfloat16, seed=turn))
            pool.replay(captured.tape)
            batch.check()


@pytest.mark.parametrize("num_logprobs", [0, 5, 64])
def test_logprobs_are_torchs(num_logprobs: int) -> None:
    torch.manual_seed(0)
    logits = random_logits(16, torch.float32)
    batch = Batch([{}] * 16, logits)
    features = SamplingFeatures(any_random=True, num_logprobs=num_logprobs)
    output = sample(
        logits, batch.req_indices, batch.lengths, batch.state, batch.token_ids, features
    )
    assert output.logprobs is not None
    assert output.logprob_token_ids is not None
    expected = logits.double().log_softmax(dim=1)
    top = expected.topk(num_logprobs, dim=1).indices if num_logprobs else expected[:, :0].long()
    assert torch.equal(output.logprob_token_ids[:, 1:], top)
    assert torch.equal(output.logprob_token_ids[:, 0], output.token_ids)
    torch.testing.assert_close(
        output.logprobs.double(), expected.gather(1, output.logprob_token_ids), rtol=0, atol=1e-5
    )
