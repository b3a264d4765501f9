"""Rejects operations that a capture cannot contain, with the same errors on every backend.

On CUDA an illegal operation invalidates the capture and leaves torch's random generator and
allocator in an inconsistent state. On the CPU nothing would fail until a replay returned stale
results. Both backends therefore record under this guard, which raises ``CaptureError`` with the
operator and the user's line before the operator runs.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType, TracebackType
from typing import Any

import torch

from ostinato.compat import (
    OpOverload,
    TorchDispatchMode,
    call_composite,
    generator_number,
    has_kernel_for_key,
    layers_above_modes,
)
from ostinato.errors import CaptureError
from ostinato.graphs.backends.base import OperatorObserver, is_unobserved
from ostinato.graphs.backends.operator_log import OperatorLog
from ostinato.graphs.tree import tensors_in

aten = torch.ops.aten

_OWN_CODE = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep,
)

HOST_READ = "reads a value back to the host"
_DYNAMIC_SHAPE = "has an output whose shape depends on the data"
_BOOLEAN_MASK = "selects by a boolean mask, so its shape depends on the data"
_HOST_DATA = "builds a tensor from host data"
HOST_COPY = "copies from the device to the host"
HOST_NUMBER = "copies a number from the host to the positions in a tensor of indices"
_REBINDS = "changes which memory a tensor refers to"
_GENERATOR = "draws from a generator that is not registered with the graph pool"
_HIGHER_ORDER = "is a higher-order operator, whose control flow cannot be recorded"
_RETURNS_NUMBER = "returns a number, which may depend on the data, to the host"

_WHAT_TO_DO = {
    HOST_READ: "keep the value on the device (torch.where instead of `if`)",
    _DYNAMIC_SHAPE: "use an operator with a fixed output shape",
    _BOOLEAN_MASK: "use torch.where or masked_fill",
    _HOST_DATA: "build the tensor once, before the capture, and keep it",
    HOST_COPY: "keep the result on the device and copy it after the replay",
    HOST_NUMBER: "assign a tensor that was made on the device before the capture",
    _REBINDS: "write into the tensor with copy_ instead",
    _GENERATOR: "pass it in `generators=` where the pool is made",
    _HIGHER_ORDER: "call the operator outside the graph",
    _RETURNS_NUMBER: "return it in a tensor",
}

# What is wrong with a call of an operator, as seen by a guard; None if nothing is.
Rule = Callable[["CaptureGuard", tuple[Any, ...], dict[str, Any]], str | None]


_skipped_by_dynamo: set[str] = set()


def keep_dynamo_out() -> None:
    """Exclude our frames from torch.compile, if it is in use.

    They run inside the frames of compiled functions and would otherwise be compiled too.
    """
    rules = sys.modules.get("torch._dynamo.trace_rules")
    package = "ostinato.graphs"
    if rules is not None and package not in _skipped_by_dynamo:
        rules.add(package)
        _skipped_by_dynamo.add(package)


def describe_frame(frame: FrameType, lineno: int) -> str:
    code = frame.f_code
    line = linecache.getline(code.co_filename, lineno, frame.f_globals).strip()
    return f"{code.co_filename}:{lineno} in {code.co_name}" + (f": `{line}`" if line else "")


def _is_users(file: str) -> bool:
    """Code of the user, or what torch.fx made of it, whose caller is not to blame."""
    return file.startswith("<eval_with_key>") or not file.startswith((*_OWN_CODE, "<"))


def source_of_caller() -> str | None:
    """The innermost line on the stack that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return describe_frame(frame, frame.f_lineno)
        frame = frame.f_back
    return None


