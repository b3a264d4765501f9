"""Which requests of latent attention get keys and values of their own, and what these are.

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

from ostinato.attention import latent_expansion
from ostinato.attention.latent_expansion import expanded_rows, gpu_rule, least_queries
from ostinato.attention.paged import PagedBatch

pytest.importorskip("triton")

HEADS, NOPE, ROPE, VALUE, RANK, BLOCK_SIZE = 2, 12, 8, 5, 20, 4


@pytest.fixture
def device() -> torch.device:
    """One or the other: where there is a GPU, the kernels are not interpreted."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def test_the_number_of_queries_from_which_it_pays_off() -> None:
    assert least_queries(512, 192, 128, 64) == 171  # DeepSeek-V2 and V3
    assert least_queries(16, 32, 16, 16) is None  # rows as wide as heads
    assert least_queries(16, 4, 1, 2) == 2  # one is a decode step
    assert gpu_rule(512, 192, 128, 64) == (513, 2304)
    assert gpu_rule(16, 32, 16, 16) is None


def test_room() -> None:
    """Of DeepSeek-V2-Lite in half precision: 256 MiB, or one long request, or the new tokens."""
    row_bytes = 16 * (192 + 128) * 2
    assert expanded_rows(512, 163_840, row_bytes) == (256 << 20) // row_bytes == 26_214
    assert expanded_rows(512, 4_096, row_bytes) == 4_096
    assert expanded_rows(32_768, 163_840, row_bytes) == 32_768


def batch_of(lengths: list[tuple[int, int]], device: torch.device) -> PagedBatch:
    """Requests of these queries and keys, each with blocks of its own, from the last one on."""
    starts = torch.tensor([0, *(queries for queries, _ in lengths)]).cumsum(0)
    num_blocks = [-(-keys // BLOCK_SIZE) for _, keys in lengths]
    table, last = torch.zeros(len(lengths), 40, dtype=torch.int32), sum(num_blocks)
    for request, count in enumerate(num_blocks):
        table[request, :count] = torch.arange(last, last - count, -1)
        last -= count
    cache = torch.randn(sum(num_blocks) + 1, BLOCK_SIZE, 1, RANK + ROPE).to(device)
    cache[0] = torch.nan
    return PagedBatch(
        key_cache=cache,
        value_cache=cache[..., :RANK],
        out=torch.empty(int(starts[-1]), HEADS, VALUE, device=device),
        query_start_loc=starts.int().to(device),
        seq_lens=torch.tensor([keys for _, keys in lengths], dtype=torch.int32, device=device),
        block_table=table.to(device),
        slot_mapping=torch.empty(0, dtype=torch.int64, device=device),
        sinks=None,
        scale=1.0,
        window=None,
        soft_cap=None,
        max_seq_len=160,
        uniform_decode=False,
    )


@pytest.mark.parametrize(
    ("lengths", "rows", "expanded"),
    [
        ([(10, 10), (1, 30), (9, 25), (4, 4), (5, 5)], 40, [True, False, True, False, True]),
        ([(6, 80), (1, 1), (7, 7)], 12, [False, False, True]),  # longer than all 16 blocks
        ([(6, 40), (5, 30), (5, 5)], 20, [True, False, False]),  # too few left for the second
        ([(6, 0), (5, 6)], 1, [False, True]),  # padding of a graph
        ([(1, 9)] * 12, 1, [False] * 12),
    ],
)
def test_keys_and_values(
    lengths: list[tuple[int, int]],
    rows: int,
    expanded: list[bool],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests with five queries or more, in order, as long as there is room.

    ``rows``: wanted, of which multiples of 16 blocks are allocated.
    """
    from ostinato.attention.triton.latent.latent_expand import expand_latent

    monkeypatch.setattr(
        "ostinato.attention.triton.latent.latent_expand.expanded_rows", lambda *_: rows
    )
    torch.manual_seed(0)
    batch, up = batch_of(lengths, device), torch.randn(HEADS, NOPE + VALUE, RANK, device=device)
    found, rest = expand_latent(up, batch, ROPE, least=5, num_programs=3)
    pairs = list(zip(lengths, expanded, strict=True))
    assert rest.tolist() == [0 if chosen else length for (_, length), chosen in pairs]
    chosen_ones = [request for request, chosen in enumerate(expanded) if chosen]
    assert found.block_table.stride(0) % 16 == 0
    starts, seen = batch.query_start_loc.tolist(), set[int]()
    # Requests of an odd number are those expanded; before, between and after them there are others.
    own_starts, own_lens = found.query_start_loc.tolist(), found.seq_lens.tolist()
    ends = [end for request in chosen_ones for end in starts[request : request + 2]]
    missing = len(own_starts) - len(ends) - 1
    assert own_starts == [0, *ends, *[starts[-1]] * missing]
    assert not any(own_lens[::2])
    assert not any(own_lens[2 * len(chosen_ones) :])
    for number, request in enumerate(chosen_ones):
        length = lengths[request][1]
        assert own_lens[2 * number + 1] == length
        num_blocks = -(-length // BLOCK_SIZE)
        blocks = found.block_table[2 * number + 1, :num_blocks].long()
        assert not seen & set(blocks.tolist())
        seen |= set(blocks.tolist())
        row = batch.key_cache[batch.block_table[request, :num_blocks].long()]
        row = row.flatten(0, 2)[:length]
        heads = torch.einsum("kr,hnr->khn", row[:, :RANK], up)
        rope = row[:, None, RANK:].expand(-1, HEADS, -1)
        plain, values = heads.split((NOPE, VALUE), dim=2)
        got = [cache[blocks].flatten(0, 1)[:length] for cache in found[:2]]
        torch.testing.assert_close(got[0], torch.cat((plain, rope), dim=2), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(got[1], values, atol=1e-4, rtol=1e-4)


def test_new_tokens_always_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    from ostinato.attention.triton.latent.latent_expand import expand_latent

    monkeypatch.setattr(latent_expansion, "_MOST_BYTES", 1)
    lengths = [(5, 5), (6, 6), (5, 5), (7, 7)]
    batch = batch_of(lengths, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    up = torch.zeros(HEADS, NOPE + VALUE, RANK, device=batch.out.device)
    found, rest = expand_latent(up, batch, ROPE, least=5, num_programs=1)
    assert found.seq_lens[1::2].tolist() == [5, 6, 5, 7]
    assert not rest.any()
