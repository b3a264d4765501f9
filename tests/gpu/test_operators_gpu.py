"""The small operators on a real GPU: real shapes, bfloat16, and chains of overlapping kernels.

Their results in general are tested in tests/ops, on CUDA as well.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato import GraphPool
from ostinato.ops.activation import Activation, activate, activate_and_mul, silu_and_mul
from ostinato.ops.decode_state import (
    DecodeInputs,
    DecodeState,
    load_decode_inputs,
    store_decode_outputs,
)
from ostinato.ops.gemm.split_k import num_parts, split_k_gemm
from ostinato.ops.layer_norm import add_layer_norm, layer_norm
from ostinato.ops.norm import Norm, add_output_norm, add_rms_norm, rms_norm
from ostinato.ops.rotate_heads import rotate_heads
from ostinato.ops.sampling.counter_random import spread_seed
from ostinato.ops.sampling.sampling import sample_rows
from ostinato.ops.sampling.sampling_reference import sample_reference
from ostinato.sampling.sampling_state import SamplingFeatures, SamplingState

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = torch.device("cuda", 0)
DTYPES = [torch.bfloat16, torch.float32]
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float32: 1e-5}


@pytest.fixture
def pool() -> Iterator[GraphPool]:
    torch.manual_seed(0)
    with GraphPool(CUDA, lazy_capture=True) as pool:
        yield pool


def close(got: Tensor, exact: Tensor) -> None:
    rtol = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), exact.double(), rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 576, 2048, 4096, 5120])
@pytest.mark.parametrize("num_tokens", [1, 33, 256])
def test_norm(num_tokens: int, dim: int, dtype: torch.dtype) -> None:
    fused = torch.randn(num_tokens, dim + 64, device=CUDA).to(dtype)
    x, residual = fused[:, 64:], torch.randn(num_tokens, dim, device=CUDA).to(dtype)
    weight = torch.randn(dim, device=CUDA).to(dtype)
    for case, got in (
        (x, rms_norm(x, weight, 1e-5)),
        (x + residual, add_rms_norm(x, residual, weight, 1e-5)[0]),
    ):
        exact = case.double()
        exact = exact * (exact.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        close(got, exact * weight.double())
    assert torch.equal(add_rms_norm(x, residual, weight, 1e-5)[1], x + residual)


@pytest.mark.parametrize("shape", [(256, 2048, 8192), (100, 4096, 4096), (65, 512, 2048)])
def test_split_k_and_the_norm_that_adds_the_parts(shape: tuple[int, int, int]) -> None:
    rows, outputs, inner = shape
    x = torch.randn(rows, inner, device=CUDA, dtype=torch.bfloat16)
    weight = torch.randn(outputs, inner, device=CUDA, dtype=torch.bfloat16) / inner**0.5
    residual = torch.randn(rows, outputs, device=CUDA, dtype=torch.bfloat16)
    scale = torch.randn(outputs, device=CUDA, dtype=torch.bfloat16)
    parts = split_k_gemm(x, weight)
    assert parts.shape[0] == num_parts(*shape) > 1
    exact = x.double() @ weight.double().T
    # As far off as the whole GEMM is, rounded once; a little more, since the sum of squares of
    # so many errors varies little.
    whole = (x @ weight.T).double() - exact
    assert (parts.double().sum(0) - exact).norm() < 1.5 * whole.norm()
    normed, total = add_rms_norm(parts, residual, scale, 1e-5)
    torch.testing.assert_close(
        total.double(), parts.double().sum(0) + residual.double(), rtol=2**-7, atol=1e-5
    )
    exact = total.double()
    close(normed, exact * (exact.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * scale.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1536, 8192, 14336, 1001])
@pytest.mark.parametrize("num_tokens", [1, 33, 256])
def test_silu_and_mul(num_tokens: int, width: int, dtype: torch.dtype) -> None:
    gate_up = torch.randn(num_tokens, 2 * width, device=CUDA).to(dtype) * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    close(silu_and_mul(gate_up), F.silu(gate) * up)


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu", "relu2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_activate_and_mul(activation: Activation, dtype: torch.dtype) -> None:
    gate_up = torch.randn(33, 2 * 6912, device=CUDA).to(dtype) * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    exact = activate(gate, activation) * up
    got = activate_and_mul(gate_up, activation).double()
    # Where 1 + erf or 1 + tanh cancels, only the absolute error is small.
    bound = TOLERANCE[dtype] * exact.abs() + 2e-6 * gate.abs() * up.abs() + 1e-5
    assert ((got - exact).abs() <= bound).all()


@pytest.mark.parametrize("dim", [1152, 3072, 5120])
@pytest.mark.parametrize("num_tokens", [1, 33, 256])
@pytest.mark.parametrize("parts", [0, 2])
@pytest.mark.parametrize("wide", [False, True])
def test_norm_of_an_output_then_of_the_sum(
    num_tokens: int, dim: int, parts: int, wide: bool
) -> None:
    """One kernel does what three do."""
    shape = (parts, num_tokens, dim) if parts else (num_tokens, dim)
    x = torch.randn(shape, device=CUDA, dtype=torch.bfloat16)
    residual = torch.randn(num_tokens, dim, device=CUDA, dtype=torch.bfloat16)
    dtype = torch.float32 if wide else torch.bfloat16
    output_norm, then = (Norm(torch.randn(dim, device=CUDA, dtype=dtype), 1e-6) for _ in range(2))
    normed, total = add_output_norm(x, residual, output_norm, then)
    exact = x.double().sum(0) if parts else x.double()
    exact = exact * (exact.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    exact_total = exact * output_norm.weight.double() + residual.double()
    torch.testing.assert_close(total.double(), exact_total, rtol=2**-6, atol=2**-5)
    close(normed, rms_norm(total, *then))
    for alone in add_output_norm(x, residual, output_norm, None):
        torch.testing.assert_close(alone.double(), exact_total, rtol=2**-6, atol=2**-5)


@pytest.mark.parametrize("dim", [3072, 6144])
@pytest.mark.parametrize("num_tokens", [1, 256])
def test_layer_norm(num_tokens: int, dim: int) -> None:
    x, residual = torch.randn(2, num_tokens, dim, device=CUDA, dtype=torch.bfloat16)
    weight, bias = torch.randn(2, dim, device=CUDA, dtype=torch.bfloat16)
    normed, total = add_layer_norm(x, residual, weight, bias, 1e-5)
    assert torch.equal(total, x + residual)
    exact = F.layer_norm(total.double(), (dim,), weight.double(), bias.double(), 1e-5)
    torch.testing.assert_close(normed.double(), exact, rtol=2**-7, atol=1e-5)
    close(layer_norm(total, weight, bias, 1e-5), normed)


@pytest.mark.parametrize("num_tokens", [1, 33])
@pytest.mark.parametrize("heads", [(32, 8, 128), (4, 1, 256), (71, 1, 64)])
def test_rotate_heads(num_tokens: int, heads: tuple[int, int, int]) -> None:
    num_heads, num_kv_heads, dim = heads
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, dim, device=CUDA).bfloat16()
    query, key, _ = (
        each.transpose(0, 1) for each in qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    )
    angles = torch.randn(num_tokens, dim // 2, device=CUDA).repeat(1, 2)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    for got, given in zip(rotate_heads(query, key, cos, sin), (query, key), strict=True):
        first, second = given.double().chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        exact = given.double() * cos.double() + turned * sin.double()
        torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-5)


def test_layers_in_a_graph_overlap_without_harm(pool: GraphPool) -> None:
    """Kernels that begin before the last is done, on memory that is used again and again."""
    num_rounds, num_tokens, dim = 20, 256, 1024
    weights = torch.randn(num_rounds, dim, device=CUDA, dtype=torch.bfloat16)
    start = torch.randn(num_tokens, dim, device=CUDA, dtype=torch.bfloat16)

    def run(add_norm, act) -> Tensor:  # type: ignore[no-untyped-def]
        results = []
        for weight in weights:
            x = residual = start
            while len(x) > 1:  # two rows become one, by nothing but our kernels
                x, residual = add_norm(x, residual, weight, 1e-5)
                x = act(x.view(-1, 2 * dim))
                residual = residual[: len(x)]
            results.append(x)
        return torch.cat(results)

    def plain_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, ...]:
        total = x + residual
        exact = total.float() * (total.float().square().mean(-1, keepdim=True) + eps).rsqrt()
        return exact.to(x.dtype) * weight, total

    def plain_act(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=1)
        return (F.silu(gate) * up).to(gate_up.dtype)

    run(add_rms_norm, silu_and_mul)
    captured = pool.capture(lambda: run(add_rms_norm, silu_and_mul))
    for _ in range(3):
        start.normal_()
        eager = run(add_rms_norm, silu_and_mul).clone()
        expected = run(plain_norm, plain_act)
        for _ in range(5):
            pool.replay(captured.tape)
            assert torch.equal(captured.output, eager)
        error = (eager.float() - expected.float()).norm() / expected.float().norm()
        assert error < 0.05


def sampling_state(num_rows: int) -> SamplingState:
    state = SamplingState(num_rows + 1, CUDA)
    temperature = torch.tensor([(i % 3) * 0.5 for i in range(num_rows + 1)], device=CUDA)
    keys = torch.tensor([spread_seed(i) for i in range(num_rows + 1)], device=CUDA)
    state.temperature.copy_(temperature)
    state.seed_key.copy_(keys)
    return state


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 128256), (33, 49152), (256, 128256)])
def test_sampling(pool: GraphPool, num_rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    state = sampling_state(num_rows)
    req_indices = torch.arange(num_rows, device=CUDA)
    lengths = torch.randint(1, 4000, (num_rows,), dtype=torch.int32, device=CUDA)
    logits = torch.empty(num_rows, vocab_size, device=CUDA, dtype=dtype)
    tokens = torch.full((num_rows,), -1, device=CUDA)

    def run() -> None:
        sample_rows(logits, req_indices, state.temperature, state.seed_key, lengths, tokens)

    logits.normal_()
    run()
    captured = pool.capture(run)
    for shift in range(3):
        logits.normal_(std=2.0)
        req_indices.copy_(req_indices.roll(shift))
        pool.replay(captured.tape)
        features = SamplingFeatures(any_random=True)
        expected = sample_reference(
            logits, req_indices, lengths, state.tables, req_indices, features.steps
        )
        is_greedy = state.temperature[req_indices] == 0
        assert torch.equal(tokens[is_greedy], logits[is_greedy].argmax(dim=1))
        # Two scores that float32 cannot tell apart are rare.
        assert (tokens != expected).sum() <= num_rows // 100
        together = tokens.clone()
        some = slice(num_rows // 2, num_rows // 2 + 1)
        arguments = (state.temperature, state.seed_key, lengths[some], tokens[some])
        sample_rows(logits[some], req_indices[some], *arguments)
        assert torch.equal(tokens, together)


@pytest.mark.parametrize(("num_real", "num_rows"), [(1, 1), (200, 256), (0, 4)])
def test_state_goes_round(pool: GraphPool, num_real: int, num_rows: int) -> None:
    """Load and store in one graph, many times over, against the same in Python."""
    max_len, block_size, num_steps = 700, 16, 40
    token_ids = torch.randint(1000, (num_rows + 1, max_len), dtype=torch.int32, device=CUDA)
    table = torch.randint(1, 999, (num_rows + 1, 44), dtype=torch.int32, device=CUDA)
    computed = torch.randint(0, 600, (num_rows + 1,), dtype=torch.int32, device=CUDA)
    req_indices = torch.full((num_rows,), num_rows, device=CUDA)
    req_indices[:num_real] = torch.randperm(num_rows, device=CUDA)[:num_real]
    ids, positions, mapping = torch.full((3, num_rows), 9999, device=CUDA).unbind()
    lens = torch.full((num_rows,), 9999, dtype=torch.int32, device=CUDA)
    starts = torch.full((num_rows + 1,), 9999, dtype=torch.int32, device=CUDA)
    blocks = torch.full((num_rows, 44), 9999, dtype=torch.int32, device=CUDA)
    tokens = torch.zeros(num_rows, dtype=torch.int64, device=CUDA)

    rows = DecodeState(req_indices, computed, token_ids, table, num_rows, block_size)
    inputs = DecodeInputs(ids, positions, lens, starts, blocks, mapping)

    def step() -> None:
        load_decode_inputs(rows, inputs)
        torch.add(ids, 1, out=tokens)
        store_decode_outputs(rows, tokens)

    state = (token_ids, table, computed)
    before = [each.clone() for each in state]
    step()
    for each, saved in zip(state, before, strict=True):
        each.copy_(saved)
    captured = pool.capture(step)  # takes effect once
    for _ in range(num_steps - 1):
        pool.replay(captured.tape)

    expected_ids, expected_computed = before[0].cpu(), before[2].cpu()
    for req_index in req_indices[:num_real].tolist():
        first = int(expected_computed[req_index])
        value = int(expected_ids[req_index, first])
        expected_ids[req_index, first : first + num_steps + 1] = torch.arange(
            value, value + num_steps + 1
        )
        expected_computed[req_index] += num_steps
    assert torch.equal(token_ids.cpu(), expected_ids)
    assert torch.equal(computed.cpu(), expected_computed)
    assert torch.equal(table, before[1])
    real, at = req_indices[:num_real], computed[req_indices[:num_real]].long() - 1
    assert torch.equal(positions[:num_real], at)
    assert torch.equal(ids[:num_real], token_ids[real, at].long())
    assert torch.equal(lens[:num_real].long(), at + 1)
    block = table[real, at // block_size].long()
    assert torch.equal(mapping[:num_real], block * block_size + at % block_size)
    assert starts.tolist() == [min(i, num_real) for i in range(num_rows + 1)]
    for padding, value in ((ids, 0), (positions, 0), (lens, 0), (mapping, -1)):
        assert (padding[num_real:] == value).all()
    in_use = torch.arange(44, device=CUDA) * block_size < lens.unsqueeze(1)
    assert torch.equal(blocks[:num_real][in_use[:num_real]], table[real][in_use[:num_real]])
    assert (blocks[~in_use] == 9999).all()
