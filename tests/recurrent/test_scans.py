"""Convolutions and scans over batches of requests, against torch and transformers on each alone.

States continue from batch to batch in rows that change hands; everything outside the requests of a
batch is NaN.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

from ostinato.recurrent.base import RecurrentBatch, RecurrentSpec, RecurrentStates, bytes_per_row
from ostinato.recurrent.causal_conv import causal_conv
from ostinato.recurrent.scan import Tokens, advance

CPU = torch.device("cpu")
NAN = float("nan")
NUM_ROWS = 6  # and one for padding
HEADS, GROUPS, KEYS, VALUES = 4, 2, 5, 7
STATE = (HEADS, KEYS, VALUES)
# By batch: the rows that run, with their numbers of tokens. Rows return, and begin again.
STEPS: list[dict[int, int]] = [
    {0: 1, 3: 200, 5: 64},
    {0: 1, 3: 1},
    {3: 1, 2: 1, 5: 3, 0: 65, 4: 2},
    {5: 1, 3: 1, 4: 130},
    {2: 63},
    {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1},
]
RESTARTS = {(2, 5), (3, 4)}  # by step and row: another request, which starts from nothing


class Requests:
    """Runs ``STEPS``: builds batches, and keeps all tokens of each request."""

    def __init__(self, num_padding: int, device: torch.device) -> None:
        self.num_padding, self.device = num_padding, device
        self.done = [0] * NUM_ROWS
        self.seen: list[list[torch.Tensor]] = [[] for _ in range(NUM_ROWS)]

    def batch(self, step: int, *, from_host: bool) -> RecurrentBatch:
        rows, lens = list(STEPS[step]), list(STEPS[step].values())
        for row in rows:
            if (step, row) in RESTARTS:
                self.done[row], self.seen[row] = 0, []
        padding = [0] * self.num_padding
        padded = torch.tensor([*lens, *padding])
        lengths = [self.done[row] + count for row, count in zip(rows, lens, strict=True)]
        for row, count in zip(rows, lens, strict=True):
            self.done[row] += count
        uniform = max(lens) == 1
        return RecurrentBatch(
            states=(),
            req_indices=torch.tensor([*rows, *[NUM_ROWS] * self.num_padding]).to(self.device),
            query_start_loc=F.pad(padded.cumsum(0), (1, 0)).int().to(self.device),
            seq_lens=torch.tensor([*lengths, *padding], dtype=torch.int32).to(self.device),
            uniform_decode=uniform,
            query_lens=lens if from_host else None,
        )

    def tokens(self, step: int, draw: Any) -> list[torch.Tensor]:
        """New inputs of the step's requests, and padding tokens."""
        num_tokens = sum(STEPS[step].values())
        new = draw(num_tokens)
        start = 0
        for row, count in STEPS[step].items():
            self.seen[row].append([each[start : start + count] for each in new])
            start += count
        padding = self.num_padding
        padded = [F.pad(each, (0,) * (2 * each.dim() - 1) + (padding,)) for each in new]
        return [each.to(self.device) for each in padded]

    def sequence(self, row: int) -> list[torch.Tensor]:
        """All inputs of a row's request, [1, tokens, ...] each."""
        return [torch.cat(list(each)).unsqueeze(0) for each in zip(*self.seen[row], strict=True)]


def poisoned(*shape: int, device: torch.device = CPU) -> torch.Tensor:
    return torch.full((NUM_ROWS + 1, *shape), NAN, device=device)


@pytest.mark.parametrize("num_padding", [0, 3])
@pytest.mark.parametrize(("width", "bias"), [(2, True), (3, False)])
def test_convolution(width: int, bias: bool, num_padding: int, device: torch.device) -> None:
    channels = 3
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(channels, width + 1, generator=generator)
    offset = torch.randn(channels, generator=generator) if bias else None
    requests, state = Requests(num_padding, device), poisoned(width, channels, device=device)
    on_device = weight.to(device), None if offset is None else offset.to(device)
    for step, counts in enumerate(STEPS):
        batch = requests.batch(step, from_host=False)
        (inputs,) = requests.tokens(
            step, lambda count: [torch.randn(count, channels, generator=generator)]
        )
        out, start = causal_conv(batch, state, inputs, *on_device).cpu(), 0
        assert out.isfinite().all()
        for row, count in counts.items():
            (sequence,) = requests.sequence(row)
            expected = F.conv1d(
                sequence.mT, weight.unsqueeze(1), offset, padding=width, groups=channels
            ).mT[0, : sequence.shape[1]]
            torch.testing.assert_close(out[start : start + count], expected[-count:])
            start += count


def gated_delta(count: int, generator: torch.Generator) -> list[torch.Tensor]:
    query, key = (torch.randn(count, GROUPS, KEYS, generator=generator) for _ in range(2))
    value = torch.randn(count, HEADS, VALUES, generator=generator)
    decay = -F.softplus(torch.randn(count, HEADS, generator=generator))
    beta = torch.rand(count, HEADS, generator=generator)
    return [F.normalize(query, dim=-1), F.normalize(key, dim=-1), value, decay, beta]


