"""Attention over the paged cache in Triton kernels: for CUDA, in or out of graphs, for any batch.

To torch it is two operators: ``ostinato::triton_paged_attention``, and for models that hand over
their raw QKV product ``ostinato::triton_qkv_attention``. Here is how the work is cut up; the work
itself is in ``kernels``, and Triton is imported when it is first called. CPU tensors are for the
tests, under Triton's interpreter.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from ostinato.errors import CaptureError
from ostinato.graphs.context import current_forward_context
from ostinato.graphs.modes import AttentionCGSupport
from ostinato.runtime.attention.base import AttentionMetadata, AttentionSpec
from ostinato.runtime.attention.rotation import Rotation
from ostinato.runtime.kernels.launch import (
    can_overlap,
    launch,
    next_power_of_2,
    num_processors,
    overlap,
)
from ostinato.runtime.operators.define import define

_SCHEMA = """triton_paged_attention(
    Tensor query, Tensor key, Tensor value,
    Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor(c!) out,
    Tensor query_start_loc, Tensor seq_lens, Tensor block_table, Tensor slot_mapping,
    Tensor? sinks, float scale, int? window, float? soft_cap
) -> ()"""

_QKV_SCHEMA = """triton_qkv_attention(
    Tensor qkv, Tensor table, Tensor? qk_norm, Tensor positions,
    Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor(c!) out,
    Tensor query_start_loc, Tensor seq_lens, Tensor block_table, Tensor slot_mapping,
    Tensor? sinks, float eps, float scale, int? window, float? soft_cap, bool decode
) -> ()"""

# Keys are split among more programs until there are so many for each processor of the GPU. Single
# queries have small programs; measured on an H200 with the shapes of Llama-3.2-1B and 3.1-8B.
_PROGRAMS_PER_PROCESSOR = 2
_DECODE_PROGRAMS_PER_PROCESSOR = 8
_MAX_SPLITS = 64
# Where one kernel does all, its programs join what they split.
_MAX_JOINED_SPLITS = 16
# Counters of a device: one for each request and KV head of a decode batch that is split, which is
# never as large as that.
_NUM_COUNTERS = 1 << 16


class Cut(NamedTuple):
    """How a batch becomes programs: constants of the attention kernel and of its launch."""

    block_m: int  # rows of a tile: queries x heads of a group, at least what tensor cores take
    block_q: int  # queries of a tile
    block_n: int  # keys at a time
    num_tiles: int  # that any batch of these shapes needs at most
    num_splits: int  # of the keys of each tile
    num_warps: int
    num_stages: int


def cut(
    num_tokens: int,
    num_reqs: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    row_bytes: int,
    itemsize: int,
    max_keys: int,
    num_processors: int,
) -> Cut:
    """Blocks for batches of these shapes. Results are right for all of them, fast for even ones.

    ``row_bytes``: the longer of a key and a value of one head. ``max_keys``: room in the block
    table. The real lengths, and the host's limit on them, have no say, so a graph and an eager call
    of the same shapes agree to the bit.
    """
    group = num_heads // num_kv_heads
    widest = 128 if row_bytes <= 256 else 64
    block_n = 64 if row_bytes <= 256 else 32
    if itemsize == 4:  # no tensor cores: blocks are held in registers
        widest, block_n = 32, 32 if row_bytes <= 256 else 16
    # Where there may be prompts, tiles are made for them: single tokens wait for memory anyway.
    average = -(-num_tokens // num_reqs)
    rows = group if average == 1 else max(64, next_power_of_2(average * group))
    block_m = max(16, next_power_of_2(group), min(widest, rows))
    block_q = block_m // group
    # Each request may leave its last tile unfinished.
    num_tiles = (num_tokens + num_reqs * (block_q - 1)) // block_q
    num_warps = 8 if block_m >= 128 else 4
    programs = _PROGRAMS_PER_PROCESSOR
    if average == 1 and itemsize < 4:
        block_n, num_warps, programs = 32, max(1, block_m // 16), _DECODE_PROGRAMS_PER_PROCESSOR
    wanted = num_processors * programs // max(1, num_tiles * num_kv_heads)
    num_splits = max(1, min(wanted, -(-max_keys // block_n), _MAX_SPLITS))
    num_splits = 1 << (num_splits.bit_length() - 1)  # the kernel that joins them wants a power of 2
    return Cut(block_m, block_q, block_n, num_tiles, num_splits, num_warps, 3)


class DecodeCut(NamedTuple):
    """How a decode batch becomes programs: constants of its one kernel and of the launch."""

    block_n: int  # keys at a time
    num_splits: int  # of the keys of a request, at most
    num_warps: int
    num_stages: int
    prefetch: int  # keys of each share that are asked for before the wait; a power of 2, or 0


class _Measured(NamedTuple):
    """The best cut of decode batches up to so many (request, KV head) pairs per processor."""

    most_pairs: float
    block_n: int
    max_splits: int
    num_warps: int
    num_stages: int
    prefetch: int


# Half precision, measured on an H200 in whole decode steps, with contexts of 200 and 2,000 keys and
# the shapes of Llama-3.2-1B (keys of 128 bytes) and 3.1-8B (256 bytes), 1 to 256 requests. Alone,
# larger blocks are faster; in a step they take the shared memory that the next product needs to
# begin early, and cost it more than they save.
_NARROW = (
    _Measured(0.5, 32, 16, 1, 2, 64),
    _Measured(2.0, 64, 4, 2, 2, 64),
    _Measured(4.0, 128, 1, 4, 3, 0),
    _Measured(8.0, 64, 1, 1, 2, 64),
    _Measured(float("inf"), 16, 1, 1, 3, 0),
)
_BROAD = (
    _Measured(0.1, 64, 16, 2, 2, 64),
    _Measured(0.5, 32, 16, 1, 2, 0),
    _Measured(1.0, 64, 4, 2, 2, 0),
    _Measured(2.0, 16, 4, 1, 3, 0),
    _Measured(4.0, 64, 1, 4, 3, 0),
    _Measured(float("inf"), 32, 1, 1, 2, 0),
)


def decode_cut(
    num_reqs: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    row_bytes: int,
    itemsize: int,
    max_keys: int,
    num_processors: int,
) -> DecodeCut:
    """The cut of decode batches of these shapes; as with ``cut``, lengths have no say."""
    pairs = max(1, num_reqs * num_kv_heads)
    most_splits = num_processors * _DECODE_PROGRAMS_PER_PROCESSOR // pairs
    if itemsize < 4 and num_heads // num_kv_heads <= 16 and row_bytes <= 256:
        table = _NARROW if row_bytes <= 128 else _BROAD
        best = next(row for row in table if pairs <= row.most_pairs * num_processors)
        num_splits = min(best.max_splits, most_splits, -(-max_keys // best.block_n))
        if pairs > _NUM_COUNTERS:
            num_splits = 1
        return DecodeCut(
            best.block_n, max(1, num_splits), best.num_warps, best.num_stages, best.prefetch
        )
    # A warp for every 16 rows of 256 bytes: more of a matrix do not fit into its registers.
    rows = next_power_of_2(num_heads // num_kv_heads)
    tiles = max(1, rows // 16) * max(1, row_bytes // 256)
    block_n, num_warps, per_processor = 32, min(8, tiles), _DECODE_PROGRAMS_PER_PROCESSOR
    if itemsize == 4:  # no tensor cores: blocks are held in registers
        block_n = 32 if row_bytes <= 256 else 16
        num_warps, per_processor = 4, _PROGRAMS_PER_PROCESSOR
    wanted = num_processors * per_processor // pairs if pairs <= _NUM_COUNTERS else 1
    num_splits = max(1, min(wanted, -(-max_keys // block_n), _MAX_JOINED_SPLITS))
    return DecodeCut(block_n, num_splits, num_warps, 3, 2 * block_n)


def triton_paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> None:
    """Store ``key`` and ``value``, attend over the cache, and write all of ``out``."""
    num_tokens, num_reqs = query.shape[0], seq_lens.shape[0]
    if num_tokens == 0:
        return
    # The kernels step through a row by one.
    query, key, value = (_rows_in_one_piece(tensor) for tensor in (query, key, value))
    _store(key, value, key_cache, value_cache, out, slot_mapping, query_start_loc)
    if num_reqs == 0:
        return
    batch = (query_start_loc, seq_lens, block_table)
    rules = (sinks, scale, window, soft_cap)
    _attend(query, key_cache, value_cache, out, batch, rules)


def triton_qkv_attention(
    qkv: torch.Tensor,
    table: torch.Tensor,
    qk_norm: torch.Tensor | None,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    sinks: torch.Tensor | None,
    eps: float,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    decode: bool,
) -> None:
    """Norm and rotate, store, attend over the cache, and write all of ``out``.

    ``decode``: request r has token r and no other, or none and no keys. One kernel then does it.
    """
    num_tokens, num_reqs = qkv.shape[0], seq_lens.shape[0]
    if num_tokens == 0:
        return
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    rotation = (table, qk_norm, eps)
    rules = (sinks, scale, window, soft_cap)
    if not decode:
        from ostinato.runtime.kernels.rotary_store import rotary_store

        query = rotary_store(
            qkv, rotation, positions, key_cache, value_cache, out, slot_mapping, query_start_loc
        )
        if num_reqs > 0:
            batch = (query_start_loc, seq_lens, block_table)
            _attend(query, key_cache, value_cache, out, batch, rules)
        return
    from ostinato.runtime.kernels.decode_attention import decode_attention

    pieces = decode_cut(
        num_reqs,
        num_heads=out.shape[1],
        num_kv_heads=key_cache.shape[2],
        row_bytes=_padded_row(key_cache) * key_cache.itemsize,
        itemsize=key_cache.itemsize,
        max_keys=block_table.shape[1] * key_cache.shape[1],
        num_processors=num_processors(qkv.device),
    )
    decode_attention(
        qkv,
        rotation,
        positions,
        key_cache,
        value_cache,
        out,
        (seq_lens, block_table, slot_mapping),
        rules,
        counters(qkv.device) if pieces.num_splits > 1 else None,
        pieces,
    )


@cache
def counters(device: torch.device) -> torch.Tensor:
    """Zeros that kernels count in and leave as zeros; one row for all graphs and eager calls.

    Kernels that count never run at the same time: each waits for the one before it.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            "the first decode batch of this process is inside a capture, whose memory must not be "
            "kept; run one before it (GraphConfig.num_warmups of 1 or more)"
        )
    return torch.zeros(_NUM_COUNTERS, device=device, dtype=torch.int32)


