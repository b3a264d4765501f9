"""Attention over the paged cache in Triton kernels: for CUDA, in or out of graphs, for any batch.

To torch it is three operators: ``ostinato::triton_paged_attention``, for models that pass the raw
result of their QKV GEMM ``ostinato::triton_qkv_attention``, and for latent attention
``ostinato::triton_latent_attention``. Here tile configs are chosen; kernels and launches are in
``triton``, which is imported by the first call. CPU tensors are for the tests, under Triton's
interpreter.
"""

from __future__ import annotations

import torch

from ostinato.attention.base import AttentionMetadata, AttentionSpec
from ostinato.attention.latent_expansion import gpu_rule
from ostinato.attention.latent_rope import LatentEmbedding, absorb, to_values, write_values
from ostinato.attention.paged import (
    PagedBatch,
    PagedQkvAttention,
    heads_schema,
    latent_schema,
    over_heads,
    over_latent,
    over_qkv,
    qkv_schema,
)
from ostinato.attention.rope import RotaryEmbedding
from ostinato.attention.triton.latent.latent_tiles import LatentShape, latent_tile_config
from ostinato.attention.triton.tile_config import (
    ALWAYS,
    STREAM_GROUP,
    BatchShape,
    decode_tile_config,
    stream_rule,
    takes_prompts,
    tile_config,
)
from ostinato.compat import runs_gluon
from ostinato.graphs.policy.modes import AttentionCGSupport
from ostinato.ops.define import define
from ostinato.ops.triton.launch import num_sms


def triton_paged_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: PagedBatch
) -> None:
    """Store ``key`` and ``value``, attend over the cache, and write all of ``out``."""
    if query.shape[0] == 0:
        return
    store_heads(key, value, batch)
    _attend(_rows_in_one_piece(query), batch)


def triton_qkv_attention(
    qkv: torch.Tensor, positions: torch.Tensor, rotary: RotaryEmbedding, batch: PagedBatch
) -> None:
    """Norm, apply RoPE, store, attend over the cache, and write all of ``out``.

    For decode batches it is one kernel, or two of which one attends.
    """
    if qkv.shape[0] == 0:
        return
    qkv = _rows_in_one_piece(qkv)
    if not batch.uniform_decode:
        _attend(store_qkv(qkv, positions, rotary, batch), batch)
        return
    shape = BatchShape.of(batch, num_sms(qkv.device))
    rule = stream_rule(shape) if _fits_hopper_kernels(qkv, batch) else None
    query: torch.Tensor | None
    if rule == ALWAYS:
        query, rule = store_qkv(qkv, positions, rotary, batch), None
    else:
        from ostinato.attention.triton.decode_attention import decode_attention

        query = decode_attention(qkv, positions, rotary, batch, decode_tile_config(shape), rule)
    if query is not None:
        from ostinato.attention.triton.stream_decode import stream_decode

        stream_decode(query, batch, rule=rule)


def triton_latent_attention(
    query: torch.Tensor,
    compressed: torch.Tensor,
    embedding: LatentEmbedding,
    positions: torch.Tensor,
    batch: PagedBatch,
) -> None:
    """Norm, apply RoPE, store, attend over the latent cache, and write all of ``out``.

    Long prompts attend to expanded keys (``latent_expansion``), all else is absorbed. Either way
    leaves zeros where the other has a result.
    """
    if query.shape[0] == 0:
        return
    from ostinato.attention.triton.latent.latent_store import latent_store

    out, up = batch.out, embedding.up
    plain, rope_query = query.tensor_split((query.shape[2] - embedding.table.shape[1],), dim=2)
    mixed = out.new_empty((*out.shape[:2], embedding.rank))
    absorbed = batch._replace(out=mixed)
    rope_query, compressed = _rows_in_one_piece(rope_query), _rows_in_one_piece(compressed)
    rotated = latent_store(rope_query, compressed, embedding, positions, absorbed)
    rest = _attend_expanded(plain, rotated, up, batch)
    if rest is None:
        _attend_latent(absorb(plain, up), rotated, absorbed)
        write_values(mixed, up, out)
        return
    _attend_latent(absorb(plain, up), rotated, absorbed._replace(seq_lens=rest))
    out.transpose(0, 1).baddbmm_(mixed.transpose(0, 1), to_values(up, out.shape[2]))


