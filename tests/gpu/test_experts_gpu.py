"""What only a GPU shows of mixtures of experts: bfloat16, tensor cores, graphs, overlap.

The kernels' arithmetic is tested in ``tests/ops/experts/test_experts.py``, in Triton's interpreter.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_models import TINY_MIXTURES
from torch import Tensor
from transformers import Qwen3MoeConfig

from ostinato import LLM, GraphConfig, SamplingParams
from ostinato.models.native.config.decoder_config import DecoderConfig
from ostinato.models.native.exchange import ALONE
from ostinato.models.native.fused_kernels import LargeM, SmallM
from ostinato.models.native.layer import DecoderLayer
from ostinato.models.native.layer_kernels import AnyKernels, Plain
from ostinato.ops.experts.expert_kernels import down_row, expert_parts, gate_up_row
from ostinato.ops.experts.experts import run_experts
from ostinato.ops.experts.mixture import Mixture
from ostinato.ops.experts.own_experts import run_own_experts
from ostinato.ops.experts.routing import RouterOptions, route
from ostinato.ops.gemm.linear import Norm
from ostinato.ops.triton.counters import shared_counters
from ostinato.parallel.comm import NoComm
from ostinato.parallel.rank_exchange import ReplicaExchange

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = torch.device("cuda", 0)
# experts, top-k, hidden, width
SHAPES = {
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "qwen1.5-moe": (60, 4, 2048, 1408),
    "mixtral": (8, 2, 1024, 3584),
    "odd": (7, 3, 360, 136),
    "glm": (160, 8, 1280, 384),
}


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, size: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=CUDA) * size).to(dtype)


def mixture_of(
    name: str,
    options: RouterOptions | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    biases: bool = False,
) -> Mixture:
    experts, top_k, hidden, width = SHAPES[name]
    options = RouterOptions(top_k=top_k) if options is None else options
    return Mixture(
        options=options,
        router=draw(experts, hidden, size=2 * hidden**-0.5, dtype=dtype),
        gate_up=draw(experts, 2 * width, hidden, size=hidden**-0.5, dtype=dtype),
        down=draw(experts, hidden, width, size=2 * width**-0.5, dtype=dtype),
        router_bias=draw(experts, dtype=dtype) if biases else None,
        gate_up_bias=draw(experts, 2 * width, dtype=dtype) if biases else None,
        down_bias=draw(experts, hidden, dtype=dtype) if biases else None,
        correction=draw(experts, size=0.1).float() if options.scoring == "sigmoid" else None,
        load=torch.zeros(experts, device=CUDA, dtype=torch.int64),
        activation="clamped_swiglu" if biases else "silu",
    )


def reference(x: Tensor, mixture: Mixture, slots: Tensor, norm: Norm | None) -> Tensor:
    """In float32 from the same inputs, expert by expert; the norm is rounded as it is there."""
    if norm is not None:
        scaled = F.rms_norm(x.float(), x.shape[-1:], None, norm.eps).to(x.dtype)
        x = (scaled.float() * norm.weight.float()).to(x.dtype)
    bias = None if mixture.router_bias is None else mixture.router_bias.float()
    logits = F.linear(x.float(), mixture.router.float(), bias)
    experts, weights = route(logits, mixture.options, correction=mixture.correction, slots=slots)
    total = torch.zeros(x.shape, device=CUDA, dtype=torch.float32)
    for expert in range(mixture.num_experts):
        tokens, numbers = (experts == expert).nonzero(as_tuple=True)
        if not tokens.numel():
            continue
        y = F.linear(x[tokens].float(), mixture.gate_up[expert].float())
        if mixture.gate_up_bias is not None:
            y = y + mixture.gate_up_bias[expert].float()
        gate, up = y.chunk(2, dim=1)
        if mixture.activation == "silu":
            inner = F.silu(gate) * up
        else:
            gate, up = gate.clamp(max=7), up.clamp(-7, 7)
            inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        y = F.linear(inner, mixture.down[expert].float())
        if mixture.down_bias is not None:
            y = y + mixture.down_bias[expert].float()
        total.index_add_(0, tokens, y * weights[tokens, numbers, None])
    return total


def run(x: Tensor, mixture: Mixture, slots: Tensor, norm: Norm | None) -> Tensor:
    """As a decode step does; the parts are added up by the next norm."""
    if x.shape[0] == 1:
        return down_row(gate_up_row(x, mixture, slots, norm), None)
    return expert_parts(x, mixture, slots, norm).float().sum(0)


def check(y: Tensor, expected: Tensor) -> None:
    """Half precision rounds what is between the GEMMs, and the result of every expert."""
    error = (y.float() - expected).norm() / expected.norm()
    assert error < 0.01, error
    assert (y.float() - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 16, 33, 64, 65, 300])
@pytest.mark.parametrize("name", SHAPES)
def test_kernels(name: str, num_tokens: int) -> None:
    mixture = mixture_of(name)
    hidden = mixture.router.shape[1]
    x, norm = draw(num_tokens, hidden), Norm(draw(hidden), 1e-6)
    slots = torch.arange(num_tokens, device=CUDA)
    if num_tokens > 2:
        slots[1::3] = -1
        x[1::3] = torch.nan  # poison in padding
    y = run(x, mixture, slots, norm)
    check(y, reference(x.nan_to_num(), mixture, slots, norm))
    assert (y[slots < 0] == 0).all()
    assert mixture.load is not None
    assert int(mixture.load.sum()) == int((slots >= 0).sum()) * mixture.options.top_k


@pytest.mark.parametrize("num_tokens", [2048, 5000])
def test_prompts(num_tokens: int) -> None:
    mixture = mixture_of("qwen3-30b-a3b")
    x = draw(num_tokens, 2048)
    slots = torch.arange(num_tokens, device=CUDA)
    slots[-100:] = -1
    check(run(x, mixture, slots, None), reference(x, mixture, slots, None))


@pytest.mark.parametrize("num_tokens", [1, 40, 300])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        RouterOptions(top_k=3, renormalize=False),
        RouterOptions(top_k=6, scoring="sigmoid", scale=2.5),
        RouterOptions(top_k=4, scoring="sigmoid", num_groups=8, top_groups=3),
        RouterOptions(top_k=4, renormalize=False, num_groups=8, top_groups=3, group_best=1),
    ],
    ids=["plain", "sigmoid", "groups", "best of groups"],
)
def test_routers(options: RouterOptions, biases: bool, num_tokens: int) -> None:
    mixture = mixture_of("glm", options, biases=biases)
    x, slots = draw(num_tokens, 1280), torch.arange(num_tokens, device=CUDA)
    norm = Norm(draw(1280), 1e-6)
    check(run(x, mixture, slots, norm), reference(x, mixture, slots, norm))


@pytest.mark.parametrize("num_tokens", [1, 17, 200])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_types(dtype: torch.dtype, num_tokens: int) -> None:
    mixture = mixture_of("odd", dtype=dtype)
    x, slots = draw(num_tokens, 360, dtype=dtype), torch.arange(num_tokens, device=CUDA)
    norm = Norm(draw(360, dtype=dtype), 1e-6)
    y, expected = run(x, mixture, slots, norm), reference(x, mixture, slots, norm)
    check(y, expected)
    if dtype is torch.float32:
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [8, 300])
def test_all_tokens_to_the_same_experts(num_tokens: int) -> None:
    mixture = mixture_of("qwen3-30b-a3b")
    x = draw(num_tokens, 2048).abs()
    mixture.router.fill_(-0.01)
    mixture.router[40:48] = torch.linspace(0.01, 0.02, 8, device=CUDA)[:, None]
    slots = torch.arange(num_tokens, device=CUDA)
    check(run(x, mixture, slots, None), reference(x, mixture, slots, None))
    assert mixture.load is not None
    assert mixture.load[40:48].tolist() == [num_tokens] * 8


@pytest.mark.parametrize("num_tokens", [1, 4, 32, 300])
def test_replays(num_tokens: int) -> None:
    """New tokens, new padding, and new counters in each; three layers behind one another."""
    mixtures = [mixture_of("qwen1.5-moe") for _ in range(3)]
    x, slots = draw(num_tokens, 2048), torch.arange(num_tokens, device=CUDA)
    norm = Norm(draw(2048), 1e-6)

    def layers(x: Tensor) -> Tensor:
        for mixture in mixtures:
            x = run(x, mixture, slots, norm).to(x.dtype) + x
        return x

    layers(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), shared_counters(CUDA):
        y = layers(x)
    for turn in range(6):
        x.copy_(draw(num_tokens, 2048))
        slots.copy_(torch.arange(num_tokens, device=CUDA))
        if num_tokens > 1:
            slots[turn::4] = -1
            x[turn::4] = torch.nan
        graph.replay()
        real = slots >= 0
        again = layers(x)
        assert torch.equal(y[real], again[real])
        assert y[real].isfinite().all()


@pytest.mark.parametrize("num_tokens", [2, 64, 3000])
@pytest.mark.parametrize(("name", "num_ranks"), [("qwen3-30b-a3b", 8), ("mixtral", 2)])
def test_experts_over_ranks(name: str, num_ranks: int, num_tokens: int) -> None:
    """The outputs of all ranks' own experts add up, under a graph too, with new tokens."""
    mixture = mixture_of(name)
    hidden, own = mixture.router.shape[1], mixture.num_experts // num_ranks
    ranks = [
        mixture._replace(first=first, gate_up=mixture.gate_up[rows], down=mixture.down[rows])
        for first in range(0, mixture.num_experts, own)
        for rows in [slice(first, first + own)]
    ]
    x, slots = draw(num_tokens, hidden), torch.arange(num_tokens, device=CUDA)

    def total() -> Tensor:
        return torch.stack([run_own_experts(x, each, slots) for each in ranks]).float().sum(0)

    total()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), shared_counters(CUDA):
        y = total()
    assert mixture.load is not None
    for turn in range(2):
        x.copy_(draw(num_tokens, hidden))
        slots.copy_(torch.arange(num_tokens, device=CUDA))
        slots[turn] = -1
        x[turn] = torch.nan
        mixture.load.zero_()
        graph.replay()
        check(y, reference(x.nan_to_num(), mixture, slots, None))
        assert (y[slots < 0] == 0).all()
        assert int(mixture.load.sum()) == int((slots >= 0).sum()) * mixture.options.top_k


