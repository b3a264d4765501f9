"""What a graph was captured with, and the check that a replay is asked for with the same.

The check runs on every replay. Its fast path is one call into torch's C++ guards for type, shape
and strides, and a comparison of addresses. Whatever the fast path does not accept goes to the full
comparison, which decides, and names the argument that differs.
"""

from __future__ import annotations

import enum
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ostinato.compat import tensor_guards
from ostinato.errors import CaptureError, ReplayMismatchError
from ostinato.graphs.capture.tree import leaves_with_path

# None where torch lacks it; then every check is a full one.
TensorGuards: Any = tensor_guards.find()

Matcher = Callable[[tuple[Any, ...], dict[str, Any]], bool]


class TensorSpec(NamedTuple):
    """What must not change about a tensor argument."""

    address: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    conjugated: bool
    negated: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(
            tensor.data_ptr(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor.device,
            tensor.is_conj(),
            tensor.is_neg(),
        )


class CallSignature:
    """The arguments of a captured call. Holds no tensors, only what they looked like."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._positional_names = positional_names(function)
        self._leaves = [
            (path, TensorSpec.of(leaf) if isinstance(leaf, torch.Tensor) else fixed(path, leaf))
            for path, leaf in self._walk(args, kwargs)
        ]
        self._addresses = [spec.address for _, spec in self._leaves if isinstance(spec, TensorSpec)]
        self._num_args = len(args) + len(kwargs)
        self._keywords = tuple(kwargs)
        self.matches = self._fast_path(args, kwargs)

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise ``ReplayMismatchError`` unless the call matches the captured one."""
        if not self.matches(args, kwargs):
            self._check_all(args, kwargs)

    def _fast_path(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Matcher:
        """A function that accepts the captured call quickly, and may refuse an equal one.

        A closure, because on a path of two microseconds attribute lookups count.
        """
        flat = (*args, *kwargs.values())
        only_tensors = all(isinstance(value, torch.Tensor) for value in flat)
        if TensorGuards is None or not flat or not only_tensors:
            return _never
        # Graphs are captured outside of inference mode and mostly replayed inside, and the guards
        # see a tensor's dispatch keys, to which the mode belongs.
        same_layouts = _layout_guards(flat, inference=False), _layout_guards(flat, inference=True)
        num_args, keywords, addresses = self._num_args, self._keywords, self._addresses
        address_of, is_inference = torch.Tensor.data_ptr, torch.is_inference_mode_enabled

        def matches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            if kwargs or keywords:
                if tuple(kwargs) != keywords:
                    return False
                args = (*args, *kwargs.values())
            return (
                len(args) == num_args
                and same_layouts[is_inference()](*args)
                and [*map(address_of, args)] == addresses
            )

        return matches

    def _check_all(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        now = dict(self._walk(args, kwargs))
        captured = dict(self._leaves)
        if now.keys() != captured.keys():
            missing = sorted(captured.keys() - now.keys())
            extra = sorted(now.keys() - captured.keys())
            raise ReplayMismatchError(
                f"the graph was captured with other arguments: missing {missing}, new {extra}; "
                "call it the way it was captured, or capture this way of calling it too"
            )
        for path, value in now.items():
            compare_leaf(path, captured[path], value)
        # The fast path said no for a reason that does not matter, such as being a leaf of autograd.
        if tuple(kwargs) == self._keywords:
            self.matches = self._fast_path(args, kwargs)

    def _walk(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
        names = self._positional_names
        leaves: list[tuple[str, Any]] = []
        for index, value in enumerate(args):
            name = names[index] if index < len(names) else f"args[{index}]"
            leaves.extend(leaves_with_path(value, name))
        for name, value in kwargs.items():
            leaves.extend(leaves_with_path(value, name))
        return leaves


def _layout_guards(tensors: tuple[torch.Tensor, ...], *, inference: bool) -> Callable[..., bool]:
    """A check that others have type, shape and strides of these, in or out of inference mode."""
    with torch.inference_mode(inference):
        check: Callable[..., bool] = TensorGuards(
            *tensors,
            dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
            dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
        ).check
    return check


def compare_leaf(path: str, captured: Any, value: Any) -> None:
    if isinstance(captured, TensorSpec) and isinstance(value, torch.Tensor):
        now = TensorSpec.of(value)
        for what in ("dtype", "device", "shape", "stride", "conjugated", "negated"):
            was, is_now = getattr(captured, what), getattr(now, what)
            if was != is_now:
                raise ReplayMismatchError(
                    f"argument {path!r} has {what} {_show(is_now)}, but the graph was captured "
                    f"with {_show(was)}; a graph replays one shape and type only"
                )
        if captured.address != now.address:
            raise ReplayMismatchError(
                f"argument {path!r} moved: the graph was captured with it at "
                f"{captured.address:#x}, it is now at {now.address:#x}; keep one buffer and "
                "write new data into it with copy_"
            )
    elif (
        isinstance(captured, TensorSpec)
        or isinstance(value, torch.Tensor)
        or not same_value(captured, value)
    ):
        was = "a tensor" if isinstance(captured, TensorSpec) else repr(captured)
        is_now = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
        raise ReplayMismatchError(
            f"argument {path!r} is {is_now}, but the graph was captured with {was}; values other "
            "than tensors are part of the graph and cannot change"
        )


def same_value(a: Any, b: Any) -> bool:
    """Whether two values are as good as one; 0.0 and -0.0 are not, and NaN is."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return bool(a.hex() == b.hex())
    try:
        return bool(a == b)
    except (RuntimeError, ValueError):  # arrays and tensors have no truth value
        return False


# What cannot change behind our back: plain values, and things whose identity is what matters.
_FIXED_TYPES = (
    int,
    float,
    complex,
    str,
    bytes,
    frozenset,
    range,
    slice,
    type(None),
    type,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Generator,
    torch.nn.Module,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
)


def is_fixed(leaf: Any) -> bool:
    return isinstance(leaf, _FIXED_TYPES)


def fixed(path: str, leaf: Any) -> Any:
    """``leaf``, if a later call can be compared with it; an object with hidden contents cannot."""
    if is_fixed(leaf):
        return leaf
    raise CaptureError(
        f"argument {path!r} is a {type(leaf).__qualname__}, whose contents cannot be checked on "
        "replay; pass tensors and plain values in dicts, lists, tuples or dataclasses, or have an "
        "@eager_break function read it from the forward context"
    )


def _show(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, (tuple, torch.Size)) else str(value)


def positional_names(function: Callable[..., Any]) -> list[str]:
    """Names for positional arguments in messages; none where the callable hides its signature.

    Positional-only names are not used: a keyword of the same name can stand beside them.
    """
    target = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return []
    names = []
    for index, parameter in enumerate(parameters):
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            names.append(f"args[{index}]")
        elif parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            names.append(parameter.name)
    return names


def _never(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return False