def _store(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    slot_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> None:
    """The new rows into the cache, and zeros into the rows of ``out`` that are padding."""
    from ostinato.runtime.kernels.paged_attention import store_kernel

    num_heads, num_kv_heads = out.shape[1], key.shape[1]
    launch(
        store_kernel,
        (key.shape[0],),
        (key, value, key_cache, value_cache, out, slot_mapping, query_start_loc),
        (
            query_start_loc.shape[0] - 1,
            *key.stride()[:2],
            *value.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            *out.stride()[:2],
        ),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=key.shape[2],
        VALUE_DIM=value.shape[2],
        BLOCK_SIZE=key_cache.shape[1],
        HEADS_PAD=next_power_of_2(num_heads),
        KV_HEADS_PAD=next_power_of_2(num_kv_heads),
        HEAD_PAD=_padded_row(key),
        VALUE_PAD=_padded_row(value),
        OVERLAP=can_overlap(key.device),
        num_warps=4,
    )


def _attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rules: tuple[torch.Tensor | None, float, int | None, float | None],
) -> None:
    """Attention over what is in the cache. ``batch``: query_start_loc, seq_lens, block_table."""
    from ostinato.runtime.kernels.paged_attention import attend_kernel, join_kernel

    num_tokens, num_heads, value_dim = out.shape
    num_kv_heads = key_cache.shape[2]
    query_start_loc, _, block_table = batch
    sinks, *numbers = rules
    num_reqs = query_start_loc.shape[0] - 1
    max_keys = block_table.shape[1] * key_cache.shape[1]
    pieces = cut(
        num_tokens,
        num_reqs,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        row_bytes=max(_padded_row(key_cache), _padded_row(value_cache)) * key_cache.itemsize,
        itemsize=key_cache.itemsize,
        max_keys=max_keys,
        num_processors=num_processors(query.device),
    )
    num_splits = pieces.num_splits
    split = num_splits > 1
    partial: tuple[Any, ...] = (None, None, None)
    if split:  # weighted sums of values, highest scores, totals of the weights
        shape = (num_tokens, num_heads, num_splits)
        highest, total = torch.empty((2, *shape), device=out.device, dtype=torch.float32).unbind()
        values = torch.empty((*shape, value_dim), device=out.device, dtype=torch.float32)
        partial = (values, highest, total)
    launch(
        attend_kernel,
        (pieces.num_tiles * num_kv_heads, num_splits),
        (query, key_cache, value_cache, out, *partial, *batch, sinks),
        (
            *numbers,
            num_reqs,
            max_keys,
            num_splits,
            *query.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            *out.stride()[:2],
            block_table.stride(0),
        ),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=query.shape[2],
        VALUE_DIM=value_dim,
        BLOCK_SIZE=key_cache.shape[1],
        HEAD_PAD=_padded_row(query),
        VALUE_PAD=_padded_row(out),
        BLOCK_M=pieces.block_m,
        BLOCK_Q=pieces.block_q,
        BLOCK_N=pieces.block_n,
        SPLIT=split,
        **overlap(out.device),
        num_warps=pieces.num_warps,
        num_stages=pieces.num_stages,
    )
    if split:
        launch(
            join_kernel,
            (num_tokens, num_heads),
            (*partial, out, query_start_loc),
            (num_reqs, *out.stride()[:2]),
            NUM_HEADS=num_heads,
            VALUE_DIM=value_dim,
            VALUE_PAD=_padded_row(out),
            NUM_SPLITS=num_splits,
            **overlap(out.device),
            num_warps=4,
        )


