"""Generated programs: what a graph replays is what eager does, bit for bit.

Hypothesis builds straight-line programs of views, in-place writes through views, ``out=``, casts,
reductions and random draws over a few tensors, and runs them in any grad mode. Beside them, the
corners of torch that come between a program and its operators: transforms, autocast, subclasses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

from ostinato import GraphPool
from ostinato.errors import CaptureError

Function = Callable[[Tensor], Any]
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True, check_stride=True)


def seeded(seed: int, function: Callable[[], Any]) -> Any:
    torch.manual_seed(seed)
    return function()


def copies(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), value)


# --- random programs ------------------------------------------------------------------------------

# Each takes two tensors of 4 x 4, of any type, and gives one. Some write into their first.
COMPUTE: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: a + b,
    lambda a, b: a * 2,
    lambda a, b: a - 1,
    lambda a, b: torch.where(a > b, a, b),
    lambda a, b: a.float() @ b.float(),
    lambda a, b: torch.cat([a[:2], b.to(a.dtype)[2:]]),
    lambda a, b: torch.stack([a[0], a[1], a[2], a[3]], dim=1),
    lambda a, b: a.flip(0),
    lambda a, b: a.roll(1, 1),
    lambda a, b: a.sum(0, keepdim=True).expand(4, 4),
    lambda a, b: a.float().mean().expand(4, 4),
    lambda a, b: a.float().softmax(-1),
    lambda a, b: F.layer_norm(a.float(), (4,)),
    lambda a, b: F.linear(a.float().t(), b.float(), a.float()[0]),
    lambda a, b: a.cumsum(0),
    lambda a, b: a.sort(dim=1, descending=True).values,
    lambda a, b: a.topk(4, dim=0).values,
    lambda a, b: a[b.long().clamp(0, 3)[0]],
    lambda a, b: a.gather(0, b.long().clamp(0, 3)),
    lambda a, b: a.masked_fill(b > 0, 1),
    lambda a, b: a.clone(),
    lambda a, b: a.contiguous(),
    lambda a, b: torch.zeros_like(a),
    lambda a, b: torch.empty_like(a).copy_(b),
    lambda a, b: torch.complex(a.float(), b.float()).conj().imag,
]
CASTS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b, dtype=dtype: a.to(dtype)  # type: ignore[misc]
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64)
]
VIEWS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: a.t(),
    lambda a, b: a.view(-1).view(4, 4) if a.is_contiguous() else a,
    lambda a, b: a.reshape(2, 8).reshape(4, 4),
    lambda a, b: a[:1].expand(4, 4),
    lambda a, b: a.diagonal().expand(4, 4),
    lambda a, b: torch.cat([a, b.to(a.dtype)])[::2],
    lambda a, b: torch.cat([a, a], 1)[:, 2:6],
    lambda a, b: a.as_strided((4, 4), a.stride(), a.storage_offset()),
    lambda a, b: a.chunk(1)[0],
    lambda a, b: a.detach(),
]


def writable(a: Tensor) -> Tensor:
    """The tensor, or a copy of one whose elements share memory, which torch refuses to write."""
    return a.clone() if 0 in a.stride() else a


def out_mm(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a.float(), b.float(), out=torch.empty(4, 4))


def out_add(a: Tensor, b: Tensor) -> Tensor:
    target = writable(a)
    return torch.add(target, 1, out=target)


WRITES: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: writable(a).add_(1),
    lambda a, b: writable(a).mul_(2),
    lambda a, b: writable(a).copy_(b.clone()),
    lambda a, b: writable(a).clamp_(-2, 2),
    lambda a, b: writable(a).zero_(),
    lambda a, b: writable(a)[1:3].fill_(3).new_ones(4, 4) * a,
    lambda a, b: writable(a).t()[0].sub_(1).expand(4, 4),
    lambda a, b: writable(a).masked_fill_(b.clone() < 0, 0),
    lambda a, b: writable(a).index_fill_(0, torch.arange(2), 5),
    out_mm,
    out_add,
]
DRAWS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: torch.rand(4, 4) + a,
    lambda a, b: torch.randint(9, (4, 4)),
    lambda a, b: F.dropout(a.float(), 0.5),
    lambda a, b: torch.empty(4, 4).normal_(),
    lambda a, b: a[torch.randperm(4)],
    lambda a, b: torch.bernoulli(a.float().sigmoid()),
]
OPERATIONS = COMPUTE + CASTS + VIEWS + WRITES + DRAWS
Program = list[tuple[int, int, int]]


def run(program: Program, inputs: list[Tensor]) -> list[Tensor]:
    """Each step applies an operation to two earlier values. All values are the result."""
    values = list(inputs)
    for operation, first, second in program:
        values.append(
            OPERATIONS[operation](values[first % len(values)], values[second % len(values)])
        )
    return values


STEPS = st.tuples(st.integers(0, len(OPERATIONS) - 1), st.integers(0, 20), st.integers(0, 20))


@pytest.fixture(scope="module")
def shared_pool() -> Iterator[GraphPool]:
    """One pool for all programs, so that each reuses the calls verified by others."""
    with GraphPool("cpu", lazy_capture=True) as pool:
        yield pool


@pytest.mark.slow
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(
    program=st.lists(STEPS, min_size=1, max_size=12),
    mode=st.sampled_from(sorted(MODES)),
    inside=st.sampled_from(["same", *sorted(MODES)]),
    seed=st.integers(0, 99),
)
def test_random_programs(
    shared_pool: GraphPool, program: Program, mode: str, inside: str, seed: int
) -> None:
    pool = shared_pool

    def function(inputs: list[Tensor]) -> list[Tensor]:
        with nullcontext() if inside == "same" else MODES[inside]():
            return run(program, inputs)

    def data(offset: int) -> list[Tensor]:
        torch.manual_seed(seed + offset)
        return [torch.randn(4, 4), torch.randint(-3, 4, (4, 4)), torch.randn(4, 8)[:, ::2]]

    with MODES[mode]():
        static, eager = data(0), data(0)
        captured = seeded(1, lambda: pool.capture(lambda: function(static), collect_garbage=False))
        assert_same(captured.output, seeded(1, lambda: function(eager)))
        for round_ in (1, 2):
            for old, fresh in zip(static, data(round_), strict=True):
                old.copy_(fresh)
            eager = data(round_)
            seeded(2, lambda: pool.replay(captured.tape))
            assert_same(captured.output, seeded(2, lambda e=eager: function(e)))


# --- between a program and its operators ----------------------------------------------------------

torch.manual_seed(0)
WEIGHT = torch.randn(8, 8)
LINEAR = nn.Linear(8, 8)
ATTENTION = nn.MultiheadAttention(8, 2, batch_first=True).eval()


class Doubled(torch.Tensor):
    """A wrapper subclass, as quantised weights are: computes with twice the tensor inside it."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Doubled:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(cls, lambda t: t.inner * 2, (args, kwargs or {}))
        return func(*args, **kwargs)


