"""The CPU pool's memory: blocks never overlap, never move, and are reused when free.

The last test checks the main claim: the graphs of a whole decoder, all sizes in one pool, take
hardly more memory than one eager run of the largest.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ostinato import GraphPool
from ostinato.errors import CaptureOutOfMemoryError
from ostinato.graphs.backends.cpu.arena import Arena

ALIGNMENT = 64
PAGE = 4096


def block(arena: Arena, num_bytes: int) -> Tensor:
    """Memory without contents; the example itself costs none."""
    return arena.strong_like(torch.empty(num_bytes, dtype=torch.uint8, device="meta"))


def rounded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def assert_apart(blocks: list[Tensor]) -> None:
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.numel()) for tensor in blocks)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def assert_holds(tensor: Tensor, value: int) -> None:
    assert torch.equal(tensor, torch.full_like(tensor, value))


# --- allocation -----------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=200)
@given(
    steps=st.lists(
        st.one_of(st.integers(1, 600), st.integers(1, 20_000), st.sampled_from(["free"] * 2)),
        max_size=60,
    ),
    picks=st.randoms(use_true_random=False),
)
def test_live_blocks_keep_their_contents(steps: list[Any], picks: Any) -> None:
    arena, live, stamp, most = Arena(), [], 0, 0
    for step in steps:
        if step != "free":
            stamp = stamp % 250 + 1
            live.append((block(arena, step).fill_(stamp), stamp))
        elif live:
            live.pop(picks.randrange(len(live)))
        assert_apart([tensor for tensor, _ in live])
        for tensor, value in live:
            assert tensor.data_ptr() % ALIGNMENT == 0
            assert_holds(tensor, value)
        most = max(most, sum(rounded(tensor.numel()) for tensor, _ in live))
    assert most <= arena.peak_bytes <= sum(rounded(step) for step in steps if step != "free")


def test_a_freed_block_is_used_again() -> None:
    arena = Arena()
    first, guard = block(arena, 1000), block(arena, 64)
    address = first.data_ptr()
    del first
    assert block(arena, 1000).data_ptr() == address
    assert guard.data_ptr() == address + 1024
    assert arena.peak_bytes == 1024 + 64


def test_a_smaller_block_leaves_the_rest_free() -> None:
    arena = Arena()
    first, guard = block(arena, 1024), block(arena, 64)
    address = first.data_ptr()
    del first
    small, rest = block(arena, 100), block(arena, 1024 - 128)
    assert [small.data_ptr(), rest.data_ptr()] == [address, address + 128]
    assert arena.peak_bytes == 1024 + guard.numel()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_free_neighbours_become_one_block(order: tuple[int, ...]) -> None:
    arena = Arena()
    blocks: list[Tensor | None] = [block(arena, 128) for _ in range(3)]
    guard = block(arena, 64)
    for index in order:
        blocks[index] = None
    assert block(arena, 3 * 128).data_ptr() == guard.data_ptr() - 3 * 128
    assert arena.peak_bytes == 3 * 128 + 64


def test_growth_starts_in_the_free_stretch_below_the_top() -> None:
    arena = Arena()
    first = block(arena, 128)
    address = first.data_ptr()
    del first
    assert block(arena, 1024).data_ptr() == address
    assert arena.peak_bytes == 1024


def test_addresses_stay_as_the_arena_grows() -> None:
    arena = Arena()
    first = block(arena, 100).fill_(5)
    alias, address = arena.weak(first), first.data_ptr()
    big = block(arena, 64 << 20)
    big[-1] = 1
    assert first.data_ptr() == alias.data_ptr() == address
    assert_holds(alias, 5)


def test_a_view_keeps_the_whole_block() -> None:
    arena = Arena()
    view = block(arena, 1024).fill_(3)[1000:].view(2, 12)
    assert block(arena, 1024).fill_(4).data_ptr() + 1024 != view.data_ptr() + 24
    assert_holds(view, 3)


@pytest.mark.parametrize(
    "like",
    [
        torch.empty(4, 8).t(),
        torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.empty_strided((3, 4), (10, 2)),
        torch.empty(1).expand(7),
        torch.empty((), dtype=torch.float64),
        torch.empty(5, dtype=torch.complex64),
        torch.empty(5, dtype=torch.bool),
    ],
    ids=["transposed", "channels_last", "gaps", "expanded", "scalar", "complex", "bool"],
)
def test_a_tensor_like_another(like: Tensor) -> None:
    arena = Arena()
    tensor = arena.strong_like(like)
    neighbour = block(arena, 64).fill_(9)
    assert (tensor.shape, tensor.stride(), tensor.dtype) == (like.shape, like.stride(), like.dtype)
    last = sum((n - 1) * step for n, step in zip(like.shape, like.stride(), strict=True))
    assert tensor.data_ptr() + (last + 1) * like.itemsize <= neighbour.data_ptr()
    tensor.untyped_storage().fill_(1)
    assert_holds(neighbour, 9)


# --- aliases --------------------------------------------------------------------------------------


def test_a_weak_alias_has_the_same_bytes_and_reserves_nothing() -> None:
    arena = Arena()
    tensor = arena.strong_like(torch.empty(4, 8)).copy_(torch.randn(4, 8))
    aliases = [arena.weak(view) for view in (tensor, tensor.t(), tensor[1:, 2:].view(torch.int32))]
    tensor.add_(1)
    assert torch.equal(aliases[0], tensor)
    assert torch.equal(aliases[1], tensor.t())
    assert torch.equal(aliases[2], tensor[1:, 2:].view(torch.int32))
    address = tensor.data_ptr()
    del tensor
    assert block(arena, 128).data_ptr() == address == aliases[0].data_ptr()


def test_a_weak_alias_keeps_conjugation_and_sign() -> None:
    arena = Arena()
    tensor = arena.strong_like(torch.empty(4, dtype=torch.complex64))
    tensor.copy_(torch.randn(4, dtype=torch.complex64))
    for view in (tensor.conj(), tensor.conj().imag, tensor.conj()[1:]):
        alias = arena.weak(view)
        assert (alias.is_conj(), alias.is_neg()) == (view.is_conj(), view.is_neg())
        assert torch.equal(alias, view)


def test_the_arena_owns_its_tensors_alone() -> None:
    arena, other = Arena(), Arena()
    tensor = block(arena, 100)
    assert arena.owns(tensor)
    assert arena.owns(tensor[99:])
    assert arena.owns(arena.weak(tensor))
    assert not other.owns(tensor)
    assert not arena.owns(torch.empty(100))


# --- giving memory back ---------------------------------------------------------------------------


def test_peaks() -> None:
    arena = Arena()
    first = block(arena, 1000)
    del first
    assert (arena.peak_bytes, arena.recent_peak_bytes) == (1024, 1024)
    arena.recent_peak_bytes = 0
    small = block(arena, 100)
    assert (arena.peak_bytes, arena.recent_peak_bytes) == (1024, rounded(small.numel()))


def test_trim_drops_what_no_block_reserves() -> None:
    arena = Arena()
    low, high = block(arena, 100), block(arena, 5000)
    del high
    arena.trim(0)
    assert arena.peak_bytes == 128
    del low
    arena.trim(0)
    assert arena.peak_bytes == 0


def test_trim_keeps_blocks_and_what_it_is_told_to_keep() -> None:
    arena = Arena()
    low, high = block(arena, 4 * PAGE), block(arena, PAGE).fill_(7)
    del low
    arena.trim(0)
    assert arena.peak_bytes == 5 * PAGE
    assert_holds(high, 7)
    alias = arena.weak(high)
    del high
    arena.trim(5 * PAGE)
    assert arena.peak_bytes == 5 * PAGE
    assert_holds(alias, 7)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system may keep the contents")
def test_trim_returns_the_pages() -> None:
    arena = Arena()
    tensor = block(arena, 8 * PAGE).fill_(7)
    alias = arena.weak(tensor)
    del tensor
    arena.trim(2 * PAGE)
    assert_holds(alias[: 2 * PAGE], 7)
    assert_holds(alias[2 * PAGE :], 0)
    assert_holds(block(arena, 8 * PAGE).fill_(8), 8)


@pytest.mark.parametrize("weak", [False, True], ids=["strong", "weak"])
def test_a_tensor_outlives_the_arena(weak: bool) -> None:
    arena = Arena()
    tensor = block(arena, 1 << 20).fill_(3)
    tensor = arena.weak(tensor) if weak else tensor
    del arena
    gc.collect()
    assert_holds(tensor.add_(1), 4)


def test_outputs_stay_readable_after_the_pool_is_closed() -> None:
    x = torch.randn(64, 64)
    with GraphPool("cpu", lazy_capture=True) as pool:
        output = pool.capture(lambda: x * 2).output
    assert torch.equal(output, x * 2)


def test_a_closed_pool_holds_no_memory() -> None:
    pool = GraphPool("cpu", lazy_capture=True)
    pool.capture(lambda: torch.ones(1000) + 1)
    assert pool.num_bytes > 0
    pool.close()
    assert pool.num_bytes == 0


def test_a_graph_that_is_closed_gives_its_memory_back() -> None:
    x = torch.randn(64, 64)
    with GraphPool("cpu", lazy_capture=True) as pool:
        small = pool.capture(lambda: x[:2] * 2)
        before = pool.num_bytes
        large = pool.capture(lambda: (x * 2).exp().sum())
        assert pool.num_bytes >= before + x.nbytes
        large.tape.close()
        del large
        pool.backend.release_unused()
        assert pool.num_bytes == before
        x.fill_(3)
        pool.replay(small.tape)
        assert_holds(small.output, 6)


# --- the limit ------------------------------------------------------------------------------------


def test_an_allocation_beyond_the_limit_raises_and_changes_nothing() -> None:
    arena = Arena()
    first, second = block(arena, 128), block(arena, 256).fill_(5)
    for _ in range(2):
        with pytest.raises(CaptureOutOfMemoryError, match=r"needs .* more bytes .* beyond"):
            block(arena, 1 << 50)
    assert_holds(second, 5)
    assert arena.peak_bytes == 128 + 256
    address = first.data_ptr()
    del first
    assert block(arena, 128).data_ptr() == address


def test_a_failed_growth_leaves_the_free_stretch_below_the_top() -> None:
    arena = Arena()
    first, last = block(arena, 128), block(arena, 256)
    address = last.data_ptr()
    del last
    with pytest.raises(CaptureOutOfMemoryError):
        block(arena, 1 << 50)
    assert block(arena, 256).data_ptr() == address == first.data_ptr() + 128
    assert arena.peak_bytes == 128 + 256


# --- the memory of a decoder ----------------------------------------------------------------------

SIZES = (16, 8, 4, 2, 1)
NUM_LAYERS, WIDTH, NUM_HEADS, NUM_KV_HEADS, HEAD, MLP, CONTEXT = 30, 576, 9, 3, 64, 1536, 32


@dataclass
class Layer:
    """One decoder layer. All layers share weights: only the activations matter here."""

    weights: dict[str, Tensor]
    keys: Tensor
    values: Tensor

    def attend(self, x: Tensor, position: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        num_tokens, w = x.shape[0], self.weights
        q = rotate((x @ w["q"]).view(num_tokens, NUM_HEADS, 1, HEAD), rotary)
        k = rotate((x @ w["k"]).view(num_tokens, NUM_KV_HEADS, 1, HEAD), rotary)
        v = (x @ w["v"]).view(num_tokens, NUM_KV_HEADS, 1, HEAD)
        keys, values = self.keys[:num_tokens], self.values[:num_tokens]
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v)
        out = F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
        return out.reshape(num_tokens, WIDTH) @ w["o"]

    def __call__(self, x: Tensor, position: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        w = self.weights
        x = x + self.attend(F.rms_norm(x, (WIDTH,), w["norm_1"]), position, rotary)
        hidden = F.rms_norm(x, (WIDTH,), w["norm_2"])
        return x + (F.silu(hidden @ w["gate"]) * (hidden @ w["up"])) @ w["down"]


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Decoder:
    """A Llama-shaped decoder that decodes one token per request, in plain torch."""

    def __init__(self) -> None:
        kv = NUM_KV_HEADS * HEAD
        shapes = {"q": (WIDTH, WIDTH), "k": (WIDTH, kv), "v": (WIDTH, kv), "o": (WIDTH, WIDTH)}
        shapes |= {"gate": (WIDTH, MLP), "up": (WIDTH, MLP), "down": (MLP, WIDTH)}
        weights = {name: torch.randn(shape) / shape[0] ** 0.5 for name, shape in shapes.items()}
        weights |= {"norm_1": torch.ones(WIDTH), "norm_2": torch.ones(WIDTH)}
        cache = (max(SIZES), NUM_KV_HEADS, CONTEXT, HEAD)
        self.layers = [
            Layer(weights, torch.randn(cache), torch.randn(cache)) for _ in range(NUM_LAYERS)
        ]
        self.embeddings = torch.randn(max(SIZES), WIDTH)
        self.position = torch.tensor([CONTEXT - 1])
        self.frequencies = 10_000 ** (-torch.arange(0, HEAD, 2) / HEAD)

    def __call__(self, num_tokens: int) -> Tensor:
        angles = (self.position.float() * self.frequencies).repeat(2)
        rotary = angles.cos(), angles.sin()
        x = self.embeddings[:num_tokens]
        for layer in self.layers:
            x = layer(x, self.position, rotary)
        return x

    def tensors(self) -> Iterator[Tensor]:
        yield from (self.embeddings, self.position, self.frequencies)
        for layer in self.layers:
            yield from (*layer.weights.values(), layer.keys, layer.values)


class LiveBytes(TorchDispatchMode):
    """Peak bytes of live storages that operators created inside."""

    def __init__(self, given: Iterator[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in given}
        self._live = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self._live += storage.nbytes()
                weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self._live)
        return result

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self._live -= num_bytes


@pytest.mark.slow
@torch.no_grad()
def test_graphs_of_all_sizes_need_hardly_more_than_one_eager_run() -> None:
    torch.manual_seed(0)
    decoder = Decoder()
    with LiveBytes(decoder.tensors()) as eager:
        decoder(max(SIZES))
    # At the widest point two MLP activations and their product are alive, besides the residual.
    assert eager.peak >= max(SIZES) * (3 * MLP + 2 * WIDTH) * 4
    tapes, outputs = {}, {}
    with GraphPool("cpu") as pool:
        with pool.capturing():
            for size in SIZES:
                captured = pool.capture(lambda size=size: decoder(size))
                tapes[size], outputs[size] = captured.tape, pool.weak(captured.output)
                del captured
        assert pool.num_bytes < 1.3 * eager.peak
        for size in (1, 16, 4, 2, 8):
            decoder.embeddings.normal_()
            pool.replay(tapes[size])
            assert torch.equal(outputs[size], decoder(size))
