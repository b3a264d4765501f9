"""Every way of reading a tensor's values on the host, in every grad mode: refused, or right.

A value that a function has read becomes part of the capture, so a replay would keep using it for
other inputs. Each function in the table reads ``x`` in some way. Capturing it must either raise
``CaptureError`` that names the operator, or replay what eager gives for other values. On CUDA,
where torch itself refuses some of these for any device tensor, its error is accepted.
"""

from __future__ import annotations

import copy
import io
import math
import operator
import pickle
import threading
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode

from ostinato import GraphPool, eager_break
from ostinato.errors import CaptureError, ReplayMismatchError

Function = Callable[[Tensor], Any]

AT_CAPTURE = [1.0, 2.0, 3.0, 4.0]
ON_REPLAY = [2.0, 1.0, 4.0, 0.0]

ITEM = "aten._local_scalar_dense.default"
DATA = "aten.lift_fresh.default"  # torch.tensor([x[0], ...]) reads, and then builds from host data
RIGHT = None


# What each function does, and the operator that the CPU backend names in its error.
READS: dict[str, tuple[Function, str | None]] = {
    "item": (lambda x: x.sum().item(), ITEM),
    "bool": (lambda x: bool(x[3]), ITEM),
    "if": (lambda x: x * 2 if x[3] else x * 3, ITEM),
    "if_compare": (lambda x: x * 2 if x[0] < x[1] else x * 3, ITEM),
    "not": (lambda x: x * 2 if not x[3] else x * 3, ITEM),
    "chained_comparison": (lambda x: x * 2 if 0 < x[0] < 2 else x, ITEM),
    "is_nonzero": (lambda x: torch.is_nonzero(x[3]), ITEM),
    "int": (lambda x: int(x[0]), ITEM),
    "float": (lambda x: float(x[0]), ITEM),
    "complex": (lambda x: complex(x[0]), ITEM),
    "index": (lambda x: operator.index(x[0].long()), ITEM),
    "list_index": (lambda x: "abcde"[x[0].long()], ITEM),
    "range": (lambda x: list(range(x[0].long())), ITEM),
    "sqrt": (lambda x: math.sqrt(x[0]), ITEM),
    "floor": (lambda x: math.floor(x[0]), ITEM),
    "tolist": (lambda x: x.tolist(), "Tensor.tolist"),
    "numpy": (lambda x: x.numpy(), "Tensor.numpy"),
    "numpy_force": (lambda x: x.numpy(force=True), "Tensor.numpy"),
    "asarray": (lambda x: np.asarray(x), "Tensor.numpy"),
    "array_of_elements": (lambda x: np.array([x[0], x[1]]), "Tensor.numpy"),
    "array_protocol": (lambda x: x.__array__(), "Tensor.numpy"),
    "numpy_function": (lambda x: np.sin(x), "Tensor.numpy"),
    "cpu": (lambda x: x.cpu(), "Tensor.cpu"),
    # "cpu" is the name of the CPU backend's device, which code gets to see as x.device. CUDA
    # refuses it; here it is x itself.
    "to_cpu": (lambda x: x.to("cpu") * 2, RIGHT),
    "repr": (lambda x: repr(x), "Tensor.__repr__"),
    "str": (lambda x: str(x), "Tensor.__repr__"),
    "f_string": (lambda x: f"{x}", "Tensor.__repr__"),
    "format_element": (lambda x: f"{x[0]:.2f}", ITEM),
    "iterate": (lambda x: [float(element) for element in x], ITEM),
    "sorted": (lambda x: sorted(x), ITEM),
    "max": (lambda x: max(x), ITEM),
    "any": (lambda x: any(x), ITEM),
    "sum": (lambda x: sum(x), RIGHT),
    "in": (lambda x: 1.0 in x, ITEM),
    "in_list": (lambda x: x[0] in [x[1], x[2]], ITEM),
    "equal": (lambda x: torch.equal(x, x * 1), "aten.equal.default"),
    "allclose": (lambda x: torch.allclose(x, x * 1), "aten.allclose.default"),
    "assert_close": (lambda x: torch.testing.assert_close(x, x * 1), "Tensor.__repr__"),
    "nonzero": (lambda x: x.nonzero(), "aten.nonzero.default"),
    "argwhere": (lambda x: torch.argwhere(x), "aten.nonzero.default"),
    "where_one_argument": (lambda x: torch.where(x > 0), "aten.nonzero.default"),
    "nonzero_static": (lambda x: torch.nonzero_static(x, size=3), RIGHT),
    "unique": (lambda x: x.unique(), "aten._unique2.default"),
    "unique_consecutive": (lambda x: x.unique_consecutive(), "aten.unique_consecutive.default"),
    "masked_select": (lambda x: x.masked_select(x > 2), "aten.masked_select.default"),
    "mask": (lambda x: x[x > 2], "aten.index.Tensor"),
    "bincount": (lambda x: torch.bincount(x.long()), "aten.bincount.default"),
    "repeat_interleave": (lambda x: x.repeat_interleave(x.long()), "aten.repeat_interleave.Tensor"),
    "one_hot": (lambda x: F.one_hot(x.long()), ITEM),
    "slice": (lambda x: x[: x[0].long()], ITEM),
    "slice_step": (lambda x: x[:: x[0].long()], ITEM),
    "element": (lambda x: x[x[0].long()], ITEM),
    "narrow": (lambda x: x.narrow(0, x[0].long(), 2), ITEM),
    "split": (lambda x: x.split([x[0].long(), 4 - x[0].long()]), ITEM),
    "tensor_split": (lambda x: torch.tensor_split(x, x[:2].long().sort()[0]), "torch.tensor_split"),
    "tensor_split_method": (lambda x: x.tensor_split(x[0].long()), "Tensor.tensor_split"),
    "tensor_split_by_name": (
        lambda x: torch.tensor_split(input=x, tensor_indices_or_sections=x[0].long()),
        "torch.tensor_split",
    ),
    "tensor_split_operator": (
        lambda x: torch.ops.aten.tensor_split.tensor_indices_or_sections(x, x[0].long()),
        "aten.tensor_split",
    ),
    "tensor_split_packet": (
        lambda x: torch.ops.aten.tensor_split(x, x[0].long()),
        "aten.tensor_split",
    ),
    "chunk": (lambda x: x.chunk(x[1].long()), ITEM),
    "view": (lambda x: x.view(x[1].long(), -1), ITEM),
    "zeros": (lambda x: torch.zeros(x[1].long(), device=x.device), ITEM),
    "arange": (lambda x: torch.arange(x[1], device=x.device), ITEM),
    "full": (lambda x: torch.full((3,), x[0], device=x.device), ITEM),
    "topk": (lambda x: x.topk(x[0].long()), ITEM),
    "alpha": (lambda x: torch.add(x, x, alpha=x[0]), ITEM),
    "epsilon": (lambda x: F.layer_norm(x, (4,), eps=x[0]), ITEM),
    "pad": (lambda x: F.pad(x, (x[0].long(), 0)), ITEM),
    "norm_order": (lambda x: x.norm(p=x[1]), ITEM),
    "clamp": (lambda x: x.clamp(x[0], x[1]), RIGHT),
    "power": (lambda x: x ** x[1], RIGHT),
    "fill": (lambda x: (x * 1).fill_(x[1]), RIGHT),
    "masked_fill": (lambda x: x.masked_fill(x > 2, x[0]), RIGHT),
    "lerp": (lambda x: torch.lerp(x, x * 2, x[0]), RIGHT),
    "tensor_of_element": (lambda x: torch.as_tensor(x[0]) * 2, RIGHT),
    "new_tensor_of_element": (lambda x: x.new_tensor(x[0]) * 2, RIGHT),
    "tensor_of_elements": (lambda x: torch.tensor([x[0], x[1]]), DATA),
    "as_tensor_of_elements": (lambda x: torch.as_tensor([x[0], 1.0]), DATA),
    "float_tensor": (lambda x: torch.FloatTensor([x[0], 1.0]), DATA),
    "dlpack": (lambda x: np.from_dlpack(x), "Tensor.__dlpack__"),
    "to_dlpack": (lambda x: torch.utils.dlpack.to_dlpack(x), "torch.utils.dlpack.to_dlpack"),
    "from_dlpack": (lambda x: torch.from_dlpack(x) * 2, "Tensor.__dlpack__"),
    "pickle": (lambda x: pickle.dumps(x), "Tensor.__reduce_ex__"),
    "save": (lambda x: torch.save(x, io.BytesIO()), "Tensor.__reduce_ex__"),
    "deepcopy": (lambda x: copy.deepcopy(x), "aten.set_.source_Storage"),
    "storage_byte": (lambda x: x.untyped_storage()[3], "UntypedStorage.__getitem__"),
    "storage_list": (lambda x: x.untyped_storage().tolist(), "UntypedStorage.tolist"),
    "storage_bytes": (lambda x: bytes(x.untyped_storage()), "UntypedStorage.__getitem__"),
    "pack_sequence": (
        lambda x: pack_padded_sequence(x.view(2, 2, 1), x[1:3].long().clamp(1, 2).flip(0), True),
        "aten._pack_padded_sequence.default",
    ),
    "ctc_lengths": (
        lambda x: F.ctc_loss(
            x.view(2, 1, 2).log_softmax(-1),
            torch.ones(1, 1, dtype=torch.int64, device=x.device),
            x[1:2].long(),
            x[1:2].long().clamp(max=1),
        ),
        "aten._ctc_loss.Tensor",
    ),
    "validated_distribution": (
        # Explicit, because Dynamo turns the default off for the whole process.
        lambda x: torch.distributions.Categorical(logits=x, validate_args=True).probs,
        ITEM,
    ),
    "inverse": (lambda x: torch.linalg.inv(x.view(2, 2)), RIGHT),
    "multinomial": (lambda x: torch.multinomial(x, 1), RIGHT),
    "int_index": (lambda x: x[x.long() % 4], RIGHT),
}