DOUBLED = Doubled(torch.randn(8, 8))


def with_backward(x: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_(True)
        LINEAR(leaf).sin().sum().backward()
    LINEAR.zero_grad()
    assert leaf.grad is not None
    return leaf.grad * 1


@torch.library.custom_op("test_programs::projected", mutates_args=())
def projected(x: Tensor) -> Tensor:
    return x @ WEIGHT


CORNERS: dict[str, Function] = {
    "vmap": lambda x: vmap(lambda row: row @ WEIGHT + row.sum())(x),
    "vmap of a module": lambda x: vmap(LINEAR)(x),
    "vmap draws": lambda x: vmap(lambda r: r + torch.rand(8), randomness="different")(x),
    "grad": lambda x: grad(lambda y: LINEAR(y).tanh().sum())(x),
    "vmap of grad": lambda x: vmap(grad(lambda row: (row @ WEIGHT).sin().sum()))(x),
    "jacrev": lambda x: jacrev(torch.sin)(x[0]),
    "functional_call": lambda x: functional_call(LINEAR, {"weight": WEIGHT, "bias": x[0]}, (x,)),
    "checkpoint": lambda x: checkpoint(LINEAR, x, use_reentrant=False),
    "linear": lambda x: LINEAR(x),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, WEIGHT),
    "softmax": lambda x: (x @ WEIGHT).softmax(-1) @ WEIGHT,
    "sdpa": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "multi_dot": lambda x: torch.linalg.multi_dot([x, WEIGHT, WEIGHT]),
    "bilinear": lambda x: F.bilinear(x, x, WEIGHT.view(1, 8, 8)),
    "cdist": lambda x: torch.cdist(x, WEIGHT),
    "attention": lambda x: ATTENTION(x[None], x[None], x[None])[0],
    "layer_norm": lambda x: F.layer_norm(x @ WEIGHT, (8,)),
    "custom operator": lambda x: projected(x) + 1,
    "wrapper subclass": lambda x: x @ DOUBLED,
    "linear of a wrapper subclass": lambda x: F.linear(x, DOUBLED),
    "fft": lambda x: torch.fft.ifft(torch.fft.fft(x) * (1 + 2j)).abs(),
    "conjugated": lambda x: (torch.complex(x, x * 2).conj() @ WEIGHT.to(torch.complex64)).imag,
    "overlapping": lambda x: x.as_strided((5, 4), (2, 1)) * 2,
    "expanded": lambda x: x[:1].expand(4, 8) @ WEIGHT,
    "unfold": lambda x: x.unfold(1, 3, 1).sum(-1),
    "index_add": lambda x: x.index_add(0, torch.arange(4) // 2, x),
    "embedding max_norm": lambda x: F.embedding(x.long() % 8, WEIGHT.clone(), max_norm=1.0),
    "gumbel": lambda x: F.gumbel_softmax(x, hard=True),
    "poisson": lambda x: torch.poisson(x.abs()),
}
if torch.__version__ < (2, 12):
    del CORNERS["jacrev"]  # makes its basis from host data, which is refused
AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "float16": lambda: torch.autocast("cpu", torch.float16),
}