def _attend_expanded(
    plain: torch.Tensor, rotated: torch.Tensor, up: torch.Tensor, batch: PagedBatch
) -> torch.Tensor | None:
    """Attention of the requests whose keys are expanded; the keys that remain, by request.

    Rows of all others in ``out`` become zero. None: no request of such a batch can be expanded, and
    nothing is written.
    """
    nope, rope, value_dim = plain.shape[2], rotated.shape[2], batch.out.shape[2]
    rule = gpu_rule(up.shape[2], nope + rope, value_dim, rope)
    num_tokens, num_reqs = plain.shape[0], batch.seq_lens.shape[0]
    if batch.uniform_decode or rule is None or num_tokens < rule.least_tokens or num_reqs == 0:
        return None
    from ostinato.attention.triton.latent.latent_expand import expand_latent

    query, sms = torch.cat((plain, rotated), dim=2), num_sms(plain.device)
    expanded, rest = expand_latent(up, batch, rope, rule.least_queries, sms)
    batch.out.zero_()  # padding belongs to no request
    shape = BatchShape.of(expanded, sms)
    prompts = takes_prompts(shape._replace(num_reqs=num_reqs), uniform_decode=False)
    if prompts and _fits_hopper_kernels(query, expanded):
        from ostinato.attention.triton.prefill_attention import prefill_attention

        prefill_attention(query, expanded)
    else:
        from ostinato.attention.triton.paged_attention import paged_attention

        paged_attention(query, expanded, tile_config(shape))
    return rest


def _attend_latent(query: torch.Tensor, rope_query: torch.Tensor, batch: PagedBatch) -> None:
    """Latent attention over what is in the cache."""
    from ostinato.attention.triton.latent.latent_attention import latent_attention

    config = latent_tile_config(LatentShape.of(batch, num_sms(query.device)))
    rope_query = _rows_in_one_piece(rope_query)
    latent_attention(_rows_in_one_piece(query), rope_query, batch, config)


def triton_part_attention(
    query: torch.Tensor,
    batch: PagedBatch,
    local_seq_lens: torch.Tensor,
    part: tuple[int, int, int],
) -> None:
    """Attend over the keys of ``part`` (size, rank, interleave) of the batch's, which are stored.

    ``local_seq_lens`` [R] counts them. Rows of ``batch.out``, in float32, have room for one number
    behind their values: the log-sum-exp of the scores. Where a query sees no key of this part that
    is -inf, and values may not be written. Rows of padding are not written.
    """
    if batch.seq_lens.shape[0] == 0:
        return
    shape = BatchShape.of(batch, num_sms(query.device))
    query = _rows_in_one_piece(query)
    fits = _fits_hopper_kernels(query, batch)
    prompts = fits and takes_prompts(shape, batch.uniform_decode)
    # It would count a window's keys by this part's slots.
    streams = fits and batch.window is None and shape.group <= STREAM_GROUP
    streams = streams and (batch.uniform_decode or (prompts and shape.num_reqs > 1))
    if streams:
        from ostinato.attention.triton.stream_decode import stream_decode

        stream_decode(query.contiguous(), batch._replace(seq_lens=local_seq_lens), lse=True)
    if prompts:
        from ostinato.attention.triton.prefill_attention import prefill_attention

        prefill_attention(query, batch, leave_single=streams, part=part)
    elif not streams:
        from ostinato.attention.triton.paged_attention import paged_attention

        paged_attention(query, batch, tile_config(shape), part)


def store_heads(key: torch.Tensor, value: torch.Tensor, batch: PagedBatch) -> None:
    """Store the new keys and values, and write zeros to the rows of ``out`` that are padding."""
    from ostinato.attention.triton.store_kv import store_kv

    store_kv(_rows_in_one_piece(key), _rows_in_one_piece(value), batch)


def store_qkv(
    qkv: torch.Tensor, positions: torch.Tensor, rotary: RotaryEmbedding, batch: PagedBatch
) -> torch.Tensor:
    """The same from the raw QKV; returns the queries [T, num_heads, head_dim]."""
    from ostinato.attention.triton.rotary_store import rotary_store

    return rotary_store(_rows_in_one_piece(qkv), positions, rotary, batch)


