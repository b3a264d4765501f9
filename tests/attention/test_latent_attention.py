"""Latent attention: both backends, compared with a dense softmax in float64 without pages.

Whatever a request must not see is NaN, as in ``paged_batches``. Without a GPU the Triton kernels
run in the interpreter.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from latent_batches import (
    Case,
    check_replays,
    expand_small_batches,
    layout_of,
    make,
    padding_to,
)
from paged_batches import Mix

from ostinato import set_forward_context
from ostinato.attention import triton_paged
from ostinato.attention.base import AttentionBackend, attend
from ostinato.attention.latent_rope import absorbed_query, write_values
from ostinato.attention.reference.torch_paged import TorchPagedAttention
from ostinato.attention.triton.latent.latent_tiles import LatentShape, latent_tile_config
from ostinato.attention.triton_paged import TritonPagedAttention
from ostinato.errors import ConfigError

pytest.importorskip("triton")

# The interpreter multiplies the bits of bfloat16 as if they were integers.
HALVES = [torch.float16, torch.bfloat16] if torch.cuda.is_available() else [torch.float16]
BACKENDS: dict[str, AttentionBackend] = {
    "torch": TorchPagedAttention(),
    "triton": TritonPagedAttention(),
}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    expand_small_batches(monkeypatch)


@pytest.fixture
def device() -> torch.device:
    """One or the other: where there is a GPU, the kernels are not interpreted."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(params=[1, 64], ids=["whole", "split"])
def num_sms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """So few that keys are never split, or enough that they are even in these small batches."""
    monkeypatch.setattr(triton_paged, "num_sms", lambda _: request.param)
    return int(request.param)


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_the_reference_is_the_dense_softmax(dtype: torch.dtype, device: torch.device) -> None:
    make(layout_of(4, 24, 8, dtype=dtype), 8, device).check(BACKENDS["torch"])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize(("heads", "rank", "rope"), [(5, 24, 8), (20, 32, 16)])
def test_kernels_are_the_dense_softmax(
    num_sms: int, heads: int, rank: int, rope: int, dtype: torch.dtype, device: torch.device
) -> None:
    make(layout_of(heads, rank, rope, dtype=dtype), rope, device).check(BACKENDS["triton"])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize(
    ("heads", "requests", "sms"), [(16, ((2, 40), (1, 70)), 8), (128, ((1, 40), (2, 0)), 1)]
)
def test_the_sizes_of_deepseek(
    heads: int,
    requests: Mix,
    sms: int,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_paged, "num_sms", lambda _: sms)
    layout = layout_of(heads, 512, 64, requests=requests, dtype=dtype, padding_tokens=1)
    make(layout, 64, device, nope=128, value=128).check(BACKENDS["triton"])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_decode_batches_with_room_for_more(
    num_sms: int, backend: str, block_size: int, device: torch.device
) -> None:
    requests = ((1, 5), (1, 0), (1, 47))
    layout = layout_of(
        4, 32, 8, requests=requests, block_size=block_size, padding_requests=2, padding_tokens=2
    )
    case = make(layout, 8, device, decode=True)
    # Padding may own its token, with a length of 0.
    case.metadata.query_start_loc.copy_(torch.arange(6))
    case.check(BACKENDS[backend])


@pytest.mark.slow
def test_queries_and_keys_may_come_whole(num_sms: int, device: torch.device) -> None:
    """As they do under torch.compile."""
    case = make(layout_of(4, 24, 8), 8, device)
    query, row = case.embedding.apply(*case.inputs, case.positions)
    query, key = absorbed_query(query, case.embedding.up, 8), row.unsqueeze(1)
    metadata = replace(case.metadata, backend=BACKENDS["triton"])
    with set_forward_context(attn_metadata=metadata):
        mixed = attend(case.spec, query, key, key[..., :24])
    out = torch.empty(case.expected.shape, device=device)
    write_values(mixed, case.embedding.up, out)
    torch.testing.assert_close(out.cpu().double(), case.expected, rtol=1e-5, atol=1e-5)