def test_an_operator_for_compiled_models() -> None:
    mixture = mixture_of("qwen1.5-moe")
    x, slots = draw(20, 2048), torch.arange(20, device=CUDA)
    slots[3] = -1
    check(run_experts(x, mixture, slots), reference(x, mixture, slots, None))


@pytest.mark.parametrize("num_tokens", [1, 3, 64, 100])
@pytest.mark.parametrize("name", ["qwen2_moe", "glm4_moe", "mixtral"])
def test_layers(name: str, num_tokens: int) -> None:
    """The strategies of both small and large batches, with shared experts, against plain torch."""
    config = DecoderConfig.from_hf(TINY_MIXTURES[name]())
    layer = DecoderLayer(
        config, 2 if config.num_layers > 2 else 1, device=CUDA, dtype=torch.float32
    )
    generator = torch.Generator(CUDA).manual_seed(0)
    for parameter in layer.parameters():
        parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    layer.to(torch.bfloat16)
    assert layer.mixture is not None
    if layer.mixture.correction_bias is not None:
        layer.mixture.correction_bias.data = layer.mixture.correction_bias.float()
    tables = [config.rotary.table(64, CUDA)]
    positions = torch.zeros(num_tokens, dtype=torch.int64, device=CUDA)
    x, stream = draw(num_tokens, config.hidden_size), draw(num_tokens, config.hidden_size)
    slots = torch.arange(num_tokens, device=CUDA)
    results = []
    strategies: list[AnyKernels] = [
        SmallM(tables, positions),
        LargeM(tables, positions),
        Plain(tables, positions, torch.bfloat16),
    ]
    # As it is, and as a replica whose experts see the tokens of all, of which there is one.
    for exchange in (ALONE, ReplicaExchange(NoComm(), NoComm())):
        layer.exchange = exchange
        for run in strategies:
            run.slots = slots
            normed, residual = run.norm(layer.mlp_norm, x, stream)
            results.append(run.add(*run.finish(layer.mlp(normed, run), residual)))
    for got in (*results[:2], *results[3:]):
        assert got.shape == results[2].shape
        check(got, results[2].float())


