"""What a decode step replays for requests that want more than a temperature: their rows alone.

"public" is what the runtime calls; "kernel" is Triton, in its interpreter without a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ostinato import GraphPool, SamplingParams
from ostinato.ops.sampling import logprobs, resampling
from ostinato.ops.sampling.sampling_reference import Steps, sample_reference
from ostinato.sampling.sampling_state import SamplingState
from ostinato.scheduling.request import Request

pytest.importorskip("triton")

VOCAB, MAX_LEN, PROMPT_LEN = 150, 24, 6
UNUSED = 4  # rows of the state that no request has
ALL = Steps(noise=True, filters=True, penalties=True, bias=True, min_tokens=True, masks=True)
PLAIN: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.7}]
FILTERED: list[dict[str, Any]] = [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}]
CHANGED: list[dict[str, Any]] = [
    {"temperature": 0.0, "repetition_penalty": 1.8},
    {"temperature": 0.0, "presence_penalty": 2.0, "frequency_penalty": -1.0},
    {"temperature": 0.0, "logit_bias": {9: 50.0, VOCAB: 9.0}},
    {"min_tokens": 20},
    {"top_k": 9, "repetition_penalty": 1.3, "logit_bias": {3: 4.0}, "min_tokens": 1},
]
_STRUCTURED = {"structured_outputs": {"regex": "a"}}  # each row gets a mask of its own
MASKED: list[dict[str, Any]] = [
    {"temperature": 0.0, **_STRUCTURED},
    {"temperature": 1.3, **_STRUCTURED},
    {"top_k": 5, "top_p": 0.8, **_STRUCTURED},
    {"repetition_penalty": 1.3, "logit_bias": {3: 4.0}, "min_tokens": 9, **_STRUCTURED},
]


def _is_masked(row: dict[str, Any]) -> bool:
    return "structured_outputs" in row


@pytest.fixture(params=["public", "kernel"])
def kernels(request: pytest.FixtureRequest, device: torch.device) -> bool:
    """Whether to launch the kernels, or call the operators."""
    if request.param == "kernel" and device.type == "cpu" and torch.cuda.is_available():
        pytest.skip("where there is a GPU, the kernels are not interpreted")
    return bool(request.param == "kernel")


class Batch:
    """Rows with these parameters in a random order, and padding, whose logits are NaN."""

    def __init__(self, params: list[dict[str, Any]], device: torch.device) -> None:
        num_rows, num_padding = len(params), 2
        self.state = SamplingState(num_rows + UNUSED, device, vocab_size=VOCAB)
        order = torch.randperm(num_rows + UNUSED, device=device)
        self.req_indices = torch.cat((order[:num_rows], order[-1:].expand(num_padding)))
        for index, row in enumerate(params):
            self.write(index, row)
        self.lengths = torch.randint(PROMPT_LEN, MAX_LEN - 1, (num_rows + num_padding,)).int()
        self.lengths[num_rows:] = 0
        self.lengths = self.lengths.to(device)
        self.logits = torch.randn(num_rows + num_padding, VOCAB, device=device) * 3
        self.logits[num_rows:] = torch.nan
        self.token_ids = torch.randint(7, (num_rows + UNUSED, MAX_LEN), device=device).int()
        self.tokens = torch.arange(1000, 1000 + num_rows + num_padding, device=device)
        self.allowed = torch.rand(num_rows + UNUSED, VOCAB) < 0.1
        self.allowed[:, 7] = True
        self.allowed[0] = False  # but one
        self.allowed[0, VOCAB - 1] = True
        if any(map(_is_masked, params)):
            self.write_masks(params)

    def write_masks(self, params: list[dict[str, Any]]) -> None:
        """The rows of all others forbid everything: a kernel that reads one would show it."""
        masks = self.state.masks
        masks.on_device.zero_()
        rows = [int(self.req_indices[n]) for n, row in enumerate(params) if _is_masked(row)]

        def fill(written: np.ndarray[Any, Any]) -> None:
            bits = np.packbits(self.allowed[rows].numpy(), axis=1, bitorder="little")
            written.view(np.uint8)[:, : bits.shape[1]] = bits
            # What is past the vocabulary counts for nothing.
            written.view(np.uint8)[:, bits.shape[1] :] = 255

        masks.write(rows, fill)

    def write(self, index: int, row: dict[str, Any]) -> None:
        request = Request(
            request_id=str(index),
            prompt_token_ids=[0] * PROMPT_LEN,
            params=SamplingParams(**row, max_tokens=None),
            max_total_tokens=MAX_LEN,
            seed=index,
            stop_token_ids=frozenset({int(torch.randint(VOCAB, ()))}),
        )
        self.state.write(int(self.req_indices[index]), request)

    def arguments(self) -> tuple[Any, ...]:
        return self.logits, self.req_indices, self.lengths

    def resample(self, changes: bool, kernels: bool, masks: bool = False) -> None:
        tables, rest = self.state.tables, (changes, masks, self.token_ids, self.tokens)
        if kernels:
            resampling.triton_resample_rows(*self.arguments(), *tables, *rest)
        else:
            resampling.resample_rows(*self.arguments(), tables, *rest)

    def expected(self, params: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and histories, by the reference for the rows that need it, one at a time."""
        tokens, token_ids = self.tokens.clone(), self.token_ids.clone()
        for index, row in enumerate(params):
            if row in PLAIN:
                continue
            one = slice(index, index + 1)
            logits, req_indices, lengths = (tensor[one] for tensor in self.arguments())
            if _is_masked(row):
                allowed = self.allowed[self.req_indices[one].cpu()].to(logits.device)
                logits = logits.masked_fill(~allowed, -torch.inf)
            # The mask is in the logits, so that the reference's own reading of it is tested too.
            steps = ALL._replace(masks=False)
            token = sample_reference(
                logits, req_indices, lengths, self.state.tables, self.token_ids, steps
            )
            tokens[index] = token
            token_ids[self.req_indices[index], self.lengths[index]] = token.int()
        return tokens, token_ids


