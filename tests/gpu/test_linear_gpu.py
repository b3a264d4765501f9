"""What only a GPU shows of small-M GEMMs: bfloat16, tensor cores, graphs, overlap.

The kernels' arithmetic is tested in ``tests/ops/gemm/test_linear.py``, here on CUDA as well.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato import GraphPool
from ostinato.ops.activation import Activation, activate
from ostinato.ops.gemm import linear as module
from ostinato.ops.gemm.linear import Gemm, Norm, linear, run_kernel, torch_linear
from ostinato.ops.gemm.measuring import StepGemm, compile_all, measure_step
from ostinato.ops.gemm.tile_config import GemmChoice, LinearShape, TileConfig, candidates, gpu_of
from ostinato.ops.triton.counters import shared_counters

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = torch.device("cuda", 0)


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, size: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=CUDA) * size).to(dtype)


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """In float64, from the same inputs."""
    y = x.double()
    if norm is not None:
        y = F.rms_norm(y, y.shape[-1:], norm.weight.double(), norm.eps)
    y = F.linear(y, weight.double(), None if bias is None else bias.double())
    if gated:
        gate, up = y.chunk(2, dim=1)
        y = F.silu(gate) * up
    return y if residual is None else y + residual.double()


def check(y: Tensor, expected: Tensor) -> None:
    tolerance = 4 * torch.finfo(y.dtype).eps
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=2 * tolerance)


@pytest.mark.parametrize(
    ("dtype", "num_rows"),
    [(torch.bfloat16, rows) for rows in (1, 2, 5, 8, 9, 16, 17, 32, 33, 64)]
    + [(torch.float16, rows) for rows in (1, 8)],
    ids=str,
)
@pytest.mark.parametrize(
    ("kind", "n", "k"),
    [("qkv", 768, 512), ("o", 70, 136), ("gate_up", 1536, 576), ("all", 34, 100)],
)
def test_every_tile_config_computes_the_gemm(
    kind: str, n: int, k: int, num_rows: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(n + num_rows)
    gated = kind in ("gate_up", "all")
    x, weight = draw(num_rows, k, dtype=dtype), draw(n, k, dtype=dtype, size=k**-0.5)
    norm = Norm(draw(k, dtype=dtype), 1e-5) if kind != "o" else None
    outputs = n // 2 if gated else n
    residual = draw(num_rows, outputs, dtype=dtype) if kind in ("o", "all") else None
    bias = draw(n, dtype=dtype) if kind in ("qkv", "all") else None
    shape = LinearShape(num_rows, n, k, dtype, norm is not None, gated, residual is not None)
    configs = candidates(shape, gpu_of(CUDA))
    if num_rows > 1:
        configs = [*configs[:3], TileConfig(64, 64, 4, 3, split_k=3, prefetch=1)]
    if 1 < num_rows <= 16:  # in registers
        configs += [TileConfig(16, 32, 8), TileConfig(32, 64, 4), TileConfig(32, 128, 2)]
    expected = reference(x, weight, bias, norm, gated, residual)
    gemm = Gemm(x, weight, bias, norm, gated, residual)
    for config in configs:
        check(run_kernel(config, gemm), expected)
    check(torch_linear(gemm), expected)
    check(linear(x, weight, bias, norm=norm, gated=gated, residual=residual), expected)


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu", "relu2"])
@pytest.mark.parametrize("num_rows", [1, 8, 16, 32, 64])
def test_gates_of_other_families(num_rows: int, activation: Activation) -> None:
    """Gemma-3-1B's GEMM, with the weight of its norm in float32."""
    torch.manual_seed(num_rows)
    x, weight = draw(num_rows, 1152), draw(2 * 6912, 1152, size=1152**-0.5)
    norm = Norm(1 + 0.2 * torch.randn(1152, device=CUDA), 1e-6)
    y = F.rms_norm(x.double(), (1152,), norm.weight.double(), norm.eps)
    gate, up = F.linear(y, weight.double()).chunk(2, dim=1)
    expected = activate(gate, activation) * up
    check(linear(x, weight, norm=norm, gated=True, activation=activation), expected)


