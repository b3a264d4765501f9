"""The small operators of a decode step, and their kernels, against torch and transformers.

"public" is what the runtime calls; "kernel" is Triton, in its interpreter without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato import GraphPool
from ostinato.ops import activation, decode_state, layer_norm, norm
from ostinato.ops.decode_state import DecodeInputs, DecodeState
from ostinato.ops.gemm.split_k import in_parts, num_parts
from ostinato.ops.sampling import sampling
from ostinato.ops.sampling.counter_random import exponential_log, spread_seed
from ostinato.ops.sampling.sampling_reference import sample_reference
from ostinato.runner.input_buffers import InputBuffers
from ostinato.runner.kv_cache import CacheSize
from ostinato.runner.request_state import RequestState
from ostinato.sampling.sampling_state import SamplingFeatures, SamplingState

pytest.importorskip("triton")

# Relative effect of one rounding; float32 results also contain sums and exponentials.
ROUNDING = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}
POISON = 2**30
few = settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
dtypes = st.sampled_from([*ROUNDING])


@pytest.fixture(params=["public", "kernel"])
def find(request: pytest.FixtureRequest, device: torch.device) -> Callable[[Any, str], Any]:
    """An operator by its module and name, as the runtime calls it or as the kernel's launch."""
    if request.param == "public":
        return getattr
    if device.type == "cpu" and torch.cuda.is_available():
        pytest.skip("where there is a GPU, the kernels are not interpreted")
    return lambda module, name: getattr(module, f"triton_{name}")


def known(dtype: torch.dtype, find: Any, device: torch.device) -> torch.dtype:
    """The interpreter truncates to bfloat16 instead of rounding."""
    interpreted = find is not getattr and device.type == "cpu"
    return torch.float16 if interpreted and dtype is torch.bfloat16 else dtype