def test_a_model_with_experts(tmp_path: Path) -> None:
    """Every real token counts, none of the padding, in graphs of either kind."""
    Qwen3MoeConfig(
        vocab_size=1000,
        hidden_size=2048,
        num_hidden_layers=3,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
    ).save_pretrained(tmp_path)
    prompts = [list(range(5, 5 + length)) for length in (3, 40, 170)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(
        tmp_path,
        random_weights=True,
        device="cuda",
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes="1G",
        graphs=GraphConfig(mode="FULL_AND_PIECEWISE", capture_sizes=[1, 4, 8, 512]),
        enable_prefix_caching=False,
        show_progress=False,
        tune="off",
    ) as llm:
        llm.expert_load(reset=True)
        first = llm.generate(prompts, params)
        load = llm.expert_load(reset=True)
        again = llm.generate(prompts, params)
        alone = llm.generate(prompts[0], params)
        stats = llm.engine.runner.stats
        assert stats.misses == 0
    tokens = [result.outputs[0].token_ids for result in first]
    assert tokens == [result.outputs[0].token_ids for result in again]
    assert len(alone[0].outputs[0].token_ids) == 12
    num_computed = sum(map(len, prompts)) + 3 * 11  # the last token is not fed back
    assert list(load) == list(range(3))
    assert [sum(counts) for counts in load.values()] == [num_computed * 8] * 3