@pytest.mark.sweep
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("autocast", AROUND)
@pytest.mark.parametrize("name", CORNERS)
def test_corners_of_torch(name: str, autocast: str, mode: str) -> None:
    """On the CPU. Autocast is entered in the function; around a capture it does the same."""
    function, x = CORNERS[name], torch.randn(4, 8)

    def within() -> Any:
        with AROUND[autocast]():
            return function(x)

    with MODES[mode](), GraphPool("cpu", lazy_capture=True) as pool:
        captured = seeded(1, lambda: pool.capture(within, collect_garbage=False))
        assert_same(captured.output, seeded(1, within))
        x.copy_(torch.randn(4, 8))
        seeded(2, lambda: pool.replay(captured.tape))
        assert_same(captured.output, seeded(2, within))
        with AROUND[autocast]():
            around = seeded(3, lambda: pool.capture(lambda: function(x), collect_garbage=False))
            x.copy_(torch.randn(4, 8))
        seeded(2, lambda: pool.replay(around.tape))  # autocast has ended, and took effect
        assert_same(around.output, seeded(2, within))


@torch.library.custom_op("test_programs::self_product", mutates_args=())
def self_product(x: Tensor) -> Tensor:
    return x @ x.t()


@pytest.mark.parametrize("mode", MODES)
def test_a_custom_operators_body_runs_under_autocast(
    pool: GraphPool, device: torch.device, mode: str
) -> None:
    x = torch.randn(4, 8, device=device)

    def function() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return self_product(x)

    with MODES[mode]():
        captured = pool.capture(function)
        assert captured.output.dtype == torch.bfloat16
        x.copy_(torch.randn(4, 8))
        pool.replay(captured.tape)
        assert_same(captured.output, function())


def test_a_backward_pass_inside_a_function() -> None:
    x = torch.randn(4, 8)
    with GraphPool("cpu", lazy_capture=True) as pool:
        captured = pool.capture(lambda: with_backward(x))
        x.copy_(torch.randn(4, 8))
        pool.replay(captured.tape)
        assert_same(captured.output, with_backward(x))


def test_a_compiled_function() -> None:
    compiled = torch.compile(lambda x: (x @ WEIGHT).sin() * 2, backend="eager")
    x = torch.randn(4, 8)
    with torch.no_grad(), GraphPool("cpu", lazy_capture=True) as pool:
        compiled(x)
        captured = pool.capture(lambda: compiled(x))
        x.copy_(torch.randn(4, 8))
        pool.replay(captured.tape)
        assert_same(captured.output, compiled(x))


SPARSE = torch.eye(4).to_sparse()
NESTED = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)])
NOT_DENSE: dict[str, tuple[Function, str]] = {
    "sparse made": (lambda x: (x.to_sparse() * 2).to_dense(), "sparse_coo"),
    "sparse given": (lambda x: torch.sparse.mm(SPARSE, x), "sparse_coo"),
    "csr": (lambda x: x.to_sparse_csr() @ WEIGHT, "sparse_csr"),
    "nested given": (lambda x: torch.nested.to_padded_tensor(NESTED, 0.0) + x[0, 0], "nested"),
    "nested linear": (lambda x: torch.nested.to_padded_tensor(LINEAR(NESTED), 0.0), "nested"),
    "nested made": (lambda x: torch.nested.nested_tensor([x[:1], x]), "nested"),
    "mkldnn": (lambda x: x.to_mkldnn().to_dense(), "_mkldnn"),
    "quantized": (
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize(),
        "quantized",
    ),
    "zero tangent": (lambda x: jvp(lambda y: y @ WEIGHT, (x,), (x * 2,)), "zero"),
    "meta": (lambda x: torch.empty(3, device="meta") + 1, "meta"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("function", "kind"), NOT_DENSE.values(), ids=NOT_DENSE)
def test_what_is_not_memory_at_an_address_is_refused(
    function: Function, kind: str, mode: str
) -> None:
    if kind == "zero" and mode == "inference" and torch.__version__ < (2, 12):
        pytest.skip("torch makes dense zeros there")
    x = torch.randn(4, 8)
    with (
        GraphPool("cpu", lazy_capture=True) as pool,
        MODES[mode](),
        pytest.raises(CaptureError, match=rf"{kind} tensor on|tensor on {kind}|output whose shape"),
    ):
        pool.capture(lambda: function(x), collect_garbage=False)
