"""Batch-invariant attention: the dense softmax, and the same bits wherever a query runs.

Without a GPU the CUDA kernels run in Triton's interpreter, whose matrix products are NumPy's and
depend on their shape: there they are compared with the dense softmax alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from paged_batches import Layout, assert_same_bits, build, check, layouts

from ostinato.attention import invariant
from ostinato.attention.invariant import attend_cpu, attend_cuda
from ostinato.attention.paged import over_heads

pytest.importorskip("triton")

operator = torch.ops.ostinato.invariant_attention.default
HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 64, 16

any_layout = layouts(
    requests=st.lists(
        st.tuples(st.integers(1, 19), st.integers(0, 30))
        | st.tuples(st.just(1), st.integers(0, 300)),
        min_size=1,
        max_size=3,
    ).map(tuple),
    group=st.sampled_from([1, 3, 4]),
    head_dim=st.sampled_from([8, 64]),
    value_dim=st.sampled_from([8, 24]),
    window=st.none() | st.integers(1, 150),
    dtype=st.just(torch.float32),
)


@pytest.mark.slow
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(layout=any_layout, split=st.booleans())
# Two segments of keys, which another kernel folds; one of them is behind a window.
@example(layout=Layout(requests=((2, 260), (1, 3)), group=3, sinks=True), split=True)
@example(layout=Layout(requests=((1, 520),), window=300, soft_cap=3.0), split=True)
def test_any_batch_is_the_dense_softmax(layout: Layout, split: bool) -> None:
    check(build(layout), over_heads(attend_cpu))
    if torch.cuda.is_available():
        return  # the kernels are not interpreted
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(invariant, "num_sms", lambda _: 64 if split else 1)
        check(build(layout), over_heads(attend_cuda))


class Whole:
    """A sequence of queries, keys and values, computed in any chunks, alone or among others."""

    def __init__(self, length: int, device: torch.device) -> None:
        self.length, self.device = length, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        draw = torch.Generator().manual_seed(length)

        def rows(heads: int) -> torch.Tensor:
            return torch.randn(length, heads, DIM, generator=draw).to(device, self.dtype)

        self.query, self.key, self.value = rows(HEADS), rows(KV_HEADS), rows(KV_HEADS)

    def run(
        self, chunks: Sequence[tuple[int, int]], window: int | None, uniform: bool, padding: int = 0
    ) -> list[torch.Tensor]:
        """The results of [start, end) for each chunk, all in one batch, each with its own cache."""
        device, blocks = self.device, -(-self.length // BLOCK)
        num_blocks = len(chunks) * blocks
        shape = (num_blocks + 1, BLOCK, KV_HEADS, DIM)
        keys = torch.full(shape, torch.nan, device=device, dtype=self.dtype)
        values = keys.clone()
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(len(chunks)))
        table = (order + 1).view(len(chunks), blocks).to(device, torch.int32)
        slots, rows = [], []
        for own, (start, end) in zip(table.long(), chunks, strict=True):
            position = torch.arange(end, device=device)
            slot = own[position // BLOCK] * BLOCK + position % BLOCK
            for cache, new in ((keys, self.key), (values, self.value)):
                cache.flatten(0, 1)[slot[:start]] = new[:start]
            slots.append(slot[start:])
            rows.append(position[start:])
        rows.append(torch.zeros(padding, dtype=torch.int64, device=device))
        slots.append(torch.full((padding,), -1, dtype=torch.int64, device=device))
        chosen = torch.cat(rows)
        lens = [end - start for start, end in chunks] + [0] * padding
        starts = torch.tensor([0, *torch.tensor(lens).cumsum(0)], dtype=torch.int32, device=device)
        seq_lens = [end for _, end in chunks] + [0] * padding
        table = torch.cat((table, table.new_zeros(padding, blocks)))
        out = torch.full((len(chosen), HEADS, DIM), torch.nan, device=device, dtype=self.dtype)
        operator(
            *(each[chosen] for each in (self.query, self.key, self.value)),
            *(keys, values, out, starts),
            torch.tensor(seq_lens, dtype=torch.int32, device=device),
            table,
            torch.cat(slots),
            None,
            DIM**-0.5,
            window,
            None,
            self.length,
            uniform,
        )
        results = list(out.split([end - start for start, end in chunks] + [padding]))
        assert not results.pop().any(), "padding is zero"
        return results


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 70])
def test_a_query_has_the_same_bits_in_every_batch(device: torch.device, window: int | None) -> None:
    sequence = Whole(600 if device.type == "cuda" else 300, device)
    length = sequence.length
    (whole,) = sequence.run([(0, length)], window, False)
    batches: list[tuple[list[tuple[int, int]], bool, int]] = [
        ([(start, min(start + 33, length))], False, 0) for start in range(0, length, 33)
    ]
    positions = [0, 1, 15, 16, 63, 64, 255, 256, length - 1]
    batches += [([(at, at + 1)], True, 0) for at in positions]
    batches += [([(at, at + 1) for at in positions], uniform, 3) for uniform in (True, False)]
    batches += [([(at, at + 1) for at in reversed(positions)] * 8, True, 0)]
    batches += [([(0, 40), (length - 1, length), (40, 90), (0, length)], False, 2)]
    for chunks, uniform, padding in batches:
        for (start, end), got in zip(
            chunks, sequence.run(chunks, window, uniform, padding), strict=True
        ):
            assert_same_bits(got, whole[start:end])


def test_the_whole_prompt_is_the_dense_softmax(device: torch.device) -> None:
    sequence = Whole(90, device)
    (got,) = sequence.run([(0, 90)], None, False)
    tensors = (sequence.query, sequence.key, sequence.value)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(each.double().transpose(0, 1) for each in tensors),
        is_causal=True,
        enable_gqa=True,
    ).transpose(0, 1)
    tolerance = 2e-2 if got.dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