def expected_delta(inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value, decay, beta = inputs
    query, key = (each.repeat_interleave(HEADS // GROUPS, 2) for each in (query, key))
    out, state = modeling_qwen3_next.torch_recurrent_gated_delta_rule(
        query * KEYS**0.5, key, value, g=decay, beta=beta, output_final_state=True
    )
    return out[0], state[0]


def state_space(count: int, generator: torch.Generator) -> list[torch.Tensor]:
    x = torch.randn(count, HEADS, VALUES, generator=generator)
    decay = -F.softplus(torch.randn(count, HEADS, generator=generator))
    b, c = (torch.randn(count, GROUPS, KEYS, generator=generator) for _ in range(2))
    return [c, b, x, decay]


def expected_space(inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    c, b, x, decay = inputs
    # Its decay is a time step times A, and the time step multiplies x too.
    out, state = modeling_mamba2.mamba2_chunk_scan(
        x / -decay.unsqueeze(-1), -decay, -torch.ones(HEADS), b, c, 8, return_final_states=True
    )
    return out[0], state[0].mT


def tokens_of(inputs: Sequence[torch.Tensor]) -> Tokens:
    """With beta, for the delta rule, or without."""
    return Tokens(*inputs[:4], inputs[4] if len(inputs) > 4 else None)


@pytest.mark.parametrize("num_padding", [0, 3])
@pytest.mark.parametrize("from_host", [True, False])
@pytest.mark.parametrize(
    ("draw", "expected"),
    [(gated_delta, expected_delta), (state_space, expected_space)],
    ids=["gated delta", "state space"],
)
def test_scan(
    draw: Any,
    expected: Any,
    from_host: bool,
    num_padding: int,
    device: torch.device,
) -> None:
    generator = torch.Generator().manual_seed(1)
    requests, states = Requests(num_padding, device), poisoned(*STATE, device=device)
    for step, counts in enumerate(STEPS):
        batch = requests.batch(step, from_host=from_host)
        inputs = requests.tokens(step, lambda count: draw(count, generator))
        out, start = torch.full((len(inputs[0]), HEADS, VALUES), NAN, device=device), 0
        idle = [row for row in range(NUM_ROWS) if row not in counts]
        before = states[idle].clone()
        advance(batch, states, tokens_of(inputs), out)
        assert out.isfinite().all()
        torch.testing.assert_close(states[idle], before, rtol=0, atol=0, equal_nan=True)
        for row, count in counts.items():
            wanted, state = expected(requests.sequence(row))
            found = out[start : start + count].cpu()
            torch.testing.assert_close(found, wanted[-count:], rtol=2e-4, atol=2e-5)
            torch.testing.assert_close(states[row].cpu(), state, rtol=2e-4, atol=2e-5)
            start += count


def test_a_strong_decay_does_not_overflow() -> None:
    """Within a chunk, what is left of a token can be far below the smallest number."""
    generator = torch.Generator().manual_seed(2)
    for draw in (gated_delta, state_space):
        inputs = draw(100, generator)
        inputs[3] *= 100
        states = poisoned(*STATE)
        out = torch.full((100, HEADS, VALUES), NAN)
        batch = RecurrentBatch(
            states=(),
            req_indices=torch.tensor([0]),
            query_start_loc=torch.tensor([0, 100]),
            seq_lens=torch.tensor([100]),
            uniform_decode=False,
        )
        advance(batch, states, tokens_of(inputs), out)
        assert out.isfinite().all()
        assert states[0].isfinite().all()


def test_memory_of_a_row() -> None:
    specs = [
        RecurrentSpec(layer=0, window=(3, 10)),
        RecurrentSpec(layer=1, window=(2, 5), matrix=(4, 3, 2)),
    ]
    states = RecurrentStates(specs, num_rows=7, dtype=torch.bfloat16, device=CPU)
    tensors = [tensor for layer in states.layers for tensor in layer if tensor is not None]
    assert [tensor.dtype for tensor in tensors] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert sum(tensor.nbytes for tensor in tensors) == 7 * bytes_per_row(specs, torch.bfloat16)


@pytest.mark.slow
def test_many_random_batches() -> None:
    """Any lengths in any order, single tokens among prompts too."""
    source, generator = random.Random(0), torch.Generator().manual_seed(3)
    for _ in range(30):
        lens = [source.choice((1, 1, 2, 63, 64, 65, 129)) for _ in range(source.randrange(1, 7))]
        inputs = gated_delta(sum(lens), generator)
        out = torch.full((sum(lens), HEADS, VALUES), NAN)
        batch = RecurrentBatch(
            states=(),
            req_indices=torch.randperm(NUM_ROWS, generator=generator)[: len(lens)],
            query_start_loc=torch.tensor([0, *lens]).cumsum(0),
            seq_lens=torch.tensor(lens),
            uniform_decode=False,
            query_lens=lens,
        )
        advance(batch, poisoned(*STATE), tokens_of(inputs), out)
        parts = [each.split(lens) for each in inputs]
        for request, part in enumerate(out.split(lens)):
            alone, _ = expected_delta([each[request].unsqueeze(0) for each in parts])
            torch.testing.assert_close(part, alone, rtol=2e-4, atol=2e-5)
