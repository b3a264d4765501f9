"""What a graph replays: every kind of operator, bit for bit what eager gives on the same data.

Each case is captured on static inputs, given new data, replayed, and compared with the same
function run eagerly on a copy of the inputs. Outputs are compared, and so are the inputs, since a
function may write into them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato import GraphPool

NUM_REPLAYS = 3

Make = Callable[[torch.device], Tensor]


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Make:
    return lambda device: torch.randn(shape, device=device).to(dtype)


def ints(*shape: int, below: int = 4, dtype: torch.dtype = torch.int64) -> Make:
    return lambda device: torch.randint(below, shape, device=device).to(dtype)


def bools(*shape: int) -> Make:
    return lambda device: torch.rand(shape, device=device) < 0.5


def channels_last(*shape: int) -> Make:
    return lambda device: torch.randn(shape, device=device).to(memory_format=torch.channels_last)


def refill(tensor: Tensor) -> None:
    """New data in place. Integers are shuffled, so that indices stay in range."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.copy_(torch.randn_like(tensor))
    else:
        shuffled = torch.randperm(tensor.numel(), device=tensor.device)
        tensor.copy_(tensor.flatten()[shuffled].view(tensor.shape))


def assert_same(actual: Any, expected: Any) -> None:
    """Equal bits, shapes, types and strides, in every tensor of a nested value."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True, check_stride=True)


@torch.no_grad()
def check_replays(pool: GraphPool, function: Callable[..., Any], *inputs: Tensor) -> None:
    """The capture and every replay do what eager does, to the outputs and to the inputs."""
    function(*(tensor.clone() for tensor in inputs))  # CUDA libraries need a first call
    for _ in range(2):  # the second capture reuses calls that the first one verified
        check_one_capture(pool, function, *inputs)


def check_one_capture(pool: GraphPool, function: Callable[..., Any], *inputs: Tensor) -> None:
    static = [tensor.clone() for tensor in inputs]
    twins = [tensor.clone() for tensor in inputs]
    captured = pool.capture(lambda: function(*static), collect_garbage=False)
    assert_same(captured.output, function(*twins))
    assert_same(static, twins)
    for _ in range(NUM_REPLAYS):
        for tensor, twin in zip(static, twins, strict=True):
            refill(tensor)
            twin.copy_(tensor)
        pool.replay(captured.tape)
        assert_same(captured.output, function(*twins))
        assert_same(static, twins)


def case(name: str, function: Callable[..., Any], *makes: Make) -> Any:
    return pytest.param(function, makes, id=name)


# --- one operator, or a few, per case -------------------------------------------------------------

ELEMENTWISE = [
    case("chain", lambda x: torch.sigmoid(x.mul(2).add(1).tanh()) / 3 - x, floats(4, 8)),
    case("broadcast", lambda x, y: x * y + x, floats(4, 8), floats(8)),
    case("scalar_first", lambda x: 1.0 - 2.0 / (x * x + 1), floats(4, 8)),
    case("zero_dim_operand", lambda x, s: x * s + s, floats(4, 8), floats()),
    case("where", lambda x, y: torch.where(x > y, x, y), floats(4, 8), floats(4, 8)),
    case("where_scalar", lambda x: torch.where(x > 0, x, -1.0), floats(4, 8)),
    case("masked_fill", lambda x, m: x.masked_fill(m, float("-inf")), floats(4, 8), bools(4, 8)),
    case("clamp_lerp", lambda x, y: x.clamp(-1, 1).lerp(y, 0.3), floats(4, 8), floats(4, 8)),
    case("nan", lambda x: x.sqrt() + x.log(), floats(4, 8)),
    case("gelu_silu", lambda x: F.gelu(x) + F.silu(x) + F.leaky_relu(x), floats(4, 8)),
    case("non_contiguous", lambda x: x.t() + 1, floats(4, 8)),
]

MATMULS = [
    case("mm", torch.mm, floats(4, 8), floats(8, 6)),
    case("mm_transposed", lambda x, y: x @ y.t(), floats(4, 8), floats(6, 8)),
    case("addmm", torch.addmm, floats(6), floats(4, 8), floats(8, 6)),
    case("bmm", torch.bmm, floats(3, 4, 8), floats(3, 8, 6)),
    case("baddbmm", torch.baddbmm, floats(3, 4, 6), floats(3, 4, 8), floats(3, 8, 6)),
    case("matmul_broadcast", torch.matmul, floats(2, 3, 4, 8), floats(8, 6)),
    case("mv", torch.mv, floats(4, 8), floats(8)),
    case("dot", torch.dot, floats(8), floats(8)),
    case(
        "einsum", lambda x, y: torch.einsum("bij,bkj->ikb", x, y), floats(3, 4, 8), floats(3, 5, 8)
    ),
    case("linear_2d", F.linear, floats(4, 8), floats(6, 8)),
    case("linear_2d_bias", F.linear, floats(4, 8), floats(6, 8), floats(6)),
    case("linear_3d", F.linear, floats(2, 4, 8), floats(6, 8)),
    case("linear_3d_bias", F.linear, floats(2, 4, 8), floats(6, 8), floats(6)),
    case("linear_one_row", F.linear, floats(1, 8), floats(6, 8), floats(6)),
]

VIEWS = [
    case("view", lambda x: x.view(2, 16), floats(4, 8)),
    case("view_of_result", lambda x: (x + 1).view(2, 16) * 2, floats(4, 8)),
    case("transpose", lambda x: (x * 2).transpose(0, 1), floats(4, 8)),
    case("slice", lambda x: (x * 2)[1:3, ::2] + x[2:, 1::2], floats(4, 8)),
    case("select", lambda x: (x * 2)[1] + x[-1], floats(4, 8)),
    case("expand", lambda x: (x * 2)[:1].expand(4, 8) + x, floats(4, 8)),
    case("expand_returned", lambda x: (x * 2)[:1].expand(4, 8), floats(4, 8)),
    case("unbind", lambda x: [row * 2 for row in (x + 1).unbind()], floats(4, 8)),
    case("split", lambda x: [part.sum() for part in (x + 1).split(3, dim=1)], floats(4, 8)),
    case("chunk", lambda x: torch.mul(*(x + 1).chunk(2, dim=1)), floats(4, 8)),
    case("as_strided", lambda x: (x + 1).as_strided((5, 4), (3, 1), 2).sum(1), floats(4, 8)),
    case("narrow", lambda x: (x + 1).narrow(1, 2, 3).exp(), floats(4, 8)),
    case("permute", lambda x: (x + 1).permute(2, 0, 1).contiguous(), floats(2, 3, 4)),
    case("squeeze", lambda x: (x + 1).unsqueeze(1).squeeze() * 2, floats(4, 8)),
    case("diagonal", lambda x: (x + 1).diagonal() * 2, floats(4, 8)),
    case("unfold", lambda x: (x + 1).unfold(1, 3, 2).sum(-1), floats(4, 8)),
    case("dtype_view", lambda x: (x + 1).view(torch.int32) + 1, floats(4, 8)),
    case("dtype_view_narrower", lambda x: (x + 1)[1:].view(torch.uint8), floats(4, 8)),
    case("dtype_view_of_input", lambda x: x[2:].view(torch.int16) * 1, floats(4, 8)),
    case("view_of_view", lambda x: (x + 1)[1:].t()[2:4].t() * 3, floats(4, 8)),
    case(
        "clone_contiguous", lambda x: [x.t().clone(), x.t().contiguous(), x.clone()], floats(4, 8)
    ),
    case("fresh_overlapping", lambda x: x.sum().expand(3).clone() + x[0, :3], floats(4, 8)),
]


def add_through_slice(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 1:3].add_(1)
    return y


def scale_through_transpose(x: Tensor) -> Tensor:
    y = x + 1
    y.t().mul_(2)
    return y


def overwrite_a_read_value(x: Tensor) -> Tensor:
    y = x + 1
    before = y * 3
    y.mul_(2)
    return before - y


def write_input_then_read(x: Tensor, y: Tensor) -> Tensor:
    x[1:].copy_(y[1:])
    x[0] = 5.0
    return x + y


def mask_assignment(x: Tensor) -> Tensor:
    y = x * 1
    y[x > 0] = 0.0
    y[x[:, 0] < 0] = 7.0
    return y


IN_PLACE = [
    case("intermediate", lambda x: (x * 2).add_(1).mul_(x).relu_(), floats(4, 8)),
    case("input", lambda x: x.add_(1), floats(4, 8)),
    case("input_unreturned", lambda x: x.t().mul_(2)[0, 0] * 1, floats(4, 8)),
    case("slice_of_input", lambda x: x[:, 1:3].add_(1), floats(4, 8)),
    case("slice_of_intermediate", add_through_slice, floats(4, 8)),
    case("transpose_of_intermediate", scale_through_transpose, floats(4, 8)),
    case("order_of_reads_and_writes", overwrite_a_read_value, floats(4, 8)),
    case("write_input_then_read", write_input_then_read, floats(4, 8), floats(4, 8)),
    case("mask_assignment", mask_assignment, floats(4, 8)),
    case("foreach", lambda x, y: torch._foreach_add_([x, y], 1.0), floats(4), floats(8)),
    case("zero_fill", lambda x: [(x * 2).zero_(), (x * 2).fill_(3)], floats(4)),
]


def out_empty(x: Tensor) -> Tensor:
    out = torch.empty(0, device=x.device)
    torch.add(x, 1, out=out)
    return out * 2


def out_reused(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    torch.mul(x, 2, out=out)
    first = out.sum()
    torch.exp(x, out=out)
    return first + out


def out_slice(x: Tensor) -> Tensor:
    out = torch.zeros(8, 8, device=x.device)
    torch.mul(x, 2, out=out[2:6])
    return out


def out_pair(x: Tensor) -> Any:
    values = torch.empty(4, 2, device=x.device)
    indices = torch.empty(4, 2, dtype=torch.int64, device=x.device)
    torch.topk(x, 2, out=(values, indices))
    return values, indices


OUT_ARGUMENTS = [
    case("empty", out_empty, floats(4, 8)),
    case("reused", out_reused, floats(4, 8)),
    case("slice", out_slice, floats(4, 8)),
    case("pair", out_pair, floats(4, 8)),
    case("input", lambda x, y: torch.mm(x, x.t(), out=y), floats(4, 8), floats(4, 4)),
]

MULTI_OUTPUT = [
    case("topk", lambda x: tuple(x.topk(3, dim=-1)), floats(4, 8)),
    case("sort", lambda x: tuple(x.sort(dim=0, descending=True)), floats(4, 8)),
    case("max_dim", lambda x: tuple(x.max(dim=1)), floats(4, 8)),
    case("var_mean", lambda x: torch.var_mean(x, dim=1), floats(4, 8)),
    case(
        "native_layer_norm",
        lambda x: torch.native_layer_norm(x, (8,), None, None, 1e-5),
        floats(4, 8),
    ),
    case(
        "layer_norm",
        lambda x, w, b: F.layer_norm(x, (8,), w, b),
        floats(4, 8),
        floats(8),
        floats(8),
    ),
    case("frexp", lambda x: tuple(torch.frexp(x)), floats(4, 8)),
    case("aminmax", lambda x: tuple(torch.aminmax(x)), floats(4, 8)),
    case("split_copy", lambda x: torch.split_copy(x, 2), floats(4, 8)),
    case("split_copy_one_part", lambda x: torch.split_copy(x, 4), floats(4, 8)),
    case("unbind_copy", lambda x: torch.unbind_copy(x), floats(4, 8)),
    case("foreach", lambda x, y: torch._foreach_mul([x, y], 2.0), floats(4), floats(8)),
    case("foreach_one", lambda x: torch._foreach_mul([x], 2.0), floats(4)),
    case("meshgrid", lambda x: torch.meshgrid(x, x + 1, indexing="ij"), floats(4)),
]

NETWORK = [
    case(
        "conv2d",
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        floats(2, 3, 8, 8),
        floats(4, 3, 3, 3),
        floats(4),
    ),
    case(
        "conv2d_channels_last",
        lambda x, w: F.conv2d(x, w, stride=2),
        channels_last(2, 3, 8, 8),
        channels_last(4, 3, 3, 3),
    ),
    case(
        "conv2d_depthwise",
        lambda x, w: F.conv2d(x, w, groups=4),
        floats(2, 4, 8, 8),
        floats(4, 1, 3, 3),
    ),
    case("conv1d", lambda x, w: F.conv1d(x, w, dilation=2), floats(2, 3, 16), floats(4, 3, 3)),
    case(
        "conv_transpose2d",
        lambda x, w: F.conv_transpose2d(x, w, stride=2),
        floats(2, 3, 4, 4),
        floats(3, 4, 2, 2),
    ),
    case(
        "batch_norm_eval",
        lambda x, m, v: F.batch_norm(x, m, v.abs()),
        floats(2, 4, 3, 3),
        floats(4),
        floats(4),
    ),
    case("group_norm", lambda x: F.group_norm(x, 2), floats(2, 4, 3, 3)),
    case("max_pool2d", lambda x: F.max_pool2d(x, 2), floats(2, 3, 8, 8)),
    case(
        "max_pool2d_indices", lambda x: F.max_pool2d(x, 2, return_indices=True), floats(2, 3, 8, 8)
    ),
    case("avg_pool2d", lambda x: F.avg_pool2d(x, 3, padding=1), channels_last(2, 3, 8, 8)),
    case("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 2), floats(2, 3, 8, 8)),
    case("interpolate", lambda x: F.interpolate(x, scale_factor=2.0), floats(2, 3, 4, 4)),
    case("pad", lambda x: F.pad(x, (1, 2), value=3.0), floats(4, 8)),
    case("rms_norm", lambda x, w: F.rms_norm(x, (8,), w), floats(4, 8), floats(8)),
    case("softmax", lambda x: F.softmax(x, dim=-1) + F.log_softmax(x, dim=0), floats(4, 8)),
    case("attention", F.scaled_dot_product_attention, *[floats(2, 3, 5, 16)] * 3),
    case(
        "attention_causal",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        *[floats(2, 3, 5, 16)] * 3,
    ),
    case(
        "attention_mask",
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        *[floats(2, 3, 5, 16)] * 3,
        bools(5, 5),
    ),
    case(
        "attention_gqa",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        floats(2, 6, 1, 16),
        *[floats(2, 3, 5, 16)] * 2,
    ),
    # Its out-variant gives different bits.
    case(
        "binary_cross_entropy",
        lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
        floats(4, 8),
        floats(4, 8),
    ),
    case("cross_entropy", F.cross_entropy, floats(4, 8), ints(4, below=8)),
]

INDEXING = [
    case("embedding", F.embedding, ints(3, 5, below=8), floats(8, 4)),
    case("gather", lambda x, i: x.gather(1, i), floats(4, 8), ints(4, 3)),
    case("scatter", lambda x, i: x.scatter(1, i, 2.5), floats(4, 8), ints(4, 1)),
    case(
        "scatter_add",
        lambda x, i, s: x.clone().scatter_add_(0, i, s),
        floats(4, 8),
        ints(1, 8),
        floats(1, 8),
    ),
    case("index_select", lambda x, i: x.index_select(0, i), floats(4, 8), ints(6)),
    case("index", lambda x, i, j: x[i, j], floats(4, 8), ints(6), ints(6)),
    case("index_with_slice", lambda x, i: (x * 2)[:, i], floats(4, 8), ints(6)),
    case(
        "index_put",
        lambda x, v: x.index_put((torch.arange(3, device=x.device),), v),
        floats(4, 8),
        floats(3, 8),
    ),
    case(
        "index_copy_",
        lambda x, v: x.index_copy_(0, torch.arange(1, 4, device=x.device), v),
        floats(4, 8),
        floats(3, 8),
    ),
    case(
        "index_add",
        lambda x, v: x.index_add(0, torch.arange(3, device=x.device), v),
        floats(4, 8),
        floats(3, 8),
    ),
    case("take_along_dim", lambda x: x.take_along_dim(x.argsort(1), 1), floats(4, 8)),
    case("searchsorted", lambda x, y: torch.searchsorted(x.sort().values, y), floats(8), floats(5)),
    case("repeat_interleave", lambda x: x.repeat_interleave(3, dim=0), floats(4, 8)),
    case(
        "repeat_interleave_sized",
        lambda x, n: x.repeat_interleave(n, 0, output_size=6),
        floats(4, 8),
        lambda device: torch.arange(4, device=device),
    ),
]

SHAPES = [
    case("cat", lambda x, y: torch.cat([x, y * 2], dim=1), floats(4, 8), floats(4, 2)),
    case("cat_views", lambda x: torch.cat([x[:, 4:], x[:, :4]], dim=1), floats(4, 8)),
    case("stack", lambda x, y: torch.stack([x, y, x + y], dim=1), floats(4, 8), floats(4, 8)),
    case("cumsum", lambda x: x.cumsum(0) + x.cumsum(1, dtype=torch.float64), floats(4, 8)),
    case(
        "sums",
        lambda x: [x.sum(), x.sum(1), x.sum((0, 1), keepdim=True), x.sum(dtype=torch.float64)],
        floats(4, 8),
    ),
    case(
        "reductions",
        lambda x: [x.mean(1), x.amax(), x.prod(0), x.norm(), x.logsumexp(1), x.argmax()],
        floats(4, 8),
    ),
    case("flip_roll", lambda x: x.flip(0) + x.roll(2, 1), floats(4, 8)),
    case("tril", lambda x: x.tril() + x.triu(1), floats(4, 4)),
    case("repeat", lambda x: (x + 1).repeat(2, 3), floats(4, 8)),
    case(
        "one_hot_by_scatter",
        lambda i: torch.zeros(4, 8, device=i.device).scatter_(1, i, 1.0),
        ints(4, 1),
    ),
]

FACTORIES = [
    case("zeros", lambda x: torch.zeros(4, 8, device=x.device).add_(x), floats(4, 8)),
    case(
        "ones",
        lambda x: torch.ones(8, dtype=torch.float64, device=x.device).mul_(2) + x,
        floats(4, 8),
    ),
    case("full", lambda x: torch.full((4, 8), 2.5, device=x.device).sub_(x), floats(4, 8)),
    case(
        "arange", lambda x: torch.arange(1, 9, 2, device=x.device).add_(1) + x[:, :1], floats(4, 8)
    ),
    case(
        "linspace_eye",
        lambda x: torch.eye(4, device=x.device) * torch.linspace(0, 1, 4, device=x.device),
        floats(4),
    ),
    case("empty", lambda x: torch.empty(4, 8, device=x.device).copy_(x).add_(1), floats(4, 8)),
    case(
        "empty_strided",
        lambda x: torch.empty_strided((4, 8), (1, 4), device=x.device).copy_(x),
        floats(4, 8),
    ),
    case(
        "like",
        lambda x: [
            torch.zeros_like(x.t()),
            torch.ones_like(x, dtype=torch.int32),
            torch.full_like(x, 3),
        ],
        floats(4, 8),
    ),
    case(
        "zeros_like_channels_last", lambda x: torch.zeros_like(x).add_(x), channels_last(2, 3, 4, 4)
    ),
    case(
        "new",
        lambda x: [
            x.new_zeros(3),
            x.new_ones(2, 2),
            x.new_full((2,), 7.0),
            x.new_empty(3).fill_(1),
        ],
        floats(4),
    ),
    case(
        "scalar_tensor", lambda x: x + torch.scalar_tensor(2.0, device=x.device).add_(1), floats(4)
    ),
]

TYPES = [
    case(
        "casts",
        lambda x: [x.half(), x.bfloat16(), x.double(), x.int(), x > 0, x.to(torch.int8)],
        floats(4, 8),
    ),
    case("cast_non_contiguous", lambda x: x.t().to(torch.float64), floats(4, 8)),
    case(
        "int64",
        lambda x, y: [x * y + 1, x // (y + 1), x.sum(), x << 2],
        ints(4, 8, below=50),
        ints(4, 8),
    ),
    case(
        "int32", lambda x: (x.cumsum(1) % 5, x.to(torch.float32) / 3), ints(4, 8, dtype=torch.int32)
    ),
    case("uint8", lambda x: x * 7 + 200, ints(4, 8, below=256, dtype=torch.uint8)),
    case(
        "bool",
        lambda x, y: [x & ~y, x.any(1), x.all(), x.sum(), x.logical_xor(y)],
        bools(4, 8),
        bools(4, 8),
    ),
    case(
        "half",
        lambda x, y: [x @ y.t() + 1, x.softmax(1), x.sum()],
        *[floats(4, 8, dtype=torch.float16)] * 2,
    ),
    case(
        "bfloat16",
        lambda x, y: [x @ y.t() + 1, x.softmax(1), x.sum()],
        *[floats(4, 8, dtype=torch.bfloat16)] * 2,
    ),
    case(
        "float64",
        lambda x, y: [x @ y.t() + 1, x.softmax(1), x.sum()],
        *[floats(4, 8, dtype=torch.float64)] * 2,
    ),
    case(
        "complex",
        lambda x, y: [x * y, x @ y.t(), x.abs(), x.sum()],
        *[floats(4, 8, dtype=torch.complex64)] * 2,
    ),
    case(
        "complex_views",
        lambda x: [torch.view_as_real(x * 2), (x * 2).imag, x.real + 1],
        floats(4, 8, dtype=torch.complex64),
    ),
    case(
        "conj",
        lambda x: [(x * 2).conj(), x.conj() * x, (x + 1).conj().clone(), (x * 2).mH],
        floats(4, 8, dtype=torch.complex64),
    ),
    case(
        "conj_of_intermediate_read",
        lambda x: (x * 2).conj().imag + x.conj().imag.exp(),
        floats(4, 8, dtype=torch.complex64),
    ),
    case(
        "rotary_complex",
        lambda x: torch.view_as_real(torch.view_as_complex(x * 1) * 1j),
        floats(4, 8, 2),
    ),
    case("fft", lambda x: torch.fft.irfft(torch.fft.rfft(x)), floats(4, 8)),
]

SMALL = [
    case("empty", lambda x: [x + 1, torch.cat([x, x]), x.sum(), x.t() * 2], floats(0, 8)),
    case("empty_mm", lambda x, y: x @ y, floats(4, 0), floats(0, 3)),
    case("empty_slice", lambda x: (x * 2)[:0] + 1, floats(4, 8)),
    case(
        "zero_dim", lambda x: [x + 1, x.exp(), x.view(1), x.expand(3), x.clone().add_(2)], floats()
    ),
    case(
        "zero_dim_int",
        lambda x: [x + 1, x.float() / 2, x > 0],
        lambda device: torch.ones((), dtype=torch.int64, device=device),
    ),
    case("one_element", lambda x: x.sum().view(1, 1).expand(2, 2) * x, floats(1)),
    case("nothing", lambda x: None, floats(4)),
    case("input_itself", lambda x: x, floats(4)),
    case("view_of_input", lambda x: x[1:], floats(4)),
    case("nested", lambda x: {"a": [x + 1, (x * 2, {"b": x.sum()})], "c": x}, floats(4)),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("function", "makes"), ELEMENTWISE + MATMULS + SHAPES + SMALL)
def test_computing(
    pool: GraphPool, device: torch.device, function: Callable[..., Any], makes: tuple[Make, ...]
) -> None:
    check_replays(pool, function, *(make(device) for make in makes))


@pytest.mark.sweep
@pytest.mark.parametrize(("function", "makes"), VIEWS + IN_PLACE + OUT_ARGUMENTS)
def test_aliasing(
    pool: GraphPool, device: torch.device, function: Callable[..., Any], makes: tuple[Make, ...]
) -> None:
    check_replays(pool, function, *(make(device) for make in makes))


@pytest.mark.sweep
@pytest.mark.parametrize(("function", "makes"), MULTI_OUTPUT + NETWORK + INDEXING)
def test_operators_with_structure(
    pool: GraphPool, device: torch.device, function: Callable[..., Any], makes: tuple[Make, ...]
) -> None:
    check_replays(pool, function, *(make(device) for make in makes))


@pytest.mark.sweep
@pytest.mark.parametrize(("function", "makes"), FACTORIES + TYPES)
def test_new_tensors_and_types(
    pool: GraphPool, device: torch.device, function: Callable[..., Any], makes: tuple[Make, ...]
) -> None:
    check_replays(pool, function, *(make(device) for make in makes))


@torch.no_grad()
def test_a_number_and_a_tensor_of_one_element_are_not_taken_for_each_other(
    pool: GraphPool, device: torch.device
) -> None:
    scalar = torch.tensor(0.5, dtype=torch.float64, device=device)
    one = torch.tensor([0.5], dtype=torch.float64, device=device)
    whole = torch.arange(6, device=device).view(2, 3)
    for other in (0.5, scalar, one, 2, True, 0.5, one, scalar):
        check_one_capture(pool, lambda x, other=other: x * other, whole)
        check_one_capture(pool, lambda x, other=other: x.float() * other, whole)


# --- state that a run changes ---------------------------------------------------------------------


@pytest.mark.parametrize("features", [(4,), (4, 3, 3)], ids=["1d", "2d"])
def test_batch_norm_in_training_updates_its_statistics_once_per_run(
    pool: GraphPool, device: torch.device, features: tuple[int, ...]
) -> None:
    make = torch.nn.BatchNorm1d if len(features) == 1 else torch.nn.BatchNorm2d
    module, twin = make(4, device=device).train(), make(4, device=device).train()
    x = torch.randn(8, *features, device=device)
    make(4, device=device)(x)
    captured = pool.capture(lambda: module(x))
    for replay in range(NUM_REPLAYS + 1):
        if replay:
            refill(x)
            pool.replay(captured.tape)
        with torch.no_grad():
            assert_same(captured.output, twin(x))
        assert_same(dict(module.named_buffers()), dict(twin.named_buffers()))


def test_the_capture_takes_effect_exactly_once(pool: GraphPool, device: torch.device) -> None:
    total, x = torch.zeros(4, device=device), torch.ones(4, device=device)
    captured = pool.capture(lambda: total.add_(x))
    assert_same(total, x)
    pool.replay(captured.tape)
    assert_same(total, x * 2)


def test_a_scalar_made_inside_the_graph_is_made_anew_by_each_replay(
    pool: GraphPool, device: torch.device
) -> None:
    # On CUDA it lives on the host, and its value goes into the kernel's arguments.
    x = torch.zeros(4, device=device)
    captured = pool.capture(lambda: x + torch.tensor(3.0).add_(1))
    for _ in range(NUM_REPLAYS):
        pool.replay(captured.tape)
        assert_same(captured.output, torch.full((4,), 4.0, device=device))


def test_an_operator_spoils_no_memory_beside_its_output(
    pool: GraphPool, device: torch.device
) -> None:
    # The out-variant of this loss grows its output to the size of the input on the way.
    x, y = torch.rand(64, 8, device=device), torch.rand(64, 8, device=device)

    def function() -> tuple[Tensor, Tensor]:
        hole, neighbour = x[0] * 2, x[1] * 3
        del hole
        return neighbour, F.binary_cross_entropy(x, y)

    captured = pool.capture(function)
    assert_same(captured.output, function())
    pool.replay(captured.tape)
    assert_same(captured.output, function())


class KeepsIntermediate(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = x.exp()
        self.kept_view = self.kept[1:]
        scratch = self.kept * 2
        return scratch.sum() + torch.zeros_like(scratch)


def test_an_intermediate_kept_on_an_object_stays_valid_and_current(
    pool: GraphPool, device: torch.device
) -> None:
    module, x = KeepsIntermediate(), torch.randn(16, device=device)
    captured = pool.capture(lambda: module(x))
    others = [pool.capture(lambda: torch.randn(16, device=device) + x) for _ in range(3)]
    for _ in range(NUM_REPLAYS):
        refill(x)
        for other in others:
            pool.replay(other.tape)
        pool.replay(captured.tape)
        assert_same(module.kept, x.exp())
        assert_same(module.kept_view, x.exp()[1:])


def test_graphs_of_one_pool_replay_in_any_order(pool: GraphPool, device: torch.device) -> None:
    x = torch.randn(8, 8, device=device)

    def function(rows: int) -> Tensor:
        return torch.softmax((x[:rows] @ x).relu() + x[:rows].exp(), dim=-1)

    tapes, outputs = {}, {}
    for rows in (8, 4, 2, 1):
        captured = pool.capture(lambda rows=rows: function(rows))
        tapes[rows], outputs[rows] = captured.tape, pool.weak(captured.output)
    for rows in (1, 8, 2, 2, 4, 8, 1):
        refill(x)
        pool.replay(tapes[rows])
        assert_same(outputs[rows], function(rows))


def test_a_graph_reads_the_output_of_another(pool: GraphPool, device: torch.device) -> None:
    x = torch.randn(4, 8, device=device)
    first = pool.capture(lambda: x * 2)
    second = pool.capture(lambda: first.output.t().exp())
    for _ in range(NUM_REPLAYS):
        refill(x)
        pool.replay(first.tape)
        pool.replay(second.tape)
        assert_same(second.output, (x * 2).t().exp())


# --- random numbers -------------------------------------------------------------------------------


def draw_by_name(x: Tensor) -> Tensor:
    on_cuda = x.device.type == "cuda"
    generator = torch.cuda.default_generators[0] if on_cuda else torch.default_generator
    return torch.rand(x.shape, generator=generator, device=x.device)


RANDOM = [
    pytest.param(lambda x: F.dropout(x, 0.5), id="dropout"),
    pytest.param(lambda x: x + torch.rand(4, 8, device=x.device), id="rand"),
    pytest.param(lambda x: x + torch.randn_like(x), id="randn"),
    pytest.param(lambda x: torch.bernoulli(x.sigmoid()), id="bernoulli"),
    pytest.param(lambda x: x * 1 + torch.empty_like(x).uniform_(), id="uniform_"),
    pytest.param(lambda x: torch.multinomial(x.softmax(1), 3), id="multinomial"),
    pytest.param(lambda x: torch.randint(1000, (4, 8), device=x.device), id="randint"),
    pytest.param(lambda x: torch.randperm(64, device=x.device), id="randperm"),
    pytest.param(lambda x: x * 1 + draw_by_name(x), id="default_generator_by_name"),
    pytest.param(lambda x: noisy(x) + torch.rand_like(x), id="custom_operator"),
]


@pytest.mark.parametrize("function", RANDOM)
def test_random_numbers_are_fresh_on_each_replay(
    pool: GraphPool, device: torch.device, function: Callable[[Tensor], Tensor]
) -> None:
    x = torch.randn(4, 8, device=device)
    captured = pool.capture(lambda: function(x))
    draws = [captured.output.clone()]
    for _ in range(NUM_REPLAYS):
        pool.replay(captured.tape)
        draws.append(captured.output.clone())
    for index, draw in enumerate(draws):
        assert not any(torch.equal(draw, other) for other in draws[index + 1 :])


@pytest.mark.parametrize("function", RANDOM)
def test_a_seed_gives_the_draws_of_eager(
    pool: GraphPool, device: torch.device, function: Callable[[Tensor], Tensor]
) -> None:
    if device.type == "cuda":
        pytest.skip("a graph on CUDA reserves its draws as a whole, eager kernel by kernel")
    x = torch.randn(4, 8)
    torch.manual_seed(7)
    captured = pool.capture(lambda: function(x))
    torch.manual_seed(7)
    assert_same(captured.output, function(x))
    for _ in range(NUM_REPLAYS):
        torch.manual_seed(7)
        pool.replay(captured.tape)
        after_replay = torch.rand(3)
        torch.manual_seed(7)
        assert_same(captured.output, function(x))
        assert_same(after_replay, torch.rand(3))


def test_a_registered_generator_is_drawn_from_on_replay(device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(3)
    x = torch.zeros(64, device=device)
    with GraphPool(device, lazy_capture=True, generators=[generator]) as pool:
        captured = pool.capture(lambda: x + torch.rand(64, generator=generator, device=device))
        draws = [captured.output.clone()]
        for _ in range(2):
            pool.replay(captured.tape)
            draws.append(captured.output.clone())
        generator.manual_seed(3)
        pool.replay(captured.tape)
        assert not torch.equal(draws[0], draws[1])
        assert not torch.equal(draws[1], draws[2])
        assert_same(captured.output, draws[0])


# --- custom operators -----------------------------------------------------------------------------


@torch.library.custom_op("ostinato_test::scaled", mutates_args=())
def scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor


@torch.library.custom_op("ostinato_test::accumulate", mutates_args={"total"})
def accumulate(total: Tensor, x: Tensor) -> None:
    total.add_(x)


@torch.library.custom_op("ostinato_test::push", mutates_args={"total"})
def push(total: Tensor, x: Tensor) -> Tensor:
    total.add_(x)
    return total * 2


@torch.library.custom_op("ostinato_test::pair", mutates_args=())
def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    return x + 1, (x > 0).t().contiguous().t()


@torch.library.custom_op("ostinato_test::many", mutates_args=())
def many(xs: list[Tensor]) -> list[Tensor]:
    return [x * 2 for x in xs]


@torch.library.custom_op("ostinato_test::broadcast", mutates_args=())
def broadcast(x: Tensor) -> Tensor:
    return x.sum().expand(4)


@torch.library.custom_op("ostinato_test::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


@torch.library.custom_op("ostinato_test::square", mutates_args=())
def square(x: Tensor) -> Tensor:
    return x @ x


@torch.library.custom_op("ostinato_test::from_host", mutates_args=())
def from_host(x: Tensor) -> Tensor:
    total = x.sum().item() + sum(x.flatten().tolist()) + float(x.numpy().max())
    return x * total if total > 0 else x - torch.tensor([total])


def push_twice(total: Tensor, x: Tensor) -> list[Tensor]:
    return [push(total, x), push(total, x * 3)]


CUSTOM = [
    case("functional", lambda x: scaled(x + 1, 2.5) + x, floats(4, 8)),
    case("functional_of_view", lambda x: scaled((x + 1)[1:].t(), 2.5), floats(4, 8)),
    case("mutating_input", lambda total, x: accumulate(total, x * 2), floats(4), floats(4)),
    case("mutating_view", lambda x: accumulate(x[1:3], x[:2] * 2), floats(4, 8)),
    case("mutating_and_returning", push_twice, floats(4), floats(4)),
    case("multi_output", lambda x: pair(x.exp()), floats(4, 8)),
    case("list_output", lambda x, y: many([x, y + 1]), floats(4), floats(8)),
    case("overlapping_output", lambda x: broadcast(x) + 1, floats(8)),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("function", "makes"), CUSTOM)
def test_custom_operators(
    pool: GraphPool, device: torch.device, function: Callable[..., Any], makes: tuple[Make, ...]
) -> None:
    check_replays(pool, function, *(make(device) for make in makes))


def test_a_custom_operator_may_read_values_on_the_host(
    pool: GraphPool, device: torch.device
) -> None:
    if device.type == "cuda":
        pytest.skip("on CUDA the kernels inside an operator are captured, and it may not wait")
    check_replays(pool, lambda x: from_host(x * 1) + 1, torch.randn(4, 8))


# --- surroundings ---------------------------------------------------------------------------------


def test_autocast_around_the_capture(pool: GraphPool, device: torch.device) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return (x @ w).exp()

    check_replays(
        pool, function, torch.randn(4, 8, device=device), torch.randn(8, 6, device=device)
    )


def test_autocast_around_a_replay_changes_nothing(pool: GraphPool, device: torch.device) -> None:
    x = torch.randn(8, 8, device=device)
    captured = pool.capture(lambda: [x @ x, square(x)])
    refill(x)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        pool.replay(captured.tape)
    assert_same(captured.output, [x @ x, x @ x])


def test_graphs_captured_under_one_autocast_each_cast_their_weights(
    pool: GraphPool, device: torch.device
) -> None:
    # Autocast caches the casts of parameters, in memory that is free once it is left.
    linear, x = torch.nn.Linear(8, 8, device=device), torch.randn(4, 8, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        linear(x)
        captured = [pool.capture(lambda: linear(x) * 1) for _ in range(2)]
    pool.capture(lambda: torch.full((64, 64), 7.0, device=device) * x.sum())
    with torch.no_grad():
        linear.weight.mul_(3)
    for one in captured:
        pool.replay(one.tape)
        with torch.autocast(device.type, dtype=torch.bfloat16), torch.no_grad():
            assert_same(one.output, linear(x) * 1)


@pytest.mark.parametrize(
    ("function", "makes"),
    [
        case("functional", lambda x: (x * 2).t() @ x, floats(4, 8)),
        case("in_place", lambda x: x.add_(1)[1:].mul_(2) * 1, floats(4, 8)),
        case("in_place_on_intermediate", lambda x: (x * 2)[1:].add_(1), floats(4, 8)),
    ],
)
def test_capture_inside_inference_mode(
    pool: GraphPool, device: torch.device, function: Callable[..., Any], makes: tuple[Make, ...]
) -> None:
    with torch.inference_mode():
        check_replays(pool, function, *(make(device) for make in makes))


def test_a_module_with_gradients_enabled(pool: GraphPool, device: torch.device) -> None:
    layers = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)
    ).to(device)
    x = torch.randn(4, 8, device=device)
    captured = pool.capture(lambda: layers(x))
    assert not captured.output.requires_grad
    for _ in range(NUM_REPLAYS):
        refill(x)
        pool.replay(captured.tape)
        assert_same(captured.output, layers(x).detach())


@pytest.mark.parametrize("warm", [False, True], ids=["uncompiled", "compiled_before"])
def test_a_compiled_function(pool: GraphPool, device: torch.device, warm: bool) -> None:
    if device.type == "cuda" and not warm:
        pytest.skip("compiling runs and synchronises on CUDA, so it comes before a capture")

    def function(x: Tensor) -> Tensor:
        return (x * 2 + 1).relu().sum(1)

    compiled, x = torch.compile(function, backend="aot_eager"), torch.randn(4, 8, device=device)
    with torch.no_grad():
        if warm:
            compiled(x)
        captured = pool.capture(lambda: compiled(x))
    for _ in range(NUM_REPLAYS):
        refill(x)
        pool.replay(captured.tape)
        assert_same(captured.output, function(x))


def test_an_empty_graph_replays_as_nothing(pool: GraphPool, device: torch.device) -> None:
    x = torch.randn(4, device=device)
    captured = pool.capture(lambda: x[1:])
    assert captured.output.data_ptr() == x[1:].data_ptr()
    before = x.clone()
    pool.replay(captured.tape)
    assert_same(x, before)


def test_no_python_of_the_function_runs_on_replay(pool: GraphPool, device: torch.device) -> None:
    calls, x = [], torch.randn(4, device=device)

    def function() -> Tensor:
        calls.append(1)
        return x * len(calls)

    captured = pool.capture(function)
    pool.replay(captured.tape)
    assert calls == [1]
    assert_same(captured.output, x)


# --- random programs ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Instruction:
    """One operation on two tensors picked from those alive, counted from the newest."""

    name: str
    first: int
    second: int


def column_add(x: Tensor, y: Tensor) -> Tensor:
    x[:, 1:3].add_(y[:, :2].clone())
    return x[:, 1:3] @ x[1:3]


# Values are kept small, so that no NaN hides a difference. What an in-place operator reads is
# copied first: torch forbids operands that overlap in part.
OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: (x + y) * 0.5,
    "mul": lambda x, y: (x * y).tanh(),
    "mm": lambda x, y: (x @ y).tanh(),
    "addmm": lambda x, y: torch.addmm(x, y, x).sin(),
    "softmax": lambda x, y: (x - y).softmax(1),
    "where": lambda x, y: torch.where(x > y, x, -y),
    "max": lambda x, y: x.max(1, keepdim=True).values + y * 0.1,
    "sort": lambda x, y: x.sort(0).values - y.cos(),
    "cat": lambda x, y: torch.cat([x[:2], y[2:]]),
    "gather": lambda x, y: x.gather(1, y.argsort(1)),
    "transpose": lambda x, y: x.t(),
    "reshape": lambda x, y: x.reshape(2, 8).view(4, 4),
    "select": lambda x, y: x.narrow(0, 1, 1).expand(4, 4) + y[0],
    "add_": lambda x, y: x.add_(y.clone(), alpha=0.5),
    "sin_": lambda x, y: x.sin_(),
    "transposed_mul_": lambda x, y: x.t().mul_(y.cos()),
    "copy_": lambda x, y: x.copy_(y.clone()),
    "column_add_": column_add,
    "out": lambda x, y: torch.mul(x, y.sin(), out=torch.empty(4, 4, device=x.device)),
    "random": lambda x, y: x.tanh() + torch.rand_like(y),
}

instructions = st.builds(
    Instruction,
    name=st.sampled_from(["drop", "drop", "drop", *OPERATIONS]),
    first=st.integers(0, 30),
    second=st.integers(0, 30),
)


def run_program(program: list[Instruction], *inputs: Tensor) -> list[Tensor]:
    alive = list(inputs)
    for instruction in program:
        first, second = -1 - instruction.first % len(alive), -1 - instruction.second % len(alive)
        if instruction.name != "drop":
            alive.append(OPERATIONS[instruction.name](alive[first], alive[second]))
        elif len(alive) > 1:
            del alive[first]
    return alive


@pytest.mark.slow
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=st.lists(instructions, min_size=10, max_size=30))
def test_random_programs(pool: GraphPool, program: list[Instruction]) -> None:
    # One pool for all examples: each captures into memory that earlier ones used.
    static = [torch.randn(4, 4, device=pool.device) for _ in range(2)]
    twins = [tensor.clone() for tensor in static]
    torch.manual_seed(1)
    captured = pool.capture(lambda: run_program(program, *static), collect_garbage=False)
    torch.manual_seed(1)
    assert_same(captured.output, run_program(program, *twins))
    for seed in range(2):
        for tensor, twin in zip(static, twins, strict=True):
            refill(tensor)
            twin.copy_(tensor)
        torch.manual_seed(seed)
        pool.replay(captured.tape)
        torch.manual_seed(seed)
        assert_same([captured.output, static], [run_program(program, *twins), twins])