def _rows_in_one_piece(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def _padded_row(tensor: torch.Tensor) -> int:
    """Elements of a row as the kernels hold it: a power of 2 that tensor cores take."""
    return max(16, next_power_of_2(tensor.shape[-1]))


_operator = define(_SCHEMA, cpu=triton_paged_attention, cuda=triton_paged_attention)
_qkv_operator = define(_QKV_SCHEMA, cpu=triton_qkv_attention, cuda=triton_qkv_attention)


def is_decode(metadata: AttentionMetadata, num_tokens: int) -> bool:
    """Whether request r has token r and no other, or none, in this batch and in every other that a
    graph of it may be replayed with.

    A graph of mixed batches may be captured with one token for each request, but is replayed with
    any split; the key of a FULL graph, which names its requests, says whether it is one.
    """
    if metadata.max_query_len != 1 or metadata.seq_lens.shape[0] != num_tokens:
        return False
    context = current_forward_context()
    key = None if context is None else context.descriptor
    return key is None or key.num_reqs is None or key.uniform


class TritonPagedAttention:
    """The ``AttentionBackend`` for CUDA. Never relies on ``max_seq_len``.

    A replay gives the bits of an eager call with the same padded shapes. Other shapes may be cut up
    differently, and rounded differently; and so may a decode batch that ``forward_qkv`` is given in
    a graph of mixed batches.
    """

    name = "triton"
    support = AttentionCGSupport.ALWAYS

    @torch.no_grad()  # the cache would otherwise remember every step that wrote to it
    def forward(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        key_cache, value_cache = metadata.kv_caches[spec.layer]
        _operator(
            query,
            key,
            value,
            key_cache,
            value_cache,
            out,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            metadata.slot_mapping,
            sinks,
            spec.scale,
            spec.window,
            spec.soft_cap,
        )

    @torch.no_grad()
    def forward_qkv(
        self,
        spec: AttentionSpec,
        qkv: torch.Tensor,
        rotation: Rotation,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """``forward`` after ``rotation.apply``: decode batches in one kernel, others in three."""
        key_cache, value_cache = metadata.kv_caches[spec.layer]
        # torch.compile does not come here, and CUDA's captures need no operator to see.
        run = triton_qkv_attention if qkv.is_cuda else _qkv_operator
        run(
            qkv,
            rotation.table,
            rotation.qk_norm,
            positions,
            key_cache,
            value_cache,
            out,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            metadata.slot_mapping,
            sinks,
            rotation.eps,
            spec.scale,
            spec.window,
            spec.soft_cap,
            is_decode(metadata, qkv.shape[0]),
        )