class Mode:
    """A grad mode: around the capture, around the reads, and of the tensor that is read."""

    def __init__(self, outer: Any = nullcontext, inner: Any = nullcontext, made_in: Any = None):
        self.outer: Callable[[], AbstractContextManager[Any]] = outer
        self.inner: Callable[[], AbstractContextManager[Any]] = inner
        self.made_in: Callable[[], AbstractContextManager[Any]] = made_in or nullcontext


MODES = {
    "grad": Mode(),
    "grad_inside": Mode(inner=torch.enable_grad),
    "no_grad": Mode(torch.no_grad),
    "inference": Mode(torch.inference_mode),
    "inference_inside": Mode(inner=torch.inference_mode),
    "inference_tensor": Mode(torch.no_grad, made_in=torch.inference_mode),
    "no_inference_inside": Mode(torch.inference_mode, lambda: torch.inference_mode(False)),
}


def fill(x: Tensor, values: list[float]) -> None:
    with torch.inference_mode():
        x.copy_(torch.tensor(values))


def make(mode: Mode, device: torch.device) -> Tensor:
    with mode.made_in():
        return torch.tensor(AT_CAPTURE, device=device)


def fails_eagerly(function: Function, x: Tensor) -> bool:
    try:
        function(x)
    except (TypeError, BufferError, RuntimeError):
        return True
    return False