def source_of_error(traceback: TracebackType | None) -> str | None:
    """The innermost line in a traceback that is neither torch's nor ours."""
    found = None
    while traceback is not None:
        if _is_users(traceback.tb_frame.f_code.co_filename):
            found = describe_frame(traceback.tb_frame, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


def forbidden(operator: str, problem: str) -> CaptureError:
    """The error for an operator that cannot be part of a graph."""
    source = source_of_caller()
    return CaptureError(
        f"{operator} {problem}, which a graph cannot contain, at {source or 'an unknown line'}; "
        f"{_WHAT_TO_DO[problem]}, or mark the function with @eager_break and capture piecewise",
        operator=operator,
        source=source,
    )


def compiler_error(error: BaseException) -> CaptureError | None:
    """Convert an error of torch's compiler inside a capture; None for any other error."""
    if not type(error).__module__.startswith("torch._dynamo"):
        return None
    source = source_of_error(error.__traceback__)
    first_line = str(error).split("\n", 1)[0]
    return CaptureError(
        f"torch's compiler started inside a capture, at {source or 'an unknown line'}, and failed: "
        f"{first_line}. Higher-order operators cannot be captured; call a compiled function once "
        "before the capture",
        source=source,
    )


class KnownOperators:
    """What a backend's guards have found out about operators, so that each asks torch once."""

    def __init__(self) -> None:
        self.rules: dict[Any, Rule | None] = {}
        self.composite: dict[Any, bool] = {}


class CaptureGuard(TorchDispatchMode):
    """Raises before an operator that no graph can contain; runs all others unchanged.

    ``device_type`` says which tensors count as device tensors: on CUDA, reading a CPU tensor is
    harmless; on the CPU backend all tensors are on the device.
    """

    supports_higher_order_operators = True  # so that the error can name them

    def __init__(
        self,
        device_type: str,
        generators: Sequence[torch.Generator] = (),
        known: KnownOperators | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._last_operator: Any = None
        self.log: OperatorLog | None = None  # of the current recording, on CUDA
        self.observer: OperatorObserver | None = None
        self._device_type = device_type
        self._generators = {generator_number(generator) for generator in generators}
        self._known = known or KnownOperators()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Compiled callables stay compiled under this mode; otherwise torch would run them eagerly,
        # and the graph would silently hold slower kernels.
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch imports torch._dynamo on the first call, which takes two seconds. If it
        # is imported anyway, keep_dynamo_out() has the same effect.
        return False

    def forget_last_operator(self) -> None:
        self._last_operator = None

    @property
    def last_operator(self) -> str | None:
        """The operator that was checked last, since ``forget_last_operator``."""
        return None if self._last_operator is None else str(self._last_operator)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and has_own_dispatch(types):
            return NotImplemented
        if self.is_composite(func) and all(map(_is_dense, tensors_in((args, kwargs)))):
            return self.decomposed(func, args, kwargs)
        self.check(func, args, kwargs)
        log = self.log
        first_node = None if log is None else log.num_nodes()
        result = self._run_plainly(func, args, kwargs)
        if log is not None:
            log.note(func, (args, kwargs), first_node)
        return result

    def _run_plainly(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        autocast = self.autocast_in_body(func)
        with nullcontext() if autocast is None else torch.autocast(self._device_type, autocast):
            result = func(*args, **kwargs)
        if self.observer is not None and not is_unobserved():
            self.observer.saw(func, args, kwargs, result, None)
        return result

    def is_composite(self, func: Any) -> bool:
        """Whether ``func`` is composed of other operators, which are checked instead.

        torch decomposes it in the autograd layer, above this mode. Inference mode has no such
        layer, so ``is_nonzero``, ``one_hot`` or ``matmul`` arrive here undecomposed.
        """
        try:
            return self._known.composite[func]
        except KeyError:
            composite = (
                isinstance(func, OpOverload)
                and has_kernel(func, "CompositeImplicitAutograd")
                # Operators with a kernel for the device arrive here in every mode.
                and not has_kernel(func, self._device_type.upper())
                # chunk, narrow, matmul.out: torch is about to record the result's base tensor.
                and not has_kernel(func, "ADInplaceOrView")
            )
            self._known.composite[func] = composite
            return composite

    def decomposed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a composite operator with this mode active for the operators it calls."""
        if func in _READ_THEIR_ARGUMENTS and self._device_type == "cpu":
            raise forbidden(str(func), HOST_READ)
        # The kernel's calls must pass the layers above a mode (autocast, views), as in eager
        # code; inside a mode those layers are disabled.
        with layers_above_modes(), self._autocast_inside(func), self:
            return call_composite(func, args, kwargs)

    def _autocast_inside(self, func: OpOverload) -> AbstractContextManager[object]:
        """Autocast is off inside an operator whose arguments it has already cast."""
        device_type = self._device_type
        if torch.is_autocast_enabled(device_type) and has_kernel(
            func, f"Autocast{device_type.upper()}"
        ):
            return torch.autocast(device_type, enabled=False)
        return nullcontext()

    def autocast_in_body(self, func: Any) -> torch.dtype | None:
        """The dtype that autocast casts to inside ``func``, or None if autocast is off there.

        Here it is off, like every layer above a mode. But in eager code the body of a custom
        operator runs under it, and so do the few torch operators that call autocast's operators.
        """
        if func.namespace == "aten" and func not in _CALL_CAST_OPERATORS:
            return None
        with layers_above_modes():
            enabled = torch.is_autocast_enabled(self._device_type)
        return torch.get_autocast_dtype(self._device_type) if enabled else None

    def check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._last_operator = func
        try:
            rule = self._known.rules[func]
        except KeyError:
            rule = self._known.rules[func] = self._rule_for(func)
        if rule is not None:
            problem = rule(self, args, kwargs)
            if problem is not None:
                raise forbidden(str(func), problem)

    def _rule_for(self, func: Any) -> Rule | None:
        """The check that an operator needs; most need none. It must not refer to this guard."""
        if not isinstance(func, OpOverload):
            return lambda guard, args, kwargs: _HIGHER_ORDER
        if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
            return CaptureGuard._indices
        if func in _READ_THEIR_ARGUMENTS:
            return CaptureGuard._host_read
        if func.namespace != "aten" and self._device_type == "cpu" and _returns_number(func):
            return lambda guard, args, kwargs: _RETURNS_NUMBER if guard._on_device(args) else None
        if torch.Tag.data_dependent_output in func.tags:
            return CaptureGuard._host_read
        if torch.Tag.dynamic_output_shape in func.tags:
            return CaptureGuard._dynamic_shape
        if func in (aten._to_copy.default, aten.copy_.default):
            return CaptureGuard._host_copy
        if func.overloadpacket is aten.lift_fresh and self._device_type == "cpu":
            # On CUDA a scalar becomes a kernel argument, which is harmless.
            return lambda guard, args, kwargs: _HOST_DATA if args[0].dim() else None
        if func.overloadpacket in (aten.set_, aten.resize_):
            return lambda guard, args, kwargs: _REBINDS
        if any(argument.name == "generator" for argument in func._schema.arguments):
            return CaptureGuard._unregistered_generator
        return None

    def _on_device(self, values: Any) -> bool:
        if isinstance(values, torch.Tensor):
            return values.device.type == self._device_type
        return isinstance(values, (list, tuple)) and any(self._on_device(value) for value in values)

    def _host_read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        return HOST_READ if self._on_device(args) else None

    def _dynamic_shape(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        # repeat_interleave with a given output size has a fixed shape.
        fixed = kwargs.get("output_size") is not None
        return None if fixed or not self._on_device(args) else _DYNAMIC_SHAPE

    def _indices(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        masks = [index for index in args[1] if index is not None]
        value = args[2] if len(args) > 2 else kwargs.get("values")
        if not any(mask.dtype in (torch.bool, torch.uint8) for mask in masks):
            # On the CPU backend a number looks like a tensor here; ``host_reads`` refuses it.
            on_host = value is not None and not self._on_device(value)
            return HOST_NUMBER if on_host and self._on_device(args[0]) else None
        # x[mask] = scalar becomes masked_fill, which is allowed.
        accumulates = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
        if value is not None and value.numel() == 1 and len(masks) == 1 and not accumulates:
            return None
        return _BOOLEAN_MASK if self._on_device(args) else None

    def _host_copy(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        if self._device_type == "cpu":
            return None
        if len(args) > 1:
            target, source = args[0].device, args[1].device
            pinned = args[0].device.type == "cpu" and args[0].is_pinned()
        else:
            target, source = torch.device(kwargs.get("device") or args[0].device), args[0].device
            pinned = bool(kwargs.get("pin_memory"))
        if source.type == self._device_type and target.type == "cpu" and not pinned:
            return HOST_COPY
        return None

    def _unregistered_generator(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        given: Any = (*args, kwargs.get("generator"))
        generator = next((g for g in given if isinstance(g, torch.Generator)), None)
        if generator is None or generator_number(generator) in self._generators:
            return None
        return _GENERATOR if generator.device.type == self._device_type else None


def has_own_dispatch(types: Sequence[type]) -> bool:
    """Whether ``types`` contains a tensor subclass that handles operators itself.

    It runs first; the guard then sees the operators it calls on its inner tensors.
    """
    plain: Any = torch.Tensor
    return any(cls.__torch_dispatch__ is not plain.__torch_dispatch__ for cls in types)  # type: ignore[attr-defined]


# Operators that read tensor values on the host but lack torch's tag. Composite ones arrive here
# only in inference mode; otherwise ``host_reads`` covers the functions that lead to them.
_READ_THEIR_ARGUMENTS = frozenset(
    {
        aten._nested_tensor_from_mask_left_aligned.default,
        aten._pack_padded_sequence.default,
        aten._pad_packed_sequence.default,
        aten.tensor_split.tensor_indices_or_sections,
        aten.lstm.data,
        aten.gru.data,
        aten.rnn_tanh.data,
        aten.rnn_relu.data,
    }
)
_CALL_CAST_OPERATORS = frozenset({aten._trilinear.default})
_NUMBERS = frozenset({"int", "float", "bool", "complex", "number", "str"})


def _returns_number(func: OpOverload) -> bool:
    kinds = (str(result.type) for result in func._schema.returns)
    return any(re.sub(r"[?\[\]]|Optional|List", "", kind) in _NUMBERS for kind in kinds)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Nested and sparse tensors have their own kernels even for composite operators."""
    return tensor.layout is torch.strided and not tensor.is_nested


def has_kernel(func: OpOverload, key: str) -> bool:
    return has_kernel_for_key(func.name(), key)
