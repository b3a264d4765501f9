"""Random weights of a rank's shard equal that part of the whole model's, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TINY_NATIVE, save_tiny

from ostinato.loading.load import load_model
from ostinato.models.native.config.decoder_config import DecoderConfig
from ostinato.models.native.decoder import Decoder
from ostinato.models.native.shapes import draw_weights, shape_config
from ostinato.parallel.comm import NoComm
from ostinato.parallel.layout import ParallelLayout
from ostinato.parallel.rank_context import RankContext
from ostinato.parallel.sharded.sharded_models import (
    build_models,
    draw_sharded_weights,
    weights_fingerprint,
)


class Named(NoComm):
    """Claims to be one of several ranks, and moves nothing."""

    def __init__(self, size: int, index: int) -> None:
        self.size, self.index = size, index  # type: ignore[misc]


def rank_context_of(sp: int, tp: int, rank: int, device: torch.device) -> RankContext:
    return RankContext(
        layout=ParallelLayout(sp, tp),
        rank=rank,
        device=device,
        comm_of=lambda ranks: Named(len(ranks), list(ranks).index(rank)),
        everyone=NoComm(),
        threshold=4,
    )


def models_of(sp: int, tp: int, rank: int, device: torch.device, dtype: torch.dtype) -> Any:
    config = DecoderConfig.from_hf(shape_config("tiny"))
    return build_models(config, rank_context_of(sp, tp, rank, device), device=device, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("sp", "tp"), [(1, 2), (2, 1), (2, 2), (1, 4)])
def test_parts_of_random_weights(
    sp: int, tp: int, dtype: torch.dtype, device: torch.device
) -> None:
    whole = Decoder(DecoderConfig.from_hf(shape_config("tiny")), device=device, dtype=dtype)
    draw_weights(whole, 5)
    tensors = {slot.name: slot.target for slot in whole.weight_slots()}
    for rank in range(sp * tp):
        models = models_of(sp, tp, rank, device, dtype)
        for model in models:
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        draw_sharded_weights(models, 5)
        for model in models:
            assert not any(parameter.isnan().any() for parameter in model.parameters())
            for slot in model.weight_slots():
                expected = tensors[slot.name]
                if slot.parts:
                    parts = [expected.narrow(slot.dim, p.start, len(p)) for p in slot.parts]
                    expected = torch.cat(parts, slot.dim)
                assert torch.equal(slot.target, expected), (rank, slot.name)
        assert models[1].lm_head is None  # the head is the base model's


@pytest.mark.parametrize("name", ["glm4", "phi4_mini", "cohere2", "nemotron"])
def test_random_weights_whose_rows_are_read_in_another_order(name: str) -> None:
    """As the tensors of a checkpoint, which the whole model would have read."""
    config, device = DecoderConfig.from_hf(TINY_NATIVE[name]()), torch.device("cpu")
    whole = Decoder(config, device=device, dtype=torch.float32)
    draw_weights(whole, 5)
    tensors = {}
    for slot in whole.weight_slots():
        tensors[slot.name] = slot.target.clone()
        if slot.parts:
            rows = torch.tensor([row for part in slot.parts for row in part])
            tensors[slot.name].index_copy_(slot.dim, rows, slot.target)
    for rank in range(2):
        rank_context = rank_context_of(1, 2, rank, device)
        models = build_models(config, rank_context, device=device, dtype=torch.float32)
        draw_sharded_weights(models, 5)
        for model in models:
            for slot in model.weight_slots():
                if slot.parts:
                    rows = torch.tensor([row for part in slot.parts for row in part])
                    expected = tensors[slot.name].index_select(slot.dim, rows)
                    assert torch.equal(slot.target, expected), (rank, slot.name)


def saved(directory: Path, seed: int) -> Path:
    return save_tiny(TINY_NATIVE["qwen3"](), directory, seed=seed)


def fingerprint(path: Path, rank: int, **options: Any) -> str:
    rank_context = rank_context_of(2, 2, rank, torch.device("cpu"))
    loaded = load_model(
        str(path),
        device=rank_context.device,
        dtype=torch.float32,
        rank_context=rank_context,
        tokenizer=False,
        **options,
    )
    return weights_fingerprint(loaded.model, None if options else loaded.path)


def test_fingerprints_tell_models_apart(tmp_path: Path) -> None:
    first, again, other = (
        saved(tmp_path / name, seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    every_rank = {fingerprint(path, rank) for path in (first, again) for rank in range(4)}
    assert len(every_rank) == 1
    assert fingerprint(other, 0) not in every_rank
    assert fingerprint(first, 0, random_weights=True) == fingerprint(other, 1, random_weights=True)
