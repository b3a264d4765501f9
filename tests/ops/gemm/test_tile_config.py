"""The model that chooses tile configs for shapes that were never measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ostinato.ops.gemm import tile_config, tuning
from ostinato.ops.gemm.tile_config import (
    Gpu,
    LinearShape,
    TileConfig,
    candidates,
    default_choice,
    predicted_us,
    row_class,
)

H200 = Gpu("NVIDIA H200")
GPUS = [H200, Gpu("NVIDIA A100", 108, 163 * 1024, False), Gpu("NVIDIA L4", 58, 99 * 1024, False)]
OLD_TRITON = H200._replace(gluon=False)  # shared memory for all but one row
TABLE = tuning.read_table(Path(tuning.__file__).with_name("tuned_h200.json").read_text())


def parsed(key: str) -> LinearShape:
    _, dtype, rows, sizes, flags = key.split("/")
    n, k = map(int, sizes.split("x"))
    names = ("norm", "gated", "residual")
    return LinearShape(int(rows), n, k, getattr(torch, dtype), *(name in flags for name in names))


@pytest.mark.parametrize(
    ("num_rows", "most"),
    [(1, 1), (2, 8), (8, 8), (9, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64)],
)
def test_classes_of_rows(num_rows: int, most: int) -> None:
    assert row_class(num_rows) == most


@given(
    num_rows=st.integers(1, 64),
    n=st.integers(1, 200_000),
    k=st.integers(1, 30_000),
    gated=st.booleans(),
    gpu=st.sampled_from([*GPUS, OLD_TRITON]),
)
@example(num_rows=64, n=1, k=1, gated=True, gpu=H200)
@example(num_rows=16, n=200_000, k=30_000, gated=True, gpu=GPUS[-1])
def test_candidates_are_few_and_run(num_rows: int, n: int, k: int, gated: bool, gpu: Gpu) -> None:
    shape = LinearShape(num_rows, 2 * n if gated else n, k, torch.bfloat16, gated=gated)
    configs = candidates(shape, gpu)
    assert len(set(configs)) == len(configs) <= 5
    for config in configs:
        assert tuning.choice_from_json(json.loads(json.dumps(config.as_json()))) == config
        if num_rows == 1:
            assert config.split_k == 1
            continue
        if gpu is H200 and num_rows <= 8:
            assert (config.num_stages, config.split_k, config.prefetch) == (1, 1, 0)
            assert config.block_n in (16, 32)
            assert config.block_k in (32, 64, 128)
            continue
        tile = (config.block_n * (2 if gated else 1) + row_class(num_rows)) * config.block_k
        assert 2 * tile * config.num_stages <= gpu.shared_memory
        assert config.block_n >= 16  # what tensor cores take
        assert config.block_n % 16 == config.block_k % 16 == 0
        assert config.num_stages >= 2
        # The last program of a tile has inputs too, and nothing beyond them is prefetched.
        blocks = -(-k // (config.block_k * config.split_k))
        assert (config.split_k - 1) * blocks * config.block_k < k
        assert config.prefetch <= blocks
    default = default_choice(shape, gpu)
    assert default == ("torch" if num_rows > 16 and gpu not in (H200, OLD_TRITON) else configs[0])


def test_the_model_agrees_with_what_was_measured() -> None:
    """Of several rows: the tiles and split that were fastest, or others as good by the model."""
    shapes = {key: shape for key in TABLE if (shape := parsed(key)).num_rows > 8}
    alike = []
    for key, shape in shapes.items():
        tuned, chosen = TABLE[key], default_choice(shape, H200)
        assert isinstance(tuned, TileConfig)
        assert isinstance(chosen, TileConfig)
        assert predicted_us(shape, tuned, H200) < 1.2 * predicted_us(shape, chosen, H200), key
        if (tuned.block_n, tuned.split_k) == (chosen.block_n, chosen.split_k):
            alike.append(key)
            depth = chosen.block_k * chosen.num_stages / (tuned.block_k * tuned.num_stages)
            assert 0.6 < depth <= 1.5, key
    assert len(shapes) == 30
    assert len(alike) >= 24


def test_programs_fill_the_sms_evenly() -> None:
    """40 tiles of 64 results are split by 3, for 120 programs: 160 would need a second round."""
    down = LinearShape(16, 2560, 9728, torch.bfloat16, residual=True)
    config = default_choice(down, H200)
    assert isinstance(config, TileConfig)
    assert 90 <= 2560 // config.block_n * config.split_k <= 132
    few, many = (config._replace(split_k=split) for split in (3, 4))
    assert predicted_us(down, few, H200) < predicted_us(down, many, H200)
    # 152 tiles of 64 pairs would leave 20 programs for a second round.
    gate_up = LinearShape(16, 19456, 2560, torch.bfloat16, norm=True, gated=True)
    config = default_choice(gate_up, H200)
    assert isinstance(config, TileConfig)
    assert -(-9728 // config.block_n) * config.split_k <= 132


def test_fewer_sms_get_fewer_programs() -> None:
    shape = LinearShape(16, 2048, 8192, torch.bfloat16, residual=True)
    full, half = (default_choice(shape, Gpu("", sms)) for sms in (132, 66))
    assert isinstance(full, TileConfig)
    assert isinstance(half, TileConfig)
    assert half.split_k < full.split_k


def test_the_choice_depends_on_the_class_of_rows_only() -> None:
    for shape in map(parsed, TABLE):
        low = {1: 1, 8: 2, 16: 9, 32: 17, 64: 33}[shape.num_rows]
        assert candidates(shape._replace(num_rows=low), H200) == candidates(shape, H200)
    assert tile_config.MAX_ROWS == 64
