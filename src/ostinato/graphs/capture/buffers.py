"""Static input buffers: every batch is copied to fixed addresses and padded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ostinato import compat
from ostinato.compat import storage_number
from ostinato.errors import BatchError, ConfigError

# Bound once: every call compares with them, several times.
_TENSOR, _STRIDED = torch.Tensor, torch.strided


class StaticBuffer:
    """One input of all captured sizes, at one address.

    The buffer declares what padding rows hold (``padding``: -1 for slots, 0 for lengths, any valid
    value for ids), and keeps that true: rows after the batch never show an earlier batch's data.

    ``view(size)`` is dense for every size, with the memory order of the example, whichever
    dimension the batch is in. All views share the memory of the largest.
    """

    def __init__(
        self,
        name: str,
        example: torch.Tensor,
        *,
        max_rows: int,
        batch_dim: int = 0,
        padding: float = 0,
    ) -> None:
        if not -example.dim() <= batch_dim < example.dim():
            raise ConfigError(
                f"{name!r} has {example.dim()} dimensions, so it has no batch dimension "
                f"{batch_dim}; name another one in batch_dims, or None"
            )
        self.name = name
        self.batch_dim = batch_dim % example.dim()
        self.padding = padding
        self.max_rows = max_rows
        self._shape = list(example.shape)
        self._order = _memory_order(example.stride())
        self._dtype = example.dtype
        self._device = example.device
        row_elements = math.prod(n for d, n in enumerate(self._shape) if d != self.batch_dim)
        with compat.inference_mode(False):
            try:
                self._memory = torch.full(
                    (max_rows * row_elements,), padding, dtype=example.dtype, device=example.device
                )
            except NotImplementedError as error:
                raise BatchError(
                    f"argument {name!r} has dtype {example.dtype}, of which torch cannot fill rows "
                    "of padding; pass its bytes (x.view(torch.uint8)) and view them as "
                    f"{example.dtype} in the callable"
                ) from error
        self.storage_id = storage_id(self._memory)
        self._views: dict[int, torch.Tensor] = {}
        self._last_shape: torch.Size | None = None  # of a value that fits

    def view(self, size: int) -> torch.Tensor:
        """The view of the buffer for graphs of ``size`` rows; the same object every time."""
        if size not in self._views:
            shape = self._shape.copy()
            shape[self.batch_dim] = size
            stride = _dense_strides(shape, self._order)
            with compat.inference_mode(False):
                self._views[size] = self._memory.as_strided(shape, stride)
        return self._views[size]

    def rows_of(self, value: torch.Tensor) -> int:
        """The number of rows in ``value``, after checking that it fits this buffer."""
        if type(value) is not _TENSOR or value.layout is not _STRIDED or value.is_nested:
            _check_kind(self.name, value)
        shape = value.shape
        if value.dtype is not self._dtype:
            raise self._does_not_fit(f"dtype {value.dtype}", self._dtype)
        if value.device != self._device:
            raise self._does_not_fit(f"device {value.device}", self._device)
        if shape != self._last_shape:
            self._check_shape(shape)
            self._last_shape = shape
        return shape[self.batch_dim]

    def _check_shape(self, shape: torch.Size) -> None:
        if len(shape) != len(self._shape):
            raise self._does_not_fit(f"rank {len(shape)}", len(self._shape))
        for dim, extent in enumerate(shape):
            if dim != self.batch_dim and extent != self._shape[dim]:
                raise self._does_not_fit(f"size {extent} in dimension {dim}", self._shape[dim])

    def fill(self, value: torch.Tensor, size: int) -> torch.Tensor:
        """Copy a batch in and pad it to ``size``. Runs on the current stream."""
        view = self.view(size)
        rows = value.shape[self.batch_dim]
        if rows == size:
            view.copy_(value)
        else:
            view.narrow(self.batch_dim, 0, rows).copy_(value)
        if rows < size:
            # On every call, since the graph may have written to these rows.
            view.narrow(self.batch_dim, rows, size - rows).fill_(self.padding)
        return view

    def fill_repeated(self, value: torch.Tensor, size: int) -> None:
        """Fill ``size`` rows with the rows of ``value``, repeated from the first after the last."""
        rows = value.shape[self.batch_dim]
        order = torch.arange(size, device=self._device) % rows
        self.view(size).copy_(value.index_select(self.batch_dim, order))

    def vary_padding(self, value: torch.Tensor, size: int, noise: float) -> None:
        """Put other numbers into the padding rows of a filled batch.

        Without ``noise`` they are valid inputs of the callable: rows of the batch, in reverse
        order, or numbers from 0 to 1 if these equal the padding anyway. ``noise`` adds a spread of
        that size, the same for the same factor; a negative factor mirrors it. For floating-point
        buffers. Synchronises.
        """
        rows = value.shape[self.batch_dim]
        padding = self.view(size).narrow(self.batch_dim, rows, size - rows)
        order = (rows - 1) - torch.arange(size - rows, device=self._device) % rows
        others = value.index_select(self.batch_dim, order)
        generator = torch.Generator(self._device).manual_seed(size)
        if noise:
            spread = torch.randn(others.shape, device=self._device, generator=generator)
            typical = 1 + others.float().nan_to_num(0, 0, 0).abs().mean()
            if others.itemsize == 1:  # no arithmetic with these
                others = others.float()
            others = others + noise * typical * spread
        elif bool((others == padding).all()):
            others = torch.rand(others.shape, device=self._device, generator=generator)
        padding.copy_(others)

    def fill_far_off(
        self, value: torch.Tensor, size: int, distance: float, *, padding: bool
    ) -> None:
        """Replace the rows of a filled batch by numbers ``distance`` times its usual size from 0,
        all on one side. ``padding``: padding rows too. For floating-point buffers.
        """
        rows = value.shape[self.batch_dim]
        wide = value.float() if value.itemsize == 1 else value  # no arithmetic with these
        typical = 1 + wide.float().nan_to_num(0, 0, 0).abs().mean()
        far = (wide.abs() + abs(distance) * typical) * math.copysign(1, distance)
        view = self.view(size)
        view.narrow(self.batch_dim, 0, rows).copy_(far)
        if padding:
            order = torch.arange(size - rows, device=self._device) % rows
            others = far.index_select(self.batch_dim, order)
            view.narrow(self.batch_dim, rows, size - rows).copy_(others)

    def fill_with_row(self, value: torch.Tensor, size: int, row: int, padding: int | None) -> None:
        """Replace all rows of a batch by one of them, and the rows after them by ``padding``."""
        rows = value.shape[self.batch_dim]
        view = self.view(size)
        view.narrow(self.batch_dim, 0, rows).copy_(value.narrow(self.batch_dim, row, 1))
        if padding is not None:
            others = view.narrow(self.batch_dim, rows, size - rows)
            others.copy_(value.narrow(self.batch_dim, padding, 1))

    def extreme_rows(self, value: torch.Tensor) -> tuple[int, int]:
        """A smallest and a largest row of a batch of integers, by their sums. Synchronises."""
        sums = self._flat_rows(value).sum(1)
        return int(sums.argmin()), int(sums.argmax())

    def differs_from_padding(self, value: torch.Tensor) -> bool:
        """Whether any row of a batch differs from a padding row. Synchronises."""
        rows = self._flat_rows(value)
        return rows.shape[1] > 0 and not bool((rows == self.padding).all())

    def has_distinct_rows(self, value: torch.Tensor) -> bool:
        """Whether all rows of a batch differ. Synchronises."""
        rows = self._flat_rows(value)
        return len(rows.unique(dim=0)) == len(rows)

    def _flat_rows(self, value: torch.Tensor) -> torch.Tensor:
        """Flatten each row of the batch into numbers that can be compared."""
        if value.is_complex():
            value = torch.view_as_real(value.resolve_conj())
        elif value.is_floating_point() and value.itemsize == 1:
            value = value.float()
        rows = value.movedim(self.batch_dim, 0)
        return rows.reshape(rows.shape[0], -1)

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes

    def _does_not_fit(self, what: str, expected: object) -> BatchError:
        return BatchError(
            f"argument {self.name!r} has {what} but the graphs were captured with "
            f"{expected}; convert it first, or use a separate graphed() for it"
        )


class WholeBuffer:
    """An argument without a batch dimension, copied whole on every call."""

    def __init__(self, name: str, example: torch.Tensor) -> None:
        with compat.inference_mode(False):
            self.tensor = torch.empty_like(example).copy_(example)
        self.name = name
        self.num_bytes = self.tensor.nbytes
        self.storage_id = storage_id(self.tensor)
        self._shape, self._dtype = self.tensor.shape, self.tensor.dtype
        self._device = self.tensor.device

    def check(self, value: Any) -> None:
        """Raise if ``value`` does not fit."""
        if not isinstance(value, torch.Tensor):
            raise BatchError(f"argument {self.name!r} must be a tensor, got {value!r}")
        if type(value) is not _TENSOR or value.layout is not _STRIDED or value.is_nested:
            _check_kind(self.name, value)
        if value.shape != self._shape:
            raise self._does_not_fit("shape", value.shape, self._shape)
        if value.dtype is not self._dtype:
            raise self._does_not_fit("dtype", value.dtype, self._dtype)
        if value.device != self._device:
            raise self._does_not_fit("device", value.device, self._device)

    def fill(self, value: torch.Tensor) -> None:
        self.tensor.copy_(value)

    def _does_not_fit(self, what: str, now: object, was: object) -> BatchError:
        return BatchError(
            f"argument {self.name!r} has {what} {now}, but the graphs were captured with "
            f"{was}; convert it first, or use a separate graphed() for it"
        )


def _memory_order(strides: Sequence[int]) -> list[int]:
    """Dimensions from the slowest-moving to the fastest; channels-last stays channels-last."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def _dense_strides(shape: Sequence[int], order: Sequence[int]) -> list[int]:
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return strides


