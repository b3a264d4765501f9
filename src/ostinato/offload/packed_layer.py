"""The weights of a layer as one block of bytes, so that one large copy moves all of them.

Small copies do not reach the bandwidth of the bus.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

_ALIGNMENT = 256  # as torch aligns CUDA memory, for kernels that read vectors


class _Place(NamedTuple):
    """A parameter of ``module``, and its first byte in the block."""

    module: nn.Module
    name: str
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int


class PackedLayer:
    """The order of a layer's weights in a block. Shapes, strides and dtypes stay as they are."""

    def __init__(self, layer: nn.Module) -> None:
        self._places: list[_Place] = []
        end = 0
        for module in layer.modules():
            for name, weight in module.named_parameters(recurse=False):
                assert weight.nbytes == weight.untyped_storage().nbytes(), "nothing shares it"
                looks = (weight.shape, weight.stride(), weight.dtype, weight.nbytes)
                self._places.append(_Place(module, name, end, *looks))
                end += -(-weight.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = end

    def bind(self, block: torch.Tensor) -> None:
        """Make the layer's parameters views of ``block`` [num_bytes], on any device.

        Their values are what is there.
        """
        for place in self._places:
            mine = block[place.offset : place.offset + place.num_bytes].view(place.dtype)
            view = mine.as_strided(place.shape, place.stride)
            setattr(place.module, place.name, nn.Parameter(view, requires_grad=False))

    @contextmanager
    def bound_to(self, block: torch.Tensor) -> Iterator[None]:
        """``bind``, until the end of the block; then the same parameters as before are back."""
        before = [getattr(place.module, place.name) for place in self._places]
        try:
            self.bind(block)
            yield
        finally:
            for place, parameter in zip(self._places, before, strict=True):
                setattr(place.module, place.name, parameter)