@pytest.mark.sweep
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize(("read", "expected"), READS.values(), ids=READS)
def test_a_read_is_refused_or_right(
    pool: GraphPool, device: torch.device, read: Function, expected: str | None, mode: Mode
) -> None:
    x = make(mode, device)

    def function(x: Tensor) -> Any:
        with mode.inner():
            return read(x)

    with mode.outer():
        if device.type == "cpu" and expected is not None:
            with pytest.raises(CaptureError) as caught:
                pool.capture(lambda: function(x), collect_garbage=False)
            assert caught.value.operator == expected
            assert expected in str(caught.value)
            return
        try:
            captured = pool.capture(lambda: function(x), collect_garbage=False)
        except (CaptureError, TypeError, BufferError, RuntimeError, AssertionError) as error:
            if device.type == "cpu" or not (
                isinstance(error, CaptureError) or fails_eagerly(read, x)
            ):
                raise
            return
        fill(x, ON_REPLAY)
        torch.manual_seed(0)
        pool.replay(captured.tape)
        torch.manual_seed(0)
        eager = function(x)
    if type(eager).__name__ == "PyCapsule":
        return  # an address on the GPU, from which nothing was read
    torch.testing.assert_close(captured.output, eager, rtol=0, atol=0)


# --- inside a custom operator ---------------------------------------------------------------------