def _attend(query: torch.Tensor, batch: PagedBatch) -> None:
    """Attend over what is in the cache."""
    if batch.seq_lens.shape[0] == 0:
        return
    if batch.values_in_keys:
        rank = batch.out.shape[2]
        _attend_latent(query[..., :rank], query[..., rank:], batch)
        return
    shape = BatchShape.of(batch, num_sms(query.device))
    if not takes_prompts(shape, batch.uniform_decode) or not _fits_hopper_kernels(query, batch):
        from ostinato.attention.triton.paged_attention import paged_attention

        paged_attention(query, batch, tile_config(shape))
        return
    from ostinato.attention.triton.prefill_attention import prefill_attention

    may_decode = shape.num_reqs > 1 and shape.group <= STREAM_GROUP
    if may_decode:
        from ostinato.attention.triton.stream_decode import stream_decode

        stream_decode(query.contiguous(), batch)
    prefill_attention(query, batch, leave_single=may_decode)


def _fits_hopper_kernels(query: torch.Tensor, batch: PagedBatch) -> bool:
    """Whether the kernels for Hopper compute such queries and caches."""
    key_cache, value_cache = batch[:2]
    block_size = key_cache.shape[1]
    return (
        runs_gluon(query.device)
        and query.dtype == key_cache.dtype
        and key_cache.itemsize == 2
        and all(
            64 <= cache.shape[3] <= 256
            and cache.shape[3] % 8 == 0  # bulk copies take multiples of 16 bytes
            and cache.is_contiguous()
            for cache in (key_cache, value_cache)
        )
        and block_size >= 8
        and block_size & (block_size - 1) == 0
        and batch.scale > 0
    )


def _rows_in_one_piece(tensor: torch.Tensor) -> torch.Tensor:
    """The kernels assume that a row's elements are adjacent."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


_operator = define(
    heads_schema("triton_paged_attention"),
    cpu=over_heads(triton_paged_attention),
    cuda=over_heads(triton_paged_attention),
)
_qkv_operator = define(
    qkv_schema("triton_qkv_attention"),
    cpu=over_qkv(triton_qkv_attention),
    cuda=over_qkv(triton_qkv_attention),
)


_latent_operator = define(
    latent_schema("triton_latent_attention"),
    cpu=over_latent(triton_latent_attention),
    cuda=over_latent(triton_latent_attention),
)


class TritonPagedAttention(PagedQkvAttention):
    """The ``AttentionBackend`` for CUDA. Never relies on ``max_seq_len``.

    A replay equals an eager call with the same padded shapes bit for bit. Other shapes may be tiled
    and so rounded differently, and so may a decode batch that ``forward_qkv`` gets in a graph of
    mixed batches.
    """

    name = "triton"
    support = AttentionCGSupport.ALWAYS

    def pays_for_padding(self, device: torch.device) -> bool:
        """Other kernels than those for Hopper split keys by the requests there may be.

        Where there is no GPU to ask, plans are made for Hopper.
        """
        return torch.cuda.is_available() and not runs_gluon(device)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: PagedBatch
    ) -> None:
        _operator(query, key, value, *batch)

    def attend_qkv(
        self, qkv: torch.Tensor, positions: torch.Tensor, rotary: RotaryEmbedding, batch: PagedBatch
    ) -> None:
        """Decode batches in one or two kernels, others in three."""
        if qkv.is_cuda:
            # Not under torch.compile, and a CUDA capture needs no operator to record.
            triton_qkv_attention(qkv, positions, rotary, batch)
            return
        _qkv_operator(qkv, positions, rotary.table, rotary.qk_norm, rotary.eps, *batch)

    @torch.no_grad()
    def forward_latent(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        compressed: torch.Tensor,
        embedding: LatentEmbedding,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        """Decode batches in two kernels and two GEMMs; those with prompts may expand their keys."""
        batch = PagedBatch.of(spec, metadata, out, None)
        if query.is_cuda:  # as above
            triton_latent_attention(query, compressed, embedding, positions, batch)
            return
        tensors = query, compressed, positions
        _latent_operator(*tensors, embedding.table, *embedding.norm, embedding.up, *batch)