def _check_kind(name: str, tensor: torch.Tensor) -> None:
    if kind := unsupported_kind(tensor):
        raise BatchError(f"argument {name!r} is {kind}")


def unsupported_kind(tensor: torch.Tensor) -> str | None:
    """What a tensor is that no buffer can hold, and what to pass instead; None if one can."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        kind = "quantized" if tensor.is_quantized else kind
        return (
            f"a {kind} tensor, which has no rows at fixed addresses; pass a dense one (to_dense(), "
            "to_padded_tensor(), dequantize())"
        )
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return (
            f"a {type(tensor).__name__}, whose own methods a graph would not call; pass a plain "
            "tensor (as_subclass(torch.Tensor), or the tensors inside it)"
        )
    return None


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def fingerprint(tensor: torch.Tensor) -> int:
    """A number that differs for most tensors with other contents. Synchronises."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().flatten()
    return int(flat.view(_WORDS[tensor.itemsize]).sum())


def span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """The memory range of a tensor: its storage, first byte, and end (exclusive)."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    return storage_id(tensor), start, start + spanned_bytes(tensor)


def overlap(a: tuple[int, int, int], b: tuple[int, int, int]) -> bool:
    """Whether two spans share memory."""
    return a[0] == b[0] and a[1] < b[2] and b[1] < a[2]


def spanned_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((extent - 1) * step for extent, step in steps)
    return (last + 1) * tensor.itemsize


def storage_id(tensor: torch.Tensor) -> int:
    """A number for the memory behind a tensor; tensors that share memory share it."""
    if tensor.layout is not _STRIDED or tensor.is_nested:
        return id(tensor)
    return storage_number(tensor.untyped_storage())