def digest(value: Any) -> float:
    """A number that distinguishes values of any kind."""
    return float(zlib.crc32(repr(value).encode()) % 1009)


def operator_reading(name: str, read: Function) -> Function:
    """A custom operator whose Python body reads ``x`` and computes with what it has read."""

    @torch.library.custom_op(f"test_host_reads::{name}", mutates_args=())
    def body(x: Tensor) -> Tensor:
        return x * 2 + digest(read(x.clone()))

    return body


# On CUDA every read breaks the capture in the same way, and each broken one leaks a graph.
READ_IN_BODIES = {
    "cpu": [name for name in READS if name not in ("to_dlpack", "pickle")],  # hold addresses
    "cuda": ["item", "tolist", "repr", "mask"],
}


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_custom_operators_body_may_read(
    pool: GraphPool, device: torch.device, mode: Mode, request: pytest.FixtureRequest
) -> None:
    """On the CPU the body runs again on every replay; on CUDA its kernels are the graph."""
    suffix = request.node.callspec.id.replace("-", "_")
    for name in READ_IN_BODIES[device.type]:
        read, _ = READS[name]
        function = operator_reading(f"{name}_{suffix}", read)
        x = make(mode, device)
        torch.manual_seed(0)
        with mode.outer():
            if device.type == "cuda":
                with pytest.raises((CaptureError, TypeError, BufferError)):
                    pool.capture(lambda f=function, x=x: f(x), collect_garbage=False)
                continue
            captured = pool.capture(lambda f=function, x=x: f(x), collect_garbage=False)
            fill(x, ON_REPLAY)
            torch.manual_seed(0)
            pool.replay(captured.tape)
            torch.manual_seed(0)
            assert captured.output.tolist() == function(x).tolist(), name


def test_a_composite_operator_that_reads_its_arguments_is_refused_by_name() -> None:
    """Inference mode hands it over whole; taken apart, it would read by no operator at all."""
    x, cuts = torch.randn(6), torch.tensor([2, 4])
    with (
        GraphPool("cpu", lazy_capture=True) as pool,
        torch.inference_mode(),
        pytest.raises(CaptureError, match=r"aten\.tensor_split reads"),
    ):
        pool.capture(lambda: torch.ops.aten.tensor_split.tensor_indices_or_sections(x, cuts))


@torch.library.custom_op("test_host_reads::count_positive", mutates_args=())
def count_positive(x: Tensor) -> int:
    return int((x > 0).sum())


@torch.library.custom_op("test_host_reads::keep_positive", mutates_args=())
def keep_positive(x: Tensor) -> Tensor:
    return x[x > 0]


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_an_operator_that_returns_a_number_is_refused(
    pool: GraphPool, device: torch.device, mode: Mode
) -> None:
    x = make(mode, device)
    with (
        mode.outer(),
        pytest.raises(CaptureError, match=r"count_positive.*returns a number|broken"),
    ):
        pool.capture(lambda: x * count_positive(x), collect_garbage=False)