@pytest.mark.slow
@pytest.mark.parametrize("changes", [False, True])
def test_rows_that_use_more_than_a_temperature_are_sampled_again(
    changes: bool, kernels: bool, device: torch.device
) -> None:
    params = [*PLAIN, *FILTERED, *(CHANGED if changes else ())] * 2
    batch = Batch(params, device)
    tokens, token_ids = batch.expected(params)
    batch.resample(changes, kernels)
    assert torch.equal(batch.tokens, tokens)
    assert torch.equal(batch.token_ids, token_ids)


@pytest.mark.slow
def test_constrained_rows_are_sampled_from_what_their_masks_allow(
    kernels: bool, device: torch.device
) -> None:
    params = [*PLAIN, *FILTERED, *CHANGED, *MASKED] * 2
    batch = Batch(params, device)
    tokens, token_ids = batch.expected(params)
    batch.resample(True, kernels, masks=True)
    assert torch.equal(batch.tokens, tokens)
    assert torch.equal(batch.token_ids, token_ids)
    for index, row in enumerate(params):
        if _is_masked(row):
            assert batch.allowed[batch.req_indices[index], batch.tokens[index]]


@pytest.mark.slow
def test_a_graph_reads_the_masks_of_each_replay(pool: GraphPool, device: torch.device) -> None:
    params = [*PLAIN, *MASKED]
    batch = Batch(params, device)
    batch.resample(True, False, masks=True)
    tape = pool.capture(lambda: batch.resample(True, False, masks=True)).tape
    for _ in range(3):
        batch.allowed = batch.allowed.roll(1, dims=1)
        batch.write_masks(params)
        batch.tokens.add_(100)
        tokens, token_ids = batch.expected(params)
        pool.replay(tape)
        assert torch.equal(batch.tokens, tokens)
        assert torch.equal(batch.token_ids, token_ids)


@pytest.mark.parametrize("rows", [[], PLAIN], ids=["padding", "plain"])
def test_nothing_is_written_where_no_row_uses_more(
    rows: list[dict[str, Any]], kernels: bool, device: torch.device
) -> None:
    batch = Batch(rows, device)
    tokens, token_ids = batch.tokens.clone(), batch.token_ids.clone()
    batch.resample(True, kernels)
    assert torch.equal(batch.tokens, tokens)
    assert torch.equal(batch.token_ids, token_ids)


@pytest.mark.slow
def test_a_graph_follows_the_requests_of_its_rows(pool: GraphPool, device: torch.device) -> None:
    params = [*PLAIN, *FILTERED, *CHANGED]
    batch = Batch(params, device)
    batch.resample(True, False)
    tape = pool.capture(lambda: batch.resample(True, False)).tape
    for turn in range(1, 5):
        mixed = params[turn:] + params[:turn]
        for index, row in enumerate(mixed):
            batch.write(index, row)
        batch.logits.normal_().mul_(3)
        batch.tokens.add_(100)
        tokens, token_ids = batch.expected(mixed)
        pool.replay(tape)
        assert torch.equal(batch.tokens, tokens)
        assert torch.equal(batch.token_ids, token_ids)


@pytest.mark.slow
def test_each_row_gets_the_logprobs_that_it_wants(kernels: bool, device: torch.device) -> None:
    wanted = [None, 0, 3, None, 7, 64]
    batch = Batch([{"logprobs": each} for each in wanted], device)
    num_rows = len(batch.req_indices)
    chosen = torch.randint(VOCAB, (num_rows,), device=device)
    values = torch.full((num_rows, 65), 5.0, device=device)
    tokens = torch.full((num_rows, 65), -1, device=device)
    run = logprobs.triton_write_requested_logprobs if kernels else logprobs.write_requested_logprobs
    run(batch.logits, chosen, batch.req_indices, batch.state.tables.ints, values, tokens)
    exact = batch.logits.double().log_softmax(dim=-1)
    for row, num_top in enumerate(wanted):
        if num_top is None:
            continue
        top = batch.logits[row].topk(num_top).indices.tolist()
        assert tokens[row, : 1 + num_top].tolist() == [int(chosen[row]), *top]
        torch.testing.assert_close(
            values[row, : 1 + num_top].double(),
            exact[row, tokens[row, : 1 + num_top]],
            rtol=1e-5,
            atol=1e-5,
        )


@pytest.mark.slow
def test_the_operators_say_what_they_write(device: torch.device) -> None:
    batch = Batch([*PLAIN, *FILTERED], device)
    tables, rest = batch.state.tables, (False, False, batch.token_ids, batch.tokens)
    values = torch.zeros(len(batch.tokens), 4, device=device)
    chosen = torch.zeros_like(batch.tokens)
    for operator, arguments in (
        (torch.ops.ostinato.resample_rows, (*batch.arguments(), *tables, *rest)),
        (
            torch.ops.ostinato.write_requested_logprobs,
            (batch.logits, chosen, batch.req_indices, tables.ints, values, values.long()),
        ),
    ):
        torch.library.opcheck(
            operator.default, arguments, test_utils=["test_schema", "test_faketensor"]
        )
