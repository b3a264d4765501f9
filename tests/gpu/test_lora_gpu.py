"""LoRA on CUDA: the kernels at real shapes in bfloat16; graphs against eager in a mixed batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ostinato import LLM, GraphConfig, GraphPool, SamplingParams
from ostinato.ops.gemm import lora
from ostinato.ops.gemm.linear import Gemm, Norm, choose_kernel
from ostinato.ops.gemm.lora import NO_SLOT, NOT_ACTIVE, LoraRows, LoraWeights
from ostinato.ops.gemm.lora_linear import (
    can_fuse,
    lora_linear,
    lora_linear_apart,
    run_lora_kernels,
)
from ostinato.ops.gemm.tile_config import TileConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def made(
    num_rows: int, inner: int, widths: tuple[int, ...], rank: int, num_slots: int
) -> tuple[torch.Tensor, torch.Tensor, LoraWeights, LoraRows]:
    like: dict[str, Any] = {"dtype": torch.bfloat16, "device": CUDA}
    a = torch.randn(num_slots, len(widths) * rank, inner, **like) / inner**0.5
    b = torch.randn(num_slots, sum(widths), rank, **like) / rank**0.5
    x, y = torch.randn(num_rows, inner, **like), torch.randn(num_rows, sum(widths), **like)
    slots = torch.randint(NO_SLOT, num_slots, (num_rows,), dtype=torch.int32, device=CUDA)
    used = sorted(set(slots.tolist()) - {NO_SLOT})
    padded = used + [NOT_ACTIVE] * (num_slots + 1 - len(used))
    active = torch.tensor(padded, dtype=torch.int32, device=CUDA)
    return x, y, LoraWeights(a, b, widths), LoraRows(slots, active)


def expected(
    y: torch.Tensor, x: torch.Tensor, weights: LoraWeights, rows: LoraRows
) -> torch.Tensor:
    """One adapter after the other, in float64."""
    result, rank = y.double(), weights.rank
    for slot in set(rows.slots.tolist()) - {NO_SLOT}:
        mine, end = rows.slots == slot, 0
        for part, width in enumerate(weights.widths):
            columns = slice(end, end + width)
            end += width
            a = weights.a[slot, part * rank : (part + 1) * rank].double()
            small = (x[mine].double() @ a.T).to(torch.bfloat16).double()  # as PEFT rounds it
            result[mine, columns] += small @ weights.b[slot, columns].double().T
    return result


SHAPES = [(4096, (4096, 1024, 1024)), (4096, (4096,)), (14336, (4096,)), (2048, (100, 37))]


@pytest.mark.parametrize("rank", [16, 64, 256])
@pytest.mark.parametrize(("inner", "widths"), SHAPES)
@pytest.mark.parametrize("num_rows", [1, 3, 32, 64, 65, 1000])
def test_kernels_at_real_shapes(
    num_rows: int, inner: int, widths: tuple[int, ...], rank: int
) -> None:
    x, y, weights, rows = made(num_rows, inner, widths, rank, num_slots=8)
    want = expected(y, x, weights, rows)
    before = y.clone()
    lora.expand(y, lora.shrink(x, weights, rows), weights, rows)
    torch.testing.assert_close(y.double(), want, rtol=2**-7, atol=0.03)
    without = rows.slots == NO_SLOT
    assert torch.equal(y[without], before[without])


@pytest.mark.parametrize("rank", [16, 64, 256])
@pytest.mark.parametrize("widths", [(14336, 14336), (28672,)], ids=["two parts", "fused"])
@pytest.mark.parametrize("num_rows", [1, 32, 200])
def test_gated_at_real_shapes(num_rows: int, widths: tuple[int, ...], rank: int) -> None:
    x, y, weights, rows = made(num_rows, 4096, widths, rank, num_slots=8)
    gate, up = expected(y, x, weights, rows).chunk(2, dim=1)
    got = lora.expand_gated(y, lora.shrink(x, weights, rows), weights, rows)
    want = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(got.double(), want, rtol=2**-6, atol=0.05)


# --- adapters in the GEMM's own kernel ------------------------------------------------------------

QKV, OUTPUT, GATE_UP, DOWN = (
    {"inner": 4096, "widths": (4096, 1024, 1024), "norm": True},
    {"inner": 4096, "widths": (4096,), "residual": True},
    {"inner": 4096, "widths": (14336, 14336), "norm": True, "gated": True},
    {"inner": 14336, "widths": (4096,), "residual": True},
)


def made_gemm(
    num_rows: int,
    rank: int,
    num_slots: int = 8,
    *,
    inner: int,
    widths: tuple[int, ...],
    norm: bool = False,
    gated: bool = False,
    residual: bool = False,
) -> tuple[Gemm, LoraWeights, LoraRows]:
    x, y, weights, rows = made(num_rows, inner, widths, rank, num_slots)
    weight = (torch.randn(sum(widths), inner, device=CUDA) / inner**0.5).to(torch.bfloat16)
    norm_weight = Norm(1 + 0.1 * torch.randn_like(weight[0]), 1e-5) if norm else None
    gemm = Gemm(x, weight, None, norm_weight, gated, y if residual else None)
    return gemm, weights, rows


def expected_gemm(gemm: Gemm, weights: LoraWeights, rows: LoraRows) -> torch.Tensor:
    x = gemm.x.double()
    if gemm.norm is not None:
        x = F.rms_norm(x, x.shape[1:], gemm.norm.weight.double(), gemm.norm.eps)
    y = expected(x @ gemm.weight.double().T, x, weights, rows)
    if gemm.gated:
        gate, up = y.chunk(2, dim=1)
        y = F.silu(gate) * up
    return y if gemm.residual is None else y + gemm.residual.double()


@pytest.mark.parametrize("rank", [16, 64, 128])
@pytest.mark.parametrize("case", [QKV, OUTPUT, GATE_UP, DOWN], ids=["qkv", "o", "gate_up", "down"])
@pytest.mark.parametrize("num_rows", [1, 3, 16, 32, 64])
def test_small_m_gemms_at_real_shapes(num_rows: int, case: dict[str, Any], rank: int) -> None:
    gemm, weights, rows = made_gemm(num_rows, rank, **case)
    choice = choose_kernel(gemm, adapters=True)
    assert choice != "torch"
    assert can_fuse(choice, gemm, weights)
    y, want = lora_linear(gemm, weights, rows), expected_gemm(gemm, weights, rows)
    # By norms: results are sums of 4,096 terms and more, of which some cancel out.
    assert (y.double() - want).norm() < 2**-7 * want.norm()
    assert torch.equal(lora_linear(gemm, weights, rows), y)  # sums have a fixed order


@pytest.mark.parametrize("split_k", [1, 2])
@pytest.mark.parametrize(
    "tiles", [(32, 64, 4), (64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 64, 8)]
)
@pytest.mark.parametrize("num_rows", [3, 24, 48])
def test_adapters_in_tiles_of_any_size(
    num_rows: int, tiles: tuple[int, int, int], split_k: int
) -> None:
    """Which tensor-core instructions a tile gets depends on its sizes and on the rows'.

    With the products of gate and up in one branch, results were wrong where a warp group had 64
    columns of up to 32 rows; in one loop, at rank 64.
    """
    for case in (GATE_UP, QKV):
        gemm, weights, rows = made_gemm(num_rows, 16, **case)
        config = TileConfig(*tiles, num_stages=4, split_k=split_k, prefetch=1)
        y, want = run_lora_kernels(config, gemm, weights, rows), expected_gemm(gemm, weights, rows)
        assert (y.double() - want).norm() < 2**-7 * want.norm()


@pytest.mark.parametrize("num_slots", [1, 20])
@pytest.mark.parametrize("case", [QKV, GATE_UP, DOWN], ids=["qkv", "gate_up", "down"])
def test_small_m_gemms_with_one_adapter_and_with_many(case: dict[str, Any], num_slots: int) -> None:
    """Groups of 8 adapters of rank 16 are multiplied at once: 20 take several turns."""
    gemm, weights, rows = made_gemm(40, 16, num_slots, **case)
    y, want = lora_linear(gemm, weights, rows), expected_gemm(gemm, weights, rows)
    # By norms: results are sums of 4,096 terms and more, of which some cancel out.
    assert (y.double() - want).norm() < 2**-7 * want.norm()


@pytest.mark.parametrize("num_rows", [1, 8, 32])
def test_a_chain_of_overlapping_kernels(num_rows: int) -> None:
    """Kernels of a graph start before the previous one is done, and wait for what they read."""
    layers = [
        [made_gemm(num_rows, 16, **case)[:2] for case in (OUTPUT, GATE_UP, DOWN)] for _ in range(6)
    ]
    first, _, rows = made_gemm(num_rows, 16, **OUTPUT)

    def run(one: Callable[[Gemm, LoraWeights, LoraRows], torch.Tensor]) -> torch.Tensor:
        hidden = first.x
        for (output, output_lora), (gate_up, gate_up_lora), (down, down_lora) in layers:
            hidden = one(output._replace(x=hidden, residual=hidden), output_lora, rows)
            wide = one(gate_up._replace(x=hidden), gate_up_lora, rows)
            hidden = one(down._replace(x=wide, residual=hidden), down_lora, rows)
        return hidden

    want = run(lora_linear)
    with GraphPool(CUDA, lazy_capture=True) as pool:
        captured = pool.capture(lambda: run(lora_linear))
        for _ in range(5):
            captured.output.zero_()
            pool.replay(captured.tape)
            assert torch.equal(captured.output, want)
    apart = run(lora_linear_apart)
    assert (want - apart).float().norm() < 0.02 * apart.float().norm()


# --- engines --------------------------------------------------------------------------------------

NUM_ADAPTERS = 3
PROMPTS = [[(7 * row + 3 * column) % 97 + 3 for column in range(8)] for row in range(8)]
WANTED = ["0", None, "1", "2", "0", "1", None, "2"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def open_llm(mode: str) -> LLM:
    """Batches of exactly 8 and 64 tokens are captured, so eager runs the same kernels."""
    llm = LLM(
        "tiny",
        random_weights=True,
        device="cuda",
        dtype="bfloat16",
        max_num_seqs=8,
        max_model_len=64,
        kv_cache_memory_bytes="64M",
        enable_lora=True,
        max_loras=NUM_ADAPTERS,
        show_progress=False,
        enable_prefix_caching=False,
        graphs=GraphConfig(mode=mode, capture_sizes=None if mode == "NONE" else [8, 64]),
    )
    for number in range(NUM_ADAPTERS):
        put_random(llm, str(number), seed=number)
    return llm


def put_random(llm: LLM, name: str, seed: int) -> None:
    weights = llm.engine.runner.adapters
    assert weights is not None
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, device=CUDA) / shape[-1] ** 0.5
        return values.to(weights.dtype)

    matrices = {
        module: (draw(8, target.inputs), draw(target.outputs, 8))
        for module, target in weights.targets.items()
    }
    llm.engine.adapters.put(name, matrices)


def tokens_of(llm: LLM, wanted: list[str | None]) -> list[list[int]]:
    outputs = llm.generate(PROMPTS[: len(wanted)], GREEDY, adapter=wanted)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    "mode", ["PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "FULL_AND_FULL"]
)
def test_graphs_are_eager_bit_by_bit(mode: str) -> None:
    """FULL runs decode batches through the graphs of prompts, whose attention rounds differently:
    there only the tokens after the prompts are the same."""
    same = slice(1) if mode == "FULL" else slice(None)
    with open_llm("NONE") as eager:
        want = tokens_of(eager, WANTED)
        plain = tokens_of(eager, [None] * 8)
    assert want[0] != plain[0]
    with open_llm(mode) as llm:
        for wanted, expected in ((WANTED, want), ([None] * 8, plain)):
            tokens = tokens_of(llm, wanted)
            assert [row[same] for row in tokens] == [row[same] for row in expected]
        runner = llm.engine.runner
        cases = {key.num_active_loras for key in runner.stats.replays}
        assert cases == {0, NUM_ADAPTERS}


def test_an_adapter_is_replaced_on_another_stream() -> None:
    with open_llm("FULL_AND_PIECEWISE") as llm:
        before = tokens_of(llm, ["0"] * 8)
        second = tokens_of(llm, ["1"] * 8)
        with torch.cuda.stream(torch.cuda.Stream()):
            put_random(llm, "0", seed=1)
            assert tokens_of(llm, ["0"] * 8) == second
        put_random(llm, "0", seed=0)
        assert tokens_of(llm, ["0"] * 8) == before
