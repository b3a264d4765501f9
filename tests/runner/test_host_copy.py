"""Tokens on their way to the host: theirs alone, whatever happens to the memory they came from."""

from __future__ import annotations

import pytest
import torch

from ostinato.runner.host_copy import HostCopy, Mailbox


def tokens(first: int, count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(first, first + count, device=device)


def test_what_was_sent_arrives_though_its_source_is_overwritten(device: torch.device) -> None:
    mailbox, source = Mailbox(8, device), tokens(0, 5, device)
    letters = []
    for step in range(4):
        source.copy_(tokens(10 * step, 5, device))
        letters.append(mailbox.send(source))
    source.fill_(-1)
    for step, letter in enumerate(letters):
        (arrived,) = letter.wait()
        assert arrived.device.type == "cpu"
        assert arrived.tolist() == list(range(10 * step, 10 * step + 5))
        assert letter.wait()[0] is arrived  # as often as one likes


def test_what_was_read_is_not_overwritten_by_what_comes(device: torch.device) -> None:
    mailbox = Mailbox(8, device)
    (first,) = mailbox.send(tokens(0, 8, device)).wait()
    for step in range(1, 4):
        (later,) = mailbox.send(tokens(10 * step, step, device)).wait()
        assert later.tolist() == list(range(10 * step, 11 * step))
    assert first.tolist() == list(range(8))


@pytest.mark.gpu
def test_boxes_are_used_again_once_they_are_read_and_not_before() -> None:
    if not torch.cuda.is_available():
        pytest.skip("boxes are for CUDA")
    device = torch.device("cuda", 0)
    mailbox = Mailbox(4, device)
    one, two = mailbox.send(tokens(0, 4, device)), mailbox.send(tokens(4, 4, device))
    assert mailbox._free == []
    one.wait()
    (free,) = mailbox._free
    mailbox.send(tokens(8, 4, device))  # nobody reads it, so its box is gone
    assert mailbox._free == []
    two.wait()
    two.wait()
    (other,) = mailbox._free
    assert other.pinned.data_ptr() != free.pinned.data_ptr()
    assert other.pinned.is_pinned()


def test_several_tensors_at_once_and_none(device: torch.device) -> None:
    left, right = torch.rand(3, device=device), tokens(0, 2, device)
    copies = HostCopy(left, right)
    expected = left.cpu().clone(), right.cpu().clone()
    left.zero_()
    right.zero_()
    for copy, value in zip(copies.wait(), expected, strict=True):
        assert torch.equal(copy, value)
    assert HostCopy().wait() == []
