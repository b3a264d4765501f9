"""Static input buffers: every batch is copied to fixed addresses and padded."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ostinato.compat import storage_number
from ostinato.errors import BatchError, ConfigError


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
                f"{name!r} has {example.dim()} dimensions, so it has no batch dimension {batch_dim}"
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
        with torch.inference_mode(False):
            self._memory = torch.full(
                (max_rows * row_elements,), padding, dtype=example.dtype, device=example.device
            )
        self.storage_id = storage_id(self._memory)
        self._views: dict[int, torch.Tensor] = {}

    def view(self, size: int) -> torch.Tensor:
        """The view of the buffer for graphs of ``size`` rows; the same object every time."""
        if size not in self._views:
            shape = self._shape.copy()
            shape[self.batch_dim] = size
            stride = _dense_strides(shape, self._order)
            with torch.inference_mode(False):
                self._views[size] = self._memory.as_strided(shape, stride)
        return self._views[size]

    def rows_of(self, value: torch.Tensor) -> int:
        """The number of rows in ``value``, after checking that it fits this buffer."""
        shape = value.shape
        if value.dtype is not self._dtype:
            raise self._does_not_fit(f"dtype {value.dtype}", self._dtype)
        if value.device != self._device:
            raise self._does_not_fit(f"device {value.device}", self._device)
        if len(shape) != len(self._shape):
            raise self._does_not_fit(f"rank {len(shape)}", len(self._shape))
        for dim, extent in enumerate(shape):
            if dim != self.batch_dim and extent != self._shape[dim]:
                raise self._does_not_fit(f"size {extent} in dimension {dim}", self._shape[dim])
        return shape[self.batch_dim]

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


def spanned_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((extent - 1) * step for extent, step in steps)
    return (last + 1) * tensor.itemsize


def storage_id(tensor: torch.Tensor) -> int:
    """A number for the memory behind a tensor; tensors that share memory share it."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return id(tensor)
    return storage_number(tensor.untyped_storage())