@pytest.mark.parametrize(
    ("num_rows", "config"),
    [
        (1, TileConfig(16, 256, 4)),
        (8, TileConfig(16, 64, 4)),
        (8, TileConfig(32, 128, 8)),
        (13, TileConfig(16, 64, 8)),
        *(
            (rows, TileConfig(16, 256, 4, 3, split, prefetch=2))
            for rows in (8, 40)
            for split in (1, 4)
        ),
    ],
)
def test_a_chain_in_a_graph_is_the_chain_by_steps(num_rows: int, config: TileConfig) -> None:
    """Every kernel may begin before the last is done, and must still see its result."""
    torch.manual_seed(0)
    width, layers = 1024, 12
    weights = [draw(width, width, size=width**-0.5) for _ in range(layers)]
    norm = Norm(draw(width), 1e-5)
    static = draw(num_rows, width)

    def chain(x: Tensor) -> list[Tensor]:
        steps = [x]
        for weight in weights:
            x = steps[-1]
            steps.append(run_kernel(config, Gemm(x, weight, norm=norm, residual=x)))
        return steps

    chain(static)  # compiles
    with GraphPool(CUDA, lazy_capture=True) as pool:
        captured = pool.capture(lambda: torch.stack(chain(static)))
        for _ in range(3):
            static.copy_(draw(num_rows, width))
            pool.replay(captured.tape)
            steps = captured.output.clone()
            assert torch.equal(steps, torch.stack(chain(static)))  # eager, to the bit
            for weight, (x, y) in zip(weights, pairwise(steps), strict=True):
                check(y, reference(x, weight, norm=norm, residual=x))


@pytest.mark.parametrize("shared", [False, True], ids=["a memset each", "one memset"])
def test_two_graphs_of_split_k_gemms_at_once(shared: bool) -> None:
    """Counters are each graph's own: replays on two streams do not disturb each other."""
    torch.manual_seed(0)
    weight, inputs = draw(2048, 2048, size=0.02), [draw(32, 2048) for _ in range(2)]
    config = TileConfig(64, 64, 4, 3, split_k=8)
    expected = [run_kernel(config, Gemm(x, weight)) for x in inputs]
    graphs, outputs, streams = [], [], [torch.cuda.Stream() for _ in range(2)]
    for x in inputs:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with shared_counters(CUDA) if shared else nullcontext(), torch.cuda.graph(graph):
            for _ in range(50):
                out = run_kernel(config, Gemm(x, weight))
        graphs.append(graph)
        outputs.append(out)
    for _ in range(5):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for out, wanted in zip(outputs, expected, strict=True):
            assert torch.equal(out, wanted)


def test_rows_of_a_wider_matrix_and_a_transposed_weight() -> None:
    torch.manual_seed(0)
    x = draw(5, 1100)[:, 76:]  # rows that begin at no round address
    weight = draw(512, 1024, size=1 / 32)
    check(linear(x, weight), reference(x, weight))
    transposed = weight.mT.contiguous().mT
    check(linear(x, transposed), reference(x, weight))
    apart = draw(5, 2048)[:, ::2]
    check(linear(apart, weight), reference(apart, weight))


def test_float32_and_many_rows_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "launch", None)
    x, weight = draw(4, 64, dtype=torch.float32), draw(32, 64, dtype=torch.float32)
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))
    x, weight = draw(65, 64), draw(32, 64)
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("num_rows", [1, 8])
def test_measuring_says_what_it_takes(num_rows: int) -> None:
    weights = [draw(512, 512, size=0.05) for _ in range(4)]
    shape = LinearShape(num_rows, 512, 512, torch.bfloat16, norm=True, residual=True)
    choices: list[GemmChoice] = ["torch", candidates(shape, gpu_of(CUDA))[0]]
    gemms = [StepGemm(shape, choice, weights) for choice in choices]
    assert len(list(compile_all(gemms))) == len(gemms)
    for gemm in gemms:
        assert 0.1 < measure_step([gemm]) < 10_000
    assert measure_step(gemms * 4) > measure_step(gemms)
