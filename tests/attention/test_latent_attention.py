"""Latent attention: both backends, compared with a dense softmax in float64 without pages.

Whatever a request must not see is NaN, as in ``paged_batches``. Without a GPU the Triton kernels
run in the interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from paged_batches import Layout, Mix, assert_same_bits, build
from torch import Tensor

from ostinato import GraphPool, set_forward_context
from ostinato.attention import triton_paged
from ostinato.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec, attend
from ostinato.attention.latent import attend_latent
from ostinato.attention.latent_rope import LatentEmbedding, absorbed_query, write_values
from ostinato.attention.torch_paged import TorchPagedAttention
from ostinato.attention.triton.latent_tiles import LatentShape, latent_tile_config
from ostinato.attention.triton_paged import TritonPagedAttention
from ostinato.errors import ConfigError
from ostinato.ops.norm import Norm

pytest.importorskip("triton")

# The interpreter multiplies the bits of bfloat16 as if they were integers.
HALVES = [torch.float16, torch.bfloat16] if torch.cuda.is_available() else [torch.float16]
EPS = 1e-6
SCALE = 0.2
BACKENDS: dict[str, AttentionBackend] = {
    "torch": TorchPagedAttention(),
    "triton": TritonPagedAttention(),
}
MIX: Mix = ((3, 30), (1, 90), (7, 0), (1, 0), (2, 61))


@pytest.fixture
def device() -> torch.device:
    """One or the other: where there is a GPU, the kernels are not interpreted."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(params=[1, 64], ids=["whole", "split"])
def num_sms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """So few that keys are never split, or enough that they are even in these small batches."""
    monkeypatch.setattr(triton_paged, "num_sms", lambda _: request.param)
    return int(request.param)


@dataclass(kw_only=True)
class Case:
    """A batch of latent attention: inputs, cache and metadata; what is expected of it."""

    layout: Layout
    spec: AttentionSpec
    inputs: list[Tensor]  # query, compressed
    embedding: LatentEmbedding
    positions: Tensor
    metadata: AttentionMetadata
    expected: Tensor
    rows: Tensor  # the new rows of the cache

    @property
    def cache(self) -> Tensor:
        return self.metadata.kv_caches[0][0]

    def tensors(self) -> list[Tensor]:
        """Everything that a graph would find at fixed addresses."""
        batch = self.metadata
        lengths = [batch.query_start_loc, batch.seq_lens, batch.block_table, batch.slot_mapping]
        return [*self.inputs, self.positions, self.cache, *lengths]

    def run(self, backend: AttentionBackend) -> Tensor:
        metadata = replace(self.metadata, backend=backend)
        with set_forward_context(attn_metadata=metadata):
            return attend_latent(self.spec, *self.inputs, self.embedding, self.positions)

    def check(self, backend: AttentionBackend) -> Tensor:
        before = self.cache.clone()
        out = self.run(backend)
        half = out.dtype is not torch.float32
        tolerance = 4 * torch.finfo(out.dtype).eps if half else 1e-5
        torch.testing.assert_close(
            out.cpu().double(), self.expected, rtol=tolerance, atol=tolerance
        )
        slots = self.metadata.slot_mapping
        kept = torch.ones(before.shape[:2], dtype=torch.bool, device=before.device).flatten()
        kept[slots[slots >= 0]] = False
        new, old = self.cache.flatten(0, 1), before.flatten(0, 1)
        assert_same_bits(new[kept].contiguous(), old[kept].contiguous())
        stored = new[slots[slots >= 0], 0].cpu().double()
        torch.testing.assert_close(stored, self.rows, rtol=tolerance, atol=tolerance)
        return out


