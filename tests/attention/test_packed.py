"""Attention over packed sequences, against a softmax over masked scores."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato import set_forward_context
from ostinato.attention.packed import PackedBatch, PackedSpec, attend_packed

NAN = float("nan")


def reference(
    spec: PackedSpec,
    lengths: list[int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    """Scores of all tokens with all, masked to those that see each other."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    ahead = torch.arange(len(sequence)) - torch.arange(len(sequence))[:, None]
    seen = sequence == sequence[:, None]
    if spec.left is not None:
        seen &= ahead >= -spec.left
    if spec.right is not None:
        seen &= ahead <= spec.right
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key).double() * spec.scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value.double()).float()


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    left=st.one_of(st.none(), st.integers(0, 24)),
    right=st.one_of(st.none(), st.integers(0, 24)),
    num_kv_heads=st.sampled_from([1, 2, 4]),
    value_dim=st.sampled_from([8, 16]),
    padding=st.integers(0, 5),
)
def test_sequences_see_themselves_alone(
    lengths: list[int],
    left: int | None,
    right: int | None,
    num_kv_heads: int,
    value_dim: int,
    padding: int,
) -> None:
    spec = PackedSpec(scale=0.3, left=left, right=right)
    total = sum(lengths)
    generator = torch.Generator().manual_seed(total)
    query, key, value = (
        torch.randn(total + padding, heads, dim, generator=generator)
        for heads, dim in ((4, 16), (num_kv_heads, 16), (num_kv_heads, value_dim))
    )
    for states in (query, key, value):
        states[total:] = NAN
    batch = PackedBatch(lengths, torch.device("cpu"))
    with set_forward_context(attn_metadata=batch):
        out = attend_packed(spec, query, key, value)
    expected = reference(spec, lengths, query[:total], key[:total], value[:total])
    torch.testing.assert_close(out[:total], expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(out[total:], torch.zeros(padding, 4, value_dim))


@pytest.mark.parametrize(("left", "right"), [(None, 0), (None, None), (3, 3), (3, 0)])
def test_states_of_any_layout(left: int | None, right: int | None) -> None:
    """transformers passes views of one tensor, with heads before tokens."""
    lengths = [4, 4, 7]
    packed = torch.randn(3, 2, sum(lengths), 8)
    query, key, value = (states.transpose(0, 1) for states in packed)
    spec = PackedSpec(scale=0.5, left=left, right=right)
    with set_forward_context(attn_metadata=PackedBatch(lengths, torch.device("cpu"))):
        out = attend_packed(spec, query, key, value)
    expected = reference(spec, lengths, query, key, value)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