# --- tile configs ---------------------------------------------------------------------------------


def shape_of(num_tokens: int, num_reqs: int, heads: int = 16, **rules: int) -> LatentShape:
    sizes = {"rank": 512, "itemsize": 2, "max_keys": 1 << 17, "num_sms": 132}
    sizes |= {"num_tokens": num_tokens, "num_reqs": num_reqs, "num_heads": heads}
    return LatentShape(**{"shared_memory": 227 << 10, **sizes, **rules})


def test_few_requests_are_split_and_many_are_not() -> None:
    splits = [latent_tile_config(shape_of(n, n)).num_splits for n in (1, 8, 32, 256)]
    assert splits == [64, 33, 8, 1]
    assert latent_tile_config(shape_of(1, 1, max_keys=96)).num_splits == 3
    # Parts of all tokens and heads are at most 64 MiB.
    assert latent_tile_config(shape_of(100, 4, heads=128, num_sms=10_000)).num_splits == 2


def test_tiles_follow_heads_queries_and_shared_memory() -> None:
    def tile(shape: LatentShape) -> tuple[int, int, int, int]:
        config = latent_tile_config(shape)
        return config.block_m, config.heads, config.block_q, config.block_n

    assert tile(shape_of(4, 4)) == (16, 16, 1, 32)
    assert tile(shape_of(4, 4, heads=128)) == (64, 64, 1, 64)
    assert tile(shape_of(400, 4)) == (64, 16, 4, 64)
    assert tile(shape_of(400, 4, heads=20)) == (64, 20, 3, 64)
    assert tile(shape_of(400, 4, shared_memory=163 << 10)) == (64, 16, 4, 32)
    assert tile(shape_of(400, 4, shared_memory=99 << 10)) == (16, 16, 1, 32)
    assert tile(shape_of(400, 4, itemsize=4)) == (16, 16, 1, 16)


# --- graphs ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_replays_are_eager_calls(num_sms: int, backend: str, device: torch.device) -> None:
    mixes: list[Mix] = [((1, 9), (1, 0), (7, 2), (3, 3)), ((1, 40), (11, 13)), ((5, 16), (2, 0))]

    def case(mix: Mix, seed: int) -> Case:
        layout = layout_of(4, 32, 8, requests=mix, seed=seed, **padding_to(12, mix))
        return make(layout, 8, device, min_blocks=8)

    check_replays(BACKENDS[backend], mixes, case, device)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_to_capture_may_claim_anything(backend: str, device: torch.device) -> None:
    case = make(layout_of(4, 32, 8, requests=((8, 0),), padding_requests=0), 8, device)
    case.metadata = replace(
        case.metadata,
        query_start_loc=torch.tensor([0, 5, 11], dtype=torch.int32, device=device),
        seq_lens=torch.full((2,), 1000, dtype=torch.int32, device=device),
        block_table=torch.zeros(2, 3, dtype=torch.int32, device=device),
        slot_mapping=torch.full((11,), -1, device=device),
        max_seq_len=1000,
    )
    case.cache.fill_(1.0)
    for tensor in case.inputs:
        tensor.nan_to_num_(0.5)
    out = case.run(BACKENDS[backend])
    value = case.embedding.up[:, 4:].sum(2)  # of a latent vector of ones
    torch.testing.assert_close(out, value.expand_as(out), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("changes", [{"value_dim": 16}, {"num_kv_heads": 2}, {"head_dim": 48}])
def test_other_sizes_than_the_specs(changes: dict[str, int], device: torch.device) -> None:
    case = make(layout_of(4, 32, 8), 8, device)
    case.spec = replace(case.spec, **changes)
    message = "attend_latent got 4 query heads of 12 columns, rows of 40"
    with pytest.raises(ConfigError, match=message):
        case.run(BACKENDS["torch"])
