"""Tokens on their way to the host: theirs alone, whatever happens to the memory they came from."""

from __future__ import annotations

import pytest
import torch

from ostinato.runner.step_result import ResultRing, StepResult


def tokens(first: int, count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(first, first + count, device=device)


def test_what_was_sent_arrives_though_its_source_is_overwritten(device: torch.device) -> None:
    ring, source = ResultRing(8, device), tokens(0, 5, device)
    results = []
    for step in range(4):
        source.copy_(tokens(10 * step, 5, device))
        results.append(ring.send(source))
    source.fill_(-1)
    for step, result in enumerate(results):
        arrived = result.token_ids()
        assert arrived.tolist() == list(range(10 * step, 10 * step + 5))
        assert result.token_ids() is arrived  # as often as one likes


def test_what_was_read_is_not_overwritten_by_what_comes(device: torch.device) -> None:
    ring = ResultRing(8, device)
    first = ring.send(tokens(0, 8, device)).token_ids()
    for step in range(1, 4):
        later = ring.send(tokens(10 * step, step, device)).token_ids()
        assert later.tolist() == list(range(10 * step, 11 * step))
    assert first.tolist() == list(range(8))


def test_memory_is_used_again_once_it_is_read_and_not_before(device: torch.device) -> None:
    ring = ResultRing(4, device)
    one, two = ring.send(tokens(0, 4, device)), ring.send(tokens(4, 4, device))
    assert ring.free == []
    one.token_ids()
    (free,) = ring.free
    ring.send(tokens(8, 4, device))  # it is never read, so its memory is gone
    assert ring.free == []
    two.token_ids()
    two.token_ids()
    (other,) = ring.free
    assert other.tensor.data_ptr() != free.tensor.data_ptr()
    assert other.tensor.is_pinned() == (device.type == "cuda")


def test_logprobs_come_with_the_tokens(device: torch.device) -> None:
    ring, sampled = ResultRing(4, device), tokens(0, 3, device)
    top = torch.tensor([[1, 7, 8], [2, 9, 6]], device=device)
    values = torch.tensor([[-0.5, -1.0, -2.0], [-0.25, -4.0, -8.0]], device=device)
    result = ring.send(sampled, (top, values), filtered_rows=[0, 2])
    for tensor in (sampled, top, values):
        tensor.zero_()
    assert result.logprobs(2, 1) == [(2, -0.25), (9, -4.0)]
    assert result.logprobs(0, 2) == [(1, -0.5), (7, -1.0), (8, -2.0)]
    assert result.token_ids().tolist() == [0, 1, 2]


@pytest.mark.parametrize("times", [1, 2])
def test_a_step_that_samples_nothing_has_no_tokens(times: int) -> None:
    result = StepResult()
    for _ in range(times):
        assert result.token_ids().tolist() == []