def make(
    layout: Layout,
    rope: int,
    device: torch.device,
    *,
    nope: int = 4,
    value: int = 6,
    decode: bool = False,
    min_blocks: int = 0,
) -> Case:
    """``layout``: head_dim is that of rows in the cache, value_dim the rank.

    ``nope`` and ``value`` are so few columns of heads that keys are expanded from few queries on.
    """
    batch = build(layout, device, min_blocks=min_blocks)
    rank, row, dtype = layout.value_dim, layout.head_dim, layout.dtype
    generator = torch.Generator().manual_seed(layout.seed + 1)
    num_tokens, num_real = batch.query.shape[0], sum(length for length, _ in layout.requests)
    positions = torch.zeros(num_tokens, dtype=torch.int64)
    positions[:num_real] = torch.cat(
        [torch.arange(context, context + length) for length, context in layout.requests]
    )
    compressed = torch.randn(num_tokens, row, generator=generator).to(dtype)
    compressed[num_real:] = torch.nan
    generator.manual_seed(0)  # the model's own, whatever the batch
    angles = torch.rand(256, rope // 2, generator=generator) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    weight = (torch.rand(rank, generator=generator) + 0.5).to(dtype)
    up = torch.randn(layout.group, nope + value, rank, generator=generator) / rank**0.5
    up = up.to(dtype)
    query = batch.query[..., : nope + rope] * min(1.0, 4 / (nope + rope) ** 0.5)
    rows = _rows(compressed[:num_real].double(), weight.double(), table, positions[:num_real])
    cache = batch.key_cache
    metadata = replace(
        batch.metadata(), kv_caches=[(cache, cache[..., :rank])], uniform_decode=decode
    )
    return Case(
        layout=layout,
        spec=AttentionSpec(
            layer=0,
            num_heads=layout.group,
            num_kv_heads=1,
            head_dim=row,
            value_dim=rank,
            scale=SCALE,
            values_in_keys=True,
        ),
        # Slices of larger rows, as a model has them.
        inputs=[
            query,
            torch.cat((torch.zeros(num_tokens, 3), compressed), 1).to(dtype).to(device)[:, 3:],
        ],
        embedding=LatentEmbedding(
            table=table.to(device), norm=Norm(weight.to(device), EPS), up=up.to(device)
        ),
        positions=positions.to(device),
        metadata=metadata,
        expected=_oracle(
            layout, query.cpu().double(), up.double(), rows, batch.dense, table, positions
        ),
        rows=rows,
    )


def _rotated(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """Pairs (i, i + half) of the last dimension; ``x`` [T, ..., rope]."""
    cos, sin = table[positions].double().chunk(2, dim=-1)
    cos, sin = (a.view(-1, *[1] * (x.dim() - 2), a.shape[-1]) for a in (cos, sin))
    one, two = x.chunk(2, dim=-1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)


def _rows(compressed: Tensor, weight: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    rank = weight.shape[0]
    latent = compressed[:, :rank]
    latent = latent / (latent.square().mean(1, keepdim=True) + EPS).sqrt() * weight
    return torch.cat((latent, _rotated(compressed[:, rank:], table, positions)), dim=1)


def _oracle(
    layout: Layout,
    query: Tensor,
    up: Tensor,
    rows: Tensor,
    dense: Any,
    table: Tensor,
    positions: Tensor,
) -> Tensor:
    """Over keys and values of every head."""
    rank, nope = layout.value_dim, query.shape[2] - table.shape[1]
    query = torch.cat((query[..., :nope], _rotated(query[..., nope:], table, positions)), dim=2)
    out = torch.zeros(*query.shape[:2], up.shape[1] - nope, dtype=torch.float64)
    token = 0
    for (length, context), (cached, _) in zip(layout.requests, dense, strict=False):
        row = torch.cat((cached[:context, 0].double(), rows[token : token + length]))
        heads = torch.einsum("kr,hnr->hkn", row[:, :rank], up)
        keys = torch.cat((heads[..., :nope], row[:, rank:].expand(len(up), -1, -1)), dim=2)
        for position in range(context, context + length):
            seen = slice(0, position + 1)
            weights = (torch.einsum("hd,hkd->hk", query[token], keys[:, seen]) * SCALE).softmax(1)
            out[token] = torch.einsum("hk,hkv->hv", weights, heads[:, seen, nope:])
            token += 1
    return out


def layout_of(heads: int, rank: int, rope: int, **rules: Any) -> Layout:
    options: dict[str, Any] = {
        "requests": MIX,
        "block_size": 16,
        "padding_requests": 2,
        "padding_tokens": 3,
    }
    return Layout(group=heads, head_dim=rank + rope, value_dim=rank, **{**options, **rules})


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
        padding = {
            "padding_requests": 4 - len(mix),
            "padding_tokens": 12 - sum(length for length, _ in mix),
        }
        layout = layout_of(4, 32, 8, requests=mix, seed=seed, **padding)
        made = make(layout, 8, device, min_blocks=16)
        made.metadata = replace(made.metadata, max_seq_len=128)
        return made

    static = case(mixes[0], 0)
    static.metadata.slot_mapping.fill_(-1)
    static.metadata.block_table.fill_(0)
    if device.type == "cuda":
        static.run(BACKENDS[backend])  # kernels are compiled and loaded by a first call
    with GraphPool(device, lazy_capture=True) as pool:
        captured = pool.capture(lambda: static.run(BACKENDS[backend]))
        for seed, mix in enumerate(mixes):
            batch = case(mix, seed)
            for target, source in zip(static.tensors(), batch.tensors(), strict=True):
                target.copy_(source)
            pool.replay(captured.tape)
            assert_same_bits(captured.output, batch.check(BACKENDS[backend]))
            assert_same_bits(static.cache, batch.cache)


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
