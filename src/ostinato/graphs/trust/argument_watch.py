"""Checks that a call leaves its arguments as they are, apart from what it writes into tensors.

A replay runs no Python: it adds nothing to a dict, removes nothing from a list, and reshapes no
tensor in place (``unsqueeze_``, ``x.data = ...``), as the call would for its caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ostinato.errors import CaptureError
from ostinato.graphs.capture.buffers import storage_id
from ostinato.graphs.capture.signature import same_value
from ostinato.graphs.tree import leaves_with_path


class _Looks(NamedTuple):
    storage: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class ArgumentWatch:
    """Made before a call, with its arguments by name; ``check`` compares them after it."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = arguments
        self._leaves = dict(self._walk())
        tensors = (leaf for leaf in self._leaves.values() if isinstance(leaf, torch.Tensor))
        # As they were, to put back: their memory with its shape and type.
        self._before = [(tensor, _looks(tensor), tensor.detach()) for tensor in tensors]

    def _walk(self) -> list[tuple[str, Any]]:
        pairs = self._arguments.items()
        return [leaf for name, value in pairs for leaf in leaves_with_path(value, name)]

    def put_back(self) -> None:
        """Undo what the call did to the shapes of tensors."""
        for tensor, looks, before in self._before:
            if _looks(tensor) != looks:
                tensor.data = before

    def check(self) -> None:
        """Raise ``CaptureError`` with the name of an argument that is not what it was."""
        now = dict(self._walk())
        for path, was in self._leaves.items():
            if path not in now:
                raise _changed(path, "is removed")
            if not _same(now[path], was):
                raise _changed(path, "is replaced")
        for path in now:
            if path not in self._leaves:
                raise _changed(path, "is added")
        paths = {id(leaf): path for path, leaf in self._leaves.items()}
        for tensor, looks, _ in self._before:
            if _looks(tensor) != looks:
                raise _changed(paths[id(tensor)], "gets another shape or other memory in place")


def _looks(tensor: torch.Tensor) -> _Looks:
    strides = tensor.stride() if tensor.layout is torch.strided and not tensor.is_nested else ()
    offset = int(tensor.storage_offset()) if strides else 0
    shape = torch.Size() if tensor.is_nested else tensor.shape
    return _Looks(storage_id(tensor), offset, shape, strides, tensor.dtype)


def _same(now: Any, was: Any) -> bool:
    if isinstance(now, torch.Tensor) or isinstance(was, torch.Tensor):
        return now is was
    return same_value(now, was)


def _changed(path: str, what: str) -> CaptureError:
    return CaptureError(
        f"argument {path!r} {what} inside the call, which a replay would not do for its caller; "
        "change a copy (dict(batch), x.unsqueeze(0), ...) and leave the argument as it is"
    )
