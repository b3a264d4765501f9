"""RoPE of queries and keys by given cosines and sines, as transformers' modules apply it.

The native decoder does not need it: its attention applies RoPE on the way into the KV cache.
Computed in float32 and rounded once. On CUDA this is one Triton kernel; elsewhere torch operators.
"""

from __future__ import annotations

import torch

from ostinato.ops.triton.launch import launch, next_power_of_2, overlap

_HEADS = 16  # per program


def rotate_heads(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``query`` and ``key`` [heads, T, D], rotated in pairs (i, i + D / 2); same shapes.

    ``cos`` and ``sin`` [T, D]. The results are new, and contiguous as [T, heads, D].
    """
    if query.is_cuda:
        return triton_rotate_heads(query, key, cos, sin)
    wide_cos, wide_sin = cos.float(), sin.float()
    rotated = []
    for heads in (query.float(), key.float()):
        first, second = heads.chunk(2, dim=-1)
        rotated_half = torch.cat((-second, first), dim=-1)
        rotated.append((heads * wide_cos + rotated_half * wide_sin).to(query.dtype))
    return rotated[0], rotated[1]


def triton_rotate_heads(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rotate_heads`` in Triton. CPU tensors are for the tests, under Triton's interpreter."""
    from ostinato.ops.triton.rotate_heads import rotate_heads_kernel

    (num_heads, num_tokens, dim), num_kv_heads = query.shape, key.shape[0]
    results = [
        torch.empty((num_tokens, each.shape[0], dim), dtype=each.dtype, device=each.device)
        for each in (query, key)
    ]
    if num_tokens:
        query, key, cos, sin = (
            each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, cos, sin)
        )
        strides = (query.stride(1), query.stride(0), key.stride(1), key.stride(0))
        launch(
            rotate_heads_kernel,
            (num_tokens, -(-(num_heads + num_kv_heads) // _HEADS)),
            (query, key, cos, sin, *results),
            (*strides, cos.stride(0), sin.stride(0)),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HALF=dim // 2,
            HALF_PAD=next_power_of_2(dim // 2),
            HEADS=_HEADS,
            **overlap(query.device),
            num_warps=4,
        )
    return results[0].transpose(0, 1), results[1].transpose(0, 1)