def test_an_operator_whose_result_changes_its_shape_is_refused_on_replay(
    pool: GraphPool, device: torch.device
) -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], device=device)
    if device.type == "cuda":
        with pytest.raises(CaptureError):
            pool.capture(lambda: keep_positive(x))
        return
    captured = pool.capture(lambda: keep_positive(x))
    # One element would be copied into all four.
    for values in ([0.0, 0.0, 5.0, 0.0], [1.0, 0.0, 1.0, 1.0]):
        fill(x, values)
        with pytest.raises(ReplayMismatchError, match=r"keep_positive.*\(4,\).*at capture and \("):
            pool.replay(captured.tape)


# --- the functions of the recurrent layers, which read batch sizes --------------------------------


@pytest.mark.parametrize("layer", [torch.nn.RNN, torch.nn.GRU, torch.nn.LSTM])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_packed_sequences_are_refused(layer: type[torch.nn.RNNBase], mode: Mode) -> None:
    """Of a CPU recording: batch sizes live on the host, also on CUDA, where they are baked in."""
    module = layer(1, 3)
    packed = pack_padded_sequence(torch.randn(2, 2, 1), torch.tensor([2, 1]), batch_first=True)
    with GraphPool("cpu", lazy_capture=True) as pool, mode.outer():
        for function in (lambda: module(packed)[0].data, lambda: pad_packed_sequence(packed)[0]):
            with mode.inner(), pytest.raises(CaptureError, match="reads a value back"):
                pool.capture(function, collect_garbage=False)


# --- where reads stay legal -----------------------------------------------------------------------


def test_other_threads_read_while_this_one_captures(pool: GraphPool, device: torch.device) -> None:
    x = torch.arange(4.0, device=device)
    outside = torch.arange(3.0)
    seen: list[Any] = []

    def read() -> None:
        seen.append([outside.tolist(), outside.numpy().sum(), repr(outside), outside.sum().item()])

    def function() -> Tensor:
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        return x * 2

    pool.capture(function)
    assert seen == [[[0.0, 1.0, 2.0], 3.0, "tensor([0., 1., 2.])", 3.0]]


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_eager_breaks_read(pool: GraphPool, device: torch.device, mode: Mode) -> None:
    x = make(mode, device)

    @eager_break
    def scale(x: Tensor) -> Tensor:
        assert repr(x)
        return x * (x.tolist()[0] + x.cpu().numpy()[1])

    def function() -> Tensor:
        with mode.inner():
            return scale(x + 1) * 2

    with mode.outer():
        captured = pool.capture(function, split_at_breaks=True, collect_garbage=False)
        fill(x, ON_REPLAY)
        pool.replay(captured.tape)
        assert captured.output.tolist() == function().tolist()


class Handlers(TorchFunctionMode):
    """Finds its handlers by function, in a table made from what torch itself defines."""

    TABLE = {torch._C.TensorBase.tolist: "tolist", torch._C.TensorBase.numpy: "numpy"}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.TABLE.get(func) or func(*args, **(kwargs or {}))


def test_tables_of_torch_functions_still_match(pool: GraphPool, device: torch.device) -> None:
    x = torch.ones(4, device=device)
    pool.capture(lambda: x * 2)
    with Handlers():
        assert (x.tolist(), x.numpy()) == ("tolist", "numpy")
    assert torch.Tensor.tolist.__name__ == "tolist"
    assert torch.Tensor.tolist(torch.ones(2)) == [1.0, 1.0]


def split_in_two(x: torch.Tensor) -> list[torch.Tensor]:
    return torch.tensor_split(x, 2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_knows_functions_that_are_watched(
    pool: GraphPool, device: torch.device
) -> None:
    x = torch.arange(4.0, device=device)
    torch.jit.script(split_in_two)  # it lists torch's functions on first use
    pool.capture(lambda: x * 2)
    graph = str(torch.jit.script(split_in_two).graph)
    assert "aten::tensor_split" in graph
    assert "^" not in graph  # a call of a Python function
