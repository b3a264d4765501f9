"""Triton's interpreter without work that changes no result: a kernel takes a third of the time."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any


def quicken_interpreter() -> None:
    """Nested calls find the language patched; no overflow is computed that is never checked; types
    and shapes are made once; operands that fit are not converted."""
    from triton.runtime import interpreter

    # Sums are computed again in 64 bits for an assertion that only ``debug`` makes.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _once_per_launch(interpreter._patch_lang)
    interpreter._get_np_dtype = _by_element_type(interpreter._get_np_dtype)
    _share_shapes()
    _unwrap_what_is_wrapped()
    _pass_matching_operands()


def _by_element_type(get_np_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Look NumPy's type up by name; the interpreter builds a table of all types for every value."""
    known: dict[str, Any] = {}

    def get(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = get_np_dtype(dtype)
        return known[name]

    return get


def _share_shapes() -> None:
    """Tensors of one shape share its tuples, whose own types are made when they are asked for.

    Every intermediate value of a kernel has a type and a shape, which nothing changes.
    """
    from triton.language import core

    make_type = core._type_for_tuple_values
    init_tuple = core.tuple.__init__

    def init_lazy_tuple(self: Any, args: Iterable[Any], type: Any = None) -> None:
        if type is None:
            self.values = list(args)
        else:
            init_tuple(self, args, type)

    def type_of(self: Any) -> Any:
        if "_made_type" not in self.__dict__:
            self._made_type = make_type(self.values)
        return self._made_type

    def set_type(self: Any, type: Any) -> None:
        self._made_type = type

    @functools.cache
    def block_shape(sizes: tuple[int, ...]) -> tuple[Any, int]:
        return core.tuple(sizes), core.validate_block_shape(core.tuple(sizes))

    @functools.cache
    def block_name(sizes: tuple[int, ...], element: str) -> str:
        return f"<{block_shape(sizes)[0]}, {element}>"

    @functools.cache
    def tensor_shape(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(n) for n in sizes]), core.constexpr(math.prod(sizes))

    init_block = core.block_type.__init__

    def init_shared_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        if not sizes:
            init_block(self, element_ty, shape)  # which refuses it
        self.element_ty = element_ty
        self.shape, self.numel = block_shape(sizes)
        self.name = block_name(sizes, str(element_ty))

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        sizes = tuple(type.shape.values) if type.is_block() else ()
        self.shape, self.numel = tensor_shape(sizes)

    core.tuple.type = property(type_of, set_type)
    core.tuple.__init__ = init_lazy_tuple
    core.block_type.__init__ = init_shared_block
    core.tensor.__init__ = init_tensor


def _unwrap_what_is_wrapped() -> None:
    """Most values that the language unwraps are neither constants nor sequences of them."""
    from triton.language import core

    unwrap = core._unwrap_if_constexpr
    containers = (list, tuple, core.tuple)

    def unwrap_quickly(value: Any) -> Any:
        if isinstance(value, core.constexpr):
            return value.value
        return unwrap(value) if isinstance(value, containers) else value

    core._unwrap_if_constexpr = unwrap_quickly


def _pass_matching_operands() -> None:
    """Operands of one type and shape need no conversion, and a constant needs one only once.

    It takes ``_share_shapes``: equal shapes are one object.
    """
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    convert = TritonSemantic.binary_op_type_checking_impl
    broadcast = TritonSemantic.broadcast_impl_value
    # No pointers, which are converted; and some operators widen the half-precision types.
    kept = {id(each) for each in (core.int1, core.int32, core.int64, core.float32)}
    constants: dict[Any, Any] = {}

    def convert_quickly(self: Any, lhs: Any, rhs: Any, *flags: Any, **named: Any) -> Any:
        if type(lhs) is not core.tensor or id(lhs.dtype) not in kept:
            return convert(self, lhs, rhs, *flags, **named)
        if type(rhs) is core.tensor and lhs.shape is rhs.shape and lhs.dtype is rhs.dtype:
            return lhs, rhs
        if type(rhs) not in (int, float) or rhs != rhs or not lhs.type.is_block():
            return convert(self, lhs, rhs, *flags, **named)
        key = (type(rhs), rhs, id(lhs.dtype), id(lhs.shape), flags, *sorted(named.items()))
        if key in constants:
            return lhs, constants[key]
        left, right = convert(self, lhs, rhs, *flags, **named)
        if left is lhs and len(constants) < 10_000:
            right.handle.data.flags.writeable = False  # it is shared from now on
            constants[key] = right
        return left, right

    def broadcast_quickly(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    TritonSemantic.binary_op_type_checking_impl = convert_quickly
    TritonSemantic.broadcast_impl_value = broadcast_quickly


def _once_per_launch(patch_lang: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Every call of one kernel by another, such as ``tl.sum``, patches all of ``triton.language``.

    A launch patches it, and restores it at its end; calls inside the launch need no more than what
    it has not patched yet.
    """
    from triton import language as tl

    patched: set[str] = set()

    @functools.cache
    def langs_of(function: Any) -> set[str]:
        values = list(map(id, function.__globals__.values()))
        return {lang.__name__ for lang in (tl, tl.core) if id(lang) in values}

    class Nothing:
        def restore(self) -> None:
            raise AssertionError("a launch inside a launch")

    def patch(function: Any) -> Any:
        langs = langs_of(function)
        if patched and langs <= patched:
            return Nothing()
        scope = patch_lang(function)
        restore = scope.restore

        def restore_all() -> None:
            patched.clear()
            restore()

        scope.restore = restore_all
        patched.update(langs)
        return scope

    return patch