def assert_rounded(got: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Equal up to the last bit or two."""
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), exact.double(), rtol=4 * ROUNDING[dtype], atol=1e-6)


# --- norm -----------------------------------------------------------------------------------------


def strided(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random rows with NaN between them."""
    wide = torch.full((*shape[:-1], shape[-1] + 5), torch.nan, dtype=dtype, device=device)
    rows = wide[..., 2 : shape[-1] + 2]
    return rows.copy_(torch.randn(shape).to(device))


def llama_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm  # imports Triton

    module = LlamaRMSNorm(x.shape[-1], eps).to(x.device)
    module.weight.data = weight
    return module(x).detach()


@few
@given(rows=st.integers(1, 5), dim=st.integers(1, 700), dtype=dtypes, dense=st.booleans())
def test_norm_is_transformers_norm(
    find: Any, device: torch.device, rows: int, dim: int, dtype: torch.dtype, dense: bool
) -> None:
    dtype = known(dtype, find, device)
    x = strided(rows, dim, dtype=dtype, device=device)
    x = x.contiguous() if dense else x
    weight = torch.randn(dim).to(device, dtype)
    got = find(norm, "rms_norm")(x, weight, 1e-5)
    assert_rounded(got, llama_norm(x, weight, 1e-5), dtype)
    assert got.is_contiguous()


@few
@given(
    rows=st.integers(1, 5),
    dim=st.integers(1, 700),
    dtype=dtypes,
    dense=st.sampled_from(["none", "residual", "all"]),
)
def test_norm_of_a_sum(
    find: Any, device: torch.device, rows: int, dim: int, dtype: torch.dtype, dense: str
) -> None:
    dtype = known(dtype, find, device)
    x, residual = (strided(rows, dim, dtype=dtype, device=device) for _ in range(2))
    x = x.contiguous() if dense == "all" else x
    residual = residual if dense == "none" else residual.contiguous()
    weight = torch.randn(dim).to(device, dtype)
    before = x.clone(), residual.clone()
    got, total = find(norm, "add_rms_norm")(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert_rounded(got, llama_norm(x + residual, weight, 1e-6), dtype)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@few
@given(rows=st.integers(1, 5), dim=st.integers(1, 300), dtype=dtypes)
def test_norm_with_a_weight_in_float32(
    find: Any, device: torch.device, rows: int, dim: int, dtype: torch.dtype
) -> None:
    """As Gemma has it: 1 + w would be rounded otherwise."""
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

    dtype = known(dtype, find, device)
    x, residual = (torch.randn(rows, dim).to(device, dtype) for _ in range(2))
    weight = torch.randn(dim, device=device).to(dtype).float()
    module = Gemma2RMSNorm(dim, 1e-6).to(device)
    module.weight.data = weight
    got = find(norm, "rms_norm")(x, 1 + weight, 1e-6)
    assert_rounded(got, module(x).detach(), dtype)
    got, total = find(norm, "add_rms_norm")(x, residual, 1 + weight, 1e-6)
    assert_rounded(got, module(total).detach(), dtype)


@few
@given(parts=st.integers(1, 5), rows=st.integers(1, 5), dim=st.integers(1, 300), dtype=dtypes)
def test_norm_of_a_sum_that_comes_in_parts(
    find: Any, device: torch.device, parts: int, rows: int, dim: int, dtype: torch.dtype
) -> None:
    dtype = known(dtype, find, device)
    x = strided(parts, rows, dim, dtype=dtype, device=device)
    residual = strided(rows, dim, dtype=dtype, device=device)
    weight = torch.randn(dim).to(device, dtype)
    got, total = find(norm, "add_rms_norm")(x, residual, weight, 1e-6)
    assert_rounded(total, x.double().sum(0) + residual.double(), dtype)
    assert_rounded(got, llama_norm(total, weight, 1e-6), dtype)
    assert got.shape == total.shape == residual.shape


@few
@given(
    parts=st.integers(0, 3),
    rows=st.integers(1, 4),
    dim=st.integers(1, 300),
    dtype=dtypes,
    wide=st.booleans(),
    then=st.booleans(),
)
def test_norm_of_an_output_then_of_the_sum(
    find: Any,
    device: torch.device,
    parts: int,
    rows: int,
    dim: int,
    dtype: torch.dtype,
    wide: bool,
    then: bool,
) -> None:
    """Gemma's two norms between sublayers; without the second, OLMo 2's one."""
    dtype = known(dtype, find, device)
    shape = (parts, rows, dim) if parts else (rows, dim)
    x = strided(*shape, dtype=dtype, device=device)
    residual = strided(rows, dim, dtype=dtype, device=device)
    weights = [torch.randn(dim).to(device, torch.float32 if wide else dtype) for _ in range(2)]
    output_norm, after = (norm.Norm(weight, 1e-5) for weight in weights)
    before = x.clone(), residual.clone()
    add_output_norm = find(norm, "add_output_norm")
    got, total = add_output_norm(x, residual, output_norm, after if then else None)
    summed = x.double().sum(0) if parts else x
    exact = llama_norm(summed.to(dtype), weights[0], 1e-5).to(dtype).double() + residual.double()
    # The norm is rounded before it is added, and a part of a sum may be larger than the sum.
    size = (x.double().abs().sum(0) if parts else x.double().abs()) / summed.double().square().mean(
        -1, keepdim=True
    ).add(1e-5).sqrt() * weights[0].double().abs() + exact.abs()
    assert ((total.double() - exact).abs() <= 8 * ROUNDING[dtype] * size + 1e-6).all()
    assert_rounded(got, llama_norm(total, weights[1], 1e-5) if then else total, dtype)
    assert got.shape == total.shape == residual.shape
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@few
@given(
    parts=st.integers(0, 3),
    rows=st.integers(1, 4),
    dim=st.integers(2, 300),
    dtype=dtypes,
    biased=st.booleans(),
)
def test_layer_norm_is_torchs(
    find: Any,
    device: torch.device,
    parts: int,
    rows: int,
    dim: int,
    dtype: torch.dtype,
    biased: bool,
) -> None:
    dtype = known(dtype, find, device)
    x = strided(rows, dim, dtype=dtype, device=device) + 3
    weight = torch.randn(dim).to(device, dtype)
    bias = torch.randn(dim).to(device, dtype) if biased else None

    def expected(x: Tensor) -> Tensor:
        wide = None if bias is None else bias.double()
        return F.layer_norm(x.double(), (dim,), weight.double(), wide, 1e-5)

    def check(got: Tensor, exact: Tensor) -> None:
        assert got.dtype is dtype
        rtol = 4 * ROUNDING[dtype]
        torch.testing.assert_close(got.double(), exact, rtol=rtol, atol=2e-5)

    check(find(layer_norm, "layer_norm")(x, weight, bias, 1e-5), expected(x))
    shape = (parts, rows, dim) if parts else (rows, dim)
    terms = strided(*shape, dtype=dtype, device=device)
    got, total = find(layer_norm, "add_layer_norm")(terms, x, weight, bias, 1e-5)
    assert_rounded(total, (terms.double().sum(0) if parts else terms.double()) + x.double(), dtype)
    check(got, expected(total))


@given(
    parts=st.sampled_from([1, 2, 3, 4]),
    rows=st.integers(1, 6),
    outputs=st.integers(1, 6),
    inner=st.integers(1, 8),
)
def test_parts_of_a_gemm_add_up_to_it(parts: int, rows: int, outputs: int, inner: int) -> None:
    x = torch.randn(rows, parts * inner, dtype=torch.float64)
    weight = torch.randn(outputs, parts * inner, dtype=torch.float64)
    got = in_parts(x, weight, parts)
    assert got.shape == (parts, rows, outputs)
    torch.testing.assert_close(got.sum(0), x @ weight.T)


@given(rows=st.integers(1, 600), outputs=st.integers(1, 20000), inner=st.integers(1, 30000))
def test_parts_are_even_and_never_more_than_fill_a_gpu(rows: int, outputs: int, inner: int) -> None:
    parts = num_parts(rows, outputs, inner)
    assert inner % parts == 0
    if parts > 1:
        assert 64 < rows <= 256
        assert inner // parts >= 1024
        assert parts * -(-rows // 128) * -(-outputs // 128) <= 128


def test_parts_as_they_were_measured() -> None:
    narrow, wide = (2048, 8192), (4096, 14336)  # the last GEMMs of Llama-3.2-1B and 3.1-8B
    assert [num_parts(rows, *narrow) for rows in (64, 65, 128, 256, 257)] == [1, 4, 4, 4, 1]
    assert [num_parts(rows, *wide) for rows in (64, 128, 256, 257)] == [1, 4, 2, 1]
    assert num_parts(256, 28672, 4096) == 1


@pytest.mark.parametrize("shape", [(24,), (3, 2, 24), (2, 3, 2, 24)])
def test_norm_of_rows_in_any_arrangement(
    find: Any, device: torch.device, shape: tuple[int, ...]
) -> None:
    weight = torch.randn(24, device=device)
    x, residual = (strided(*shape, dtype=torch.float32, device=device) for _ in range(2))
    shuffled = torch.randn(*shape[:-1], 48, device=device)[..., ::2]
    for case in (x, x.contiguous(), shuffled):
        expected = llama_norm(case, weight, 1e-5)
        assert_rounded(find(norm, "rms_norm")(case, weight, 1e-5), expected, torch.float32)
        got, total = find(norm, "add_rms_norm")(case, residual, weight, 1e-5)
        assert torch.equal(total, case + residual)
        assert_rounded(got, llama_norm(total, weight, 1e-5), torch.float32)
        assert got.shape == total.shape == shape


def test_norm_of_one_row_is_its_own(find: Any, device: torch.device) -> None:
    x, weight = torch.randn(3, 40, device=device), torch.randn(40, device=device)
    alone = find(norm, "rms_norm")(x[1:2], weight, 1e-5)
    x[0], x[2] = torch.nan, torch.inf
    assert torch.equal(find(norm, "rms_norm")(x, weight, 1e-5)[1:2], alone)
    assert torch.equal(find(norm, "rms_norm")(x[:0], weight, 1e-5), x[:0])


# --- activation -----------------------------------------------------------------------------------


@few
@given(
    rows=st.integers(1, 5),
    width=st.integers(1, 1500),
    dtype=dtypes,
    size=st.floats(0.1, 200),
    dense=st.booleans(),
)
def test_silu_and_mul_is_rounded_once(
    find: Any,
    device: torch.device,
    rows: int,
    width: int,
    dtype: torch.dtype,
    size: float,
    dense: bool,
) -> None:
    dtype = known(dtype, find, device)
    gate_up = strided(rows, 2 * width, dtype=dtype, device=device)
    gate_up[:, :width] *= size
    gate_up = gate_up.contiguous() if dense else gate_up
    got = find(activation, "silu_and_mul")(gate_up)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert got.dtype is dtype
    assert got.is_contiguous()
    exact = F.silu(gate) * up
    assert ((got.double() - exact).abs() <= exact.abs() * ROUNDING[dtype] * 1.001 + 1e-7).all()


@few
@given(
    name=st.sampled_from(["silu", "gelu_tanh", "gelu", "relu2"]),
    rows=st.integers(1, 5),
    width=st.integers(1, 1500),
    dtype=dtypes,
    size=st.floats(0.1, 20),
)
def test_every_activation_is_rounded_once(
    find: Any,
    device: torch.device,
    name: Any,
    rows: int,
    width: int,
    dtype: torch.dtype,
    size: float,
) -> None:
    from transformers.activations import ACT2FN

    dtype = known(dtype, find, device)
    gate_up = strided(rows, 2 * width, dtype=dtype, device=device)
    gate_up[:, :width] *= size
    got = find(activation, "activate_and_mul")(gate_up, name)
    gate, up = gate_up.double().chunk(2, dim=-1)
    exact = ACT2FN["gelu_pytorch_tanh" if name == "gelu_tanh" else name](gate) * up
    assert got.dtype is dtype
    # Where 1 + erf or 1 + tanh cancels, only the absolute error is small.
    least = 1e-6 * gate.abs() * up.abs()
    bound = exact.abs() * ROUNDING[dtype] * 1.001 + least + 1e-7
    assert ((got.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("name", ["gelu_tanh", "gelu", "relu2"])
def test_extreme_gates(find: Any, device: torch.device, name: Any) -> None:
    gate = torch.tensor([[-3e38, -1e15, -100.0, -10.0, 0.0, 10.0, 1e15, torch.nan]])
    up = torch.full_like(gate, 0.5)
    got = find(activation, "activate_and_mul")(torch.cat((gate, up), dim=1).to(device), name).cpu()
    expected = activation.activate(gate, name) * up
    torch.testing.assert_close(got, expected, equal_nan=True, rtol=1e-5, atol=1e-20)


@pytest.mark.parametrize("shape", [(10,), (2, 3, 10), (0, 10)])
def test_silu_and_mul_of_rows_in_any_arrangement(
    find: Any, device: torch.device, shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape, device=device)
    spread = torch.randn(*shape[:-1], 20, device=device)[..., ::2]
    for case in (x, spread):
        gate, up = case.chunk(2, dim=-1)
        got = find(activation, "silu_and_mul")(case)
        torch.testing.assert_close(got, F.silu(gate) * up)


def test_silu_and_mul_of_extreme_gates(device: torch.device) -> None:
    gate = torch.tensor([[-3e38, -1e30, -100.0, -88.5, -87.0, 88.0, 3e38, torch.inf, torch.nan]])
    up = torch.full_like(gate, 0.5)
    got = activation.silu_and_mul(torch.cat((gate, up), dim=1).to(device)).cpu()
    torch.testing.assert_close(got, F.silu(gate) * up, equal_nan=True, rtol=1e-5, atol=1e-36)


@pytest.mark.parametrize("rows", [64, 65, 200])
def test_as_many_rows_as_one_likes(rows: int) -> None:
    """On the CPU small batches run compiled kernels, larger ones torch's operators."""
    x, residual, weight = torch.randn(rows, 48), torch.randn(rows, 48), torch.randn(48)
    got, total = norm.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert_rounded(got, llama_norm(x + residual, weight, 1e-5), torch.float32)
    assert_rounded(norm.rms_norm(x, weight, 1e-5), llama_norm(x, weight, 1e-5), torch.float32)
    gate, up = x.chunk(2, dim=1)
    torch.testing.assert_close(activation.silu_and_mul(x), F.silu(gate) * up)


def test_shapes_that_do_not_fit_are_torchs_to_refuse() -> None:
    x = torch.randn(3, 8)
    with pytest.raises(RuntimeError, match="must match"):
        norm.rms_norm(x, torch.randn(4), 1e-5)
    _, total = norm.add_rms_norm(x, torch.ones(1, 8), torch.randn(8), 1e-5)
    assert torch.equal(total, x + 1)
    with pytest.raises(RuntimeError, match="must match"):
        activation.silu_and_mul(torch.randn(3, 5))


def test_parameters_in_grad_mode_go_through_torch() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    plain = x.detach()
    torch.testing.assert_close(
        norm.rms_norm(x, torch.ones(8), 1e-5).detach(), norm.rms_norm(plain, torch.ones(8), 1e-5)
    )
    torch.testing.assert_close(activation.silu_and_mul(x).detach(), activation.silu_and_mul(plain))


# --- sampling -------------------------------------------------------------------------------------


@pytest.fixture(params=[1, 16], ids=["whole", "chunks"])
def programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_PROGRAMS_PER_SM", request.param)


class Rows:
    """What ``sample_rows`` takes, with poison in the request rows that no index names."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        num_state_rows = num_rows + 3
        self.state = SamplingState(num_state_rows, device)  # columns of tables: not dense
        self.state.temperature.fill_(torch.nan)
        self.state.seed_key.fill_(POISON)
        self.req_indices = (torch.randperm(num_state_rows)[:num_rows]).to(device)
        self.lengths = torch.randint(1, 5000, (num_rows,), dtype=torch.int32).to(device)
        self.logits = torch.randn(num_rows, vocab_size).to(device) * 2
        self.tokens = torch.full((num_rows,), -1, device=device)

    def set(self, temperature: list[float], seeds: list[int]) -> Rows:
        device = self.req_indices.device
        keys = [spread_seed(seed) for seed in seeds]
        self.state.temperature[self.req_indices] = torch.tensor(temperature, device=device)
        self.state.seed_key[self.req_indices] = torch.tensor(keys, device=device)
        return self

    def arguments(self) -> tuple[Tensor, ...]:
        state = self.state
        settings = (state.temperature, state.seed_key)
        return self.logits, self.req_indices, *settings, self.lengths, self.tokens

    def check(self) -> None:
        """Against the sampler; another token may win only if float32 cannot distinguish them."""
        logits = self.logits.float()
        steps = SamplingFeatures(any_random=True).steps
        history = torch.zeros(0, device=logits.device)
        expected = sample_reference(
            logits, self.req_indices, self.lengths, self.state.tables, history, steps
        )
        noise = exponential_log(
            self.state.seed_key[self.req_indices], self.lengths, logits.shape[1]
        )
        scores = logits - noise * self.state.temperature[self.req_indices].unsqueeze(1)
        best, chosen = (scores.gather(1, each.unsqueeze(1)) for each in (expected, self.tokens))
        torch.testing.assert_close(chosen, best, rtol=1e-6, atol=0)
        is_greedy = self.state.temperature[self.req_indices] == 0
        assert torch.equal(self.tokens[is_greedy], logits[is_greedy].argmax(dim=1))


@pytest.mark.slow
@few
@given(
    rows=st.lists(
        st.tuples(st.sampled_from([0.0, 0.0, 0.3, 1.0, 30.0]), st.integers(0, 2**64 - 1)),
        min_size=1,
        max_size=5,
    ),
    vocab_size=st.integers(1, 3000),
    dtype=dtypes,
)
def test_tokens_are_the_samplers(
    find: Any,
    device: torch.device,
    programs: None,
    rows: list[tuple[float, int]],
    vocab_size: int,
    dtype: torch.dtype,
) -> None:
    batch = Rows(len(rows), vocab_size, device).set(*map(list, zip(*rows, strict=True)))
    batch.logits = batch.logits.to(dtype)
    find(sampling, "sample_rows")(*batch.arguments())
    batch.check()


def test_req_indices_and_lengths_may_be_columns(find: Any, device: torch.device) -> None:
    """The gaps between them would be rows and positions that do not exist."""
    batch = Rows(3, 700, device).set([0.7, 0.0, 1.3], [5, 6, 7])
    req_indices, lengths = (
        torch.stack((tensor, torch.full_like(tensor, 2**30)), dim=1)[:, 0]
        for tensor in (batch.req_indices, batch.lengths)
    )
    logits, _, temperature, seed_key, _, tokens = batch.arguments()
    find(sampling, "sample_rows")(logits, req_indices, temperature, seed_key, lengths, tokens)
    batch.check()


@pytest.mark.slow
def test_the_noise_is_the_samplers_to_the_last_draw(find: Any, device: torch.device) -> None:
    """With many equally likely rows, one wrong bit of the hash makes other tokens win."""
    num_rows = 24
    batch = Rows(num_rows, 2100, device).set([1.0] * num_rows, [3**i for i in range(num_rows)])
    batch.logits.zero_()
    batch.lengths[:3] = torch.tensor([1, 2**31 - 1, 2**20])
    find(sampling, "sample_rows")(*batch.arguments())
    batch.check()
    assert batch.tokens.unique().numel() > num_rows - 4


@pytest.mark.sweep
def test_equal_and_odd_logits_are_decided_as_argmax_does(
    find: Any, device: torch.device, programs: None
) -> None:
    size, inf, nan = 2500, torch.inf, torch.nan
    batch = Rows(8, size, device).set([0.0] * 8, [0] * 8)
    logits = batch.logits.clamp_(-5, 5)
    logits[0, [77, 1024, 2400]] = 9.0
    logits[1] = -inf
    logits[2] = -inf
    logits[2, 2499] = -1e30
    logits[3, [5, 2000]] = torch.tensor([inf, nan]).to(device)
    logits[4] = -7.0
    logits[4, [3, 1500]] = torch.tensor([-0.0, 0.0]).to(device)
    logits[5, [2, 1030]] = nan
    logits[5] = -logits[5]  # of either sign
    logits[6] = 0.0
    logits[7, 1111:] = 6.0
    find(sampling, "sample_rows")(*batch.arguments())
    assert batch.tokens.tolist() == [77, 0, 2499, 2000, 3, 2, 0, 1111]
    assert torch.equal(batch.tokens, logits.argmax(dim=1))
    batch.set([1.0] * 8, [0] * 8)  # noise is finite: it changes none of these
    find(sampling, "sample_rows")(*batch.arguments())
    assert batch.tokens[[1, 2, 3, 5]].tolist() == [0, 2499, 2000, 2]


def test_a_row_depends_on_itself_alone(find: Any, device: torch.device, programs: None) -> None:
    batch = Rows(4, 1500, device).set([0.0, 1.0, 0.0, 0.7], [1, 2, 3, 4])
    run = find(sampling, "sample_rows")
    run(*batch.arguments())
    together = batch.tokens.clone()
    logits, req_indices, temperature, seed_key, lengths, tokens = batch.arguments()
    for row in range(4):
        one = slice(row, row + 1)
        run(logits[one], req_indices[one], temperature, seed_key, lengths[one], tokens[one])
    assert torch.equal(batch.tokens, together)
    logits[1:3] = torch.nan
    run(*batch.arguments())
    assert torch.equal(batch.tokens[[0, 3]], together[[0, 3]])
    run(logits[:0], req_indices[:0], temperature, seed_key, lengths[:0], tokens[:0])


def test_logits_need_not_be_dense(find: Any, device: torch.device) -> None:
    batch = Rows(3, 50, device).set([0.0, 1.0, 0.5], [1, 2, 3])
    batch.logits = batch.logits[:, :33]
    find(sampling, "sample_rows")(*batch.arguments())
    batch.check()
    batch.logits = torch.randn(33, 3, device=device).T
    find(sampling, "sample_rows")(*batch.arguments())
    batch.check()


@given(st.integers(1, 600), st.integers(1, 300_000), st.integers(1, 200))
def test_chunks_cover_the_vocabulary(num_rows: int, vocab_size: int, num_sms: int) -> None:
    per_chunk, num_chunks = sampling.chunks(num_rows, vocab_size, num_sms)
    assert 1 <= num_chunks <= sampling.MAX_CHUNKS
    columns = per_chunk * sampling._BLOCK
    assert (num_chunks - 1) * columns < vocab_size <= num_chunks * columns


def test_one_row_fills_a_gpu() -> None:
    assert sampling.chunks(1, 128256, 132) == (1, 126)
    assert sampling.chunks(256, 128256, 132)[1] <= 16


# --- the state of a decode step -------------------------------------------------------------------

MAX_NUM_SEQS = 6
CACHE = CacheSize(num_blocks=50, block_size=4, max_model_len=30)


class Decode:
    """A request state and the buffers of a step, poisoned wherever nothing may be read or written.

    ``computed`` maps the request rows that run to how many tokens they have computed.
    """

    def __init__(
        self, computed: dict[int, int], padded: int, device: torch.device, cache: CacheSize = CACHE
    ) -> None:
        num_seqs = max(MAX_NUM_SEQS, padded)
        self.cache, self.padded, self.count = cache, padded, len(computed)
        self.state = RequestState(max_num_seqs=num_seqs, cache=cache, device=device)
        for tensor in (self.state.token_ids, self.state.block_table, self.state.num_computed):
            tensor.fill_(POISON)
        self.buffers = self.new_buffers()
        self.write(computed)

    def new_buffers(self) -> InputBuffers:
        num_seqs, device = self.state.padding_req_index, self.state.device
        buffers = InputBuffers(
            max_num_seqs=num_seqs, max_num_tokens=num_seqs + 2, cache=self.cache, device=device
        )
        for tensor in (buffers.req_indices, *self.written(buffers)):
            tensor.fill_(POISON)
        return buffers

    def write(self, computed: dict[int, int]) -> None:
        state, size = self.state, self.cache.block_size
        for req_index, count in computed.items():
            tokens = torch.randint(1000, (count + 1,), dtype=torch.int32)
            state.token_ids[req_index, : count + 1] = tokens.to(state.device)
            blocks = torch.randperm(self.cache.num_blocks, dtype=torch.int32)[: count // size + 1]
            state.block_table[req_index, : len(blocks)] = blocks.to(state.device)
            state.num_computed[req_index] = count
        req_indices = [*computed, *[state.padding_req_index] * (self.padded - len(computed))]
        self.buffers.req_indices[: self.padded] = torch.tensor(req_indices).to(state.device)
        self.count = len(computed)

    @staticmethod
    def written(buffers: InputBuffers) -> tuple[Tensor, ...]:
        tokens = buffers.tokens
        return (
            buffers.input_ids,
            tokens.positions,
            tokens.seq_lens,
            tokens.query_start_loc,
            tokens.block_tables[0],
            tokens.slot_mappings[0],
        )

    def rows(self) -> DecodeState:
        state = self.state
        return DecodeState(
            self.buffers.req_indices[: self.padded],
            state.num_computed,
            state.token_ids,
            state.block_table,
            state.padding_req_index,
            self.cache.block_size,
        )

    def inputs(self) -> DecodeInputs:
        rows, starts = self.padded, self.buffers.tokens.query_start_loc
        tensors = self.written(self.buffers)
        return DecodeInputs(
            *(each[: rows + 1] if each is starts else each[:rows] for each in tensors)
        )

    def check_loaded(self) -> None:
        """Against ``InputBuffers.fill``; then the contents of padding and unowned memory."""
        oracle, state = self.new_buffers(), self.state
        req_indices = self.buffers.req_indices[: self.count].tolist()
        garbage = state.num_computed[-1].clone()
        state.num_computed[-1] = oracle.tokens.query_start_loc[0] = 0  # which it relies on
        oracle.fill(
            state, req_indices, [1] * self.count, num_reqs=self.padded, num_tokens=self.padded
        )
        state.num_computed[-1] = garbage
        table, expected_table = (each.tokens.block_tables[0] for each in (self.buffers, oracle))
        used = -(-oracle.tokens.seq_lens.long() // self.cache.block_size)
        used[self.padded :] = 0
        in_use = torch.arange(table.shape[1], device=table.device) < used.unsqueeze(1)
        expected_table.masked_fill_(~in_use, POISON)
        padding = slice(self.count, self.padded)
        oracle.input_ids[padding] = 0
        oracle.tokens.positions[padding] = 0
        for got, expected in zip(self.written(self.buffers), self.written(oracle), strict=True):
            assert got.tolist() == expected.tolist()


@st.composite
def decodes(draw: st.DrawFn) -> tuple[dict[int, int], int]:
    req_indices = draw(st.lists(st.integers(0, MAX_NUM_SEQS - 1), max_size=5, unique=True))
    computed = {
        req_index: draw(st.integers(0, CACHE.max_model_len - 1)) for req_index in req_indices
    }
    return computed, draw(st.integers(max(1, len(req_indices)), MAX_NUM_SEQS))


@few
@given(batch=decodes())
def test_decode_inputs_are_those_of_any_batch(
    find: Any, device: torch.device, batch: tuple[dict[int, int], int]
) -> None:
    decode = Decode(*batch, device)
    state = decode.state
    before = [each.clone() for each in (state.token_ids, state.num_computed, state.block_table)]
    find(decode_state, "load_decode_inputs")(decode.rows(), decode.inputs())
    decode.check_loaded()
    after = (state.token_ids, state.num_computed, state.block_table)
    assert all(map(torch.equal, before, after))


@few
@given(batch=decodes())
def test_decode_outputs_go_to_the_rows_that_ran(
    find: Any, device: torch.device, batch: tuple[dict[int, int], int]
) -> None:
    decode, (computed, padded) = Decode(*batch, device), batch
    state, count = decode.state, len(computed)
    tokens = torch.randint(1000, (padded,)).to(device)
    expected = Decode({}, padded, device).state
    for name in ("token_ids", "num_computed", "block_table"):
        getattr(expected, name).copy_(getattr(state, name))
    req_indices = torch.tensor([*computed], dtype=torch.int64, device=device)
    expected.advance(req_indices, torch.ones(count, dtype=torch.int32, device=device))
    expected.append(req_indices, expected.num_computed[req_indices], tokens[:count])
    find(decode_state, "store_decode_outputs")(decode.rows(), tokens)
    for name in ("token_ids", "num_computed", "block_table"):
        assert torch.equal(getattr(state, name), getattr(expected, name))


@pytest.mark.slow
def test_long_tables_and_large_batches(find: Any, device: torch.device) -> None:
    """More blocks, and more rows, than a program handles at a time."""
    cache = CacheSize(num_blocks=700, block_size=2, max_model_len=1200)
    decode = Decode({4: 1199, 2: 511, 9: 512, 0: 3}, 13, device, cache)
    find(decode_state, "load_decode_inputs")(decode.rows(), decode.inputs())
    decode.check_loaded()
    count, padded = (2, 260) if device.type == "cpu" else (257, 600)
    decode = Decode({req_index: req_index % 29 for req_index in range(count)}, padded, device)
    find(decode_state, "load_decode_inputs")(decode.rows(), decode.inputs())
    decode.check_loaded()
    tokens = torch.arange(padded, device=device)
    find(decode_state, "store_decode_outputs")(decode.rows(), tokens)
    rows = range(count)
    assert [int(decode.state.token_ids[i, i % 29 + 1]) for i in rows] == [*rows]
    assert decode.state.num_computed.tolist()[count:] == [POISON] * (padded + 1 - count)


# --- inside a graph, and to torch -----------------------------------------------------------------


def test_a_whole_step_replays_with_new_contents(device: torch.device, pool: GraphPool) -> None:
    """Captured on padding alone; replayed for batches that start, continue, and change features.

    The logits are computed from what was loaded, so that omissions show.
    """
    decode, eager = (Decode({}, 4, device) for _ in range(2))
    table = torch.randn(1000, 64, device=device)
    tokens = torch.zeros(4, dtype=torch.int64, device=device)

    def step(which: Decode) -> None:
        decode_state.load_decode_inputs(which.rows(), which.inputs())
        buffers, sampler = which.buffers, which.state.sampling
        x = table[buffers.input_ids[:4]] + buffers.tokens.positions[:4, None]
        logits = activation.silu_and_mul(norm.rms_norm(x, table[0], 1e-5)) @ table[:, :32].T
        sampling.sample_rows(
            logits,
            buffers.req_indices[:4],
            sampler.temperature,
            sampler.seed_key,
            buffers.tokens.seq_lens[:4],
            tokens,
        )
        decode_state.store_decode_outputs(which.rows(), tokens)

    step(decode)  # the first call compiles and loads kernels
    captured = pool.capture(lambda: step(decode))
    seen = set()
    for computed in ({3: 5, 1: 0}, {1: 7, 3: 2, 0: 8, 5: 20}, {2: 9}):
        for which in (decode, eager):
            torch.manual_seed(len(computed))
            which.write(computed)
            which.state.sampling.temperature.copy_(torch.rand(7).round() * 3)
            which.state.sampling.seed_key.copy_(torch.randint(1 << 60, (7,)))
        for _ in range(3):  # each step reads what the previous one stored
            pool.replay(captured.tape)
            got = tokens[: len(computed)].tolist()
            step(eager)
            assert tokens[: len(computed)].tolist() == got
            assert torch.equal(decode.state.token_ids, eager.state.token_ids)
            assert torch.equal(decode.state.num_computed, eager.state.num_computed)
            seen.update(got)
    assert len(seen) > 5


def test_operators_say_what_they_write(device: torch.device) -> None:
    """Schemas and fakes, as graphs and torch.compile rely on them."""
    decode = Decode({3: 5, 1: 0}, 3, device)
    rows = Rows(3, 40, device).set([0.0, 1.0, 1.0], [1, 2, 3])
    operators = torch.ops.ostinato
    cases: list[tuple[Any, tuple[Any, ...]]] = [
        (operators.sample_rows, rows.arguments()),
        (operators.load_decode_inputs, (*decode.rows(), *decode.inputs())),
        (operators.store_decode_outputs, (rows.tokens, *decode.rows())),
    ]
    for operator, arguments in cases:
        torch.library.opcheck(
            operator.default, arguments, test_utils=["test_schema", "test_faketensor"]
        )
