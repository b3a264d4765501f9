"""The arguments a graph was captured with, and the check that a replay passes the same.

The check runs on every replay. Its fast path is one call into torch's C++ guards for type, shape
and strides, and a comparison of addresses. If the fast path rejects a call, the full comparison
decides, and names the argument that differs.
"""

from __future__ import annotations

import enum
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ostinato import compat
from ostinato.compat import tensor_guards
from ostinato.errors import CaptureError, ReplayMismatchError
from ostinato.graphs.tree import check_distinct, leaves_with_path, nested_too_deeply

# None if torch lacks it; then every check is a full one.
TensorGuards: Any = tensor_guards.find()

Matcher = Callable[[tuple[Any, ...], dict[str, Any]], bool]


class TensorSpec(NamedTuple):
    """The properties of a tensor argument that must not change."""

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
    """The arguments of a captured call. Holds no tensors, only their specs."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._positional_names = positional_names(function)
        self._leaves = [
            (path, TensorSpec.of(leaf) if isinstance(leaf, torch.Tensor) else fixed(path, leaf))
            for path, leaf in self._walk(args, kwargs)
        ]
        check_distinct(path for path, _ in self._leaves)
        self._addresses = [spec.address for _, spec in self._leaves if isinstance(spec, TensorSpec)]
        self._num_args = len(args) + len(kwargs)
        self._keywords = tuple(kwargs)
        self.matches = self._fast_path(args, kwargs)

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise ``ReplayMismatchError`` unless the call matches the captured one."""
        if not self.matches(args, kwargs):
            self._check_all(args, kwargs)

    def _fast_path(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Matcher:
        """A function that quickly accepts the captured call, and may reject an equal one.

        A closure, because attribute lookups matter on a path of two microseconds.
        """
        flat = (*args, *kwargs.values())
        only_tensors = all(isinstance(value, torch.Tensor) for value in flat)
        if TensorGuards is None or not flat or not only_tensors:
            return _never
        # Graphs are captured outside inference mode and mostly replayed inside, and the guards
        # compare a tensor's dispatch keys, which include the mode.
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
        leaves = self._walk(args, kwargs)
        now, captured = dict(leaves), dict(self._leaves)
        if now.keys() != captured.keys():
            missing = sorted(captured.keys() - now.keys())
            extra = sorted(now.keys() - captured.keys())
            raise ReplayMismatchError(
                f"the graph was captured with other arguments: missing {missing}, new {extra}; "
                "pass the same arguments, or capture these too"
            )
        if len(now) < len(leaves):
            check_distinct(path for path, _ in leaves)
        for path, value in now.items():
            compare_leaf(path, captured[path], value)
        # The fast path rejected it for an irrelevant reason, such as being an autograd leaf.
        if tuple(kwargs) == self._keywords:
            self.matches = self._fast_path(args, kwargs)

    def _walk(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
        names = self._positional_names
        leaves: list[tuple[str, Any]] = []
        name = ""
        try:
            for index, value in enumerate(args):
                name = names[index] if index < len(names) else f"args[{index}]"
                leaves.extend(leaves_with_path(value, name))
            for name, value in kwargs.items():
                leaves.extend(leaves_with_path(value, name))
        except RecursionError:
            raise nested_too_deeply(f"argument {name!r}") from None
        return leaves


def _layout_guards(tensors: tuple[torch.Tensor, ...], *, inference: bool) -> Callable[..., bool]:
    """A check that others have the same types, shapes and strides, in or out of inference mode."""
    with compat.inference_mode(inference):
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
    """Whether two values are equal; unlike ``==``, 0.0 and -0.0 differ and NaN equals itself."""
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


# Leaves that cannot change unnoticed: plain values, and objects compared by identity.
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
    """``leaf``, if later calls can be compared with it; raises for objects with hidden contents."""
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
    """Names for positional arguments in messages; empty if the callable hides its signature.

    Positional-only names are not used: there may be a keyword argument of the same name.
    """
    target = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        parameters = inspect.signature(target).parameters.values()
    except Exception:  # it has none, or a custom __getattr__ raises what hasattr() does not expect
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
