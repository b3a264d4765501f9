"""Host reads that dispatch no operator: tolist(), numpy(), printing, pickling, DLPack, cpu().

And ``x[indices] = 0``, whose number arrives at the operator as a tensor like any other. A dispatch
mode does not see them. A function mode would, but code can detect a function mode:
``torch.overrides.has_torch_function`` becomes true, and nn.MultiheadAttention takes another path.
So the functions themselves are replaced when the first CPU recording begins, and stay replaced:
restoring them after every capture would invalidate Python's method caches of ``torch.Tensor``, and
since 3.13 Python stops caching for a class that changes too often. Outside recordings a replaced
function costs one thread-local lookup. Other threads are not affected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, update_wrapper
from types import MethodType
from typing import Any

import torch
import torch.utils.dlpack

from ostinato.compat import keep_scriptable, replaceable
from ostinato.graphs.backends.guard import HOST_COPY, HOST_NUMBER, HOST_READ, forbidden
from ostinato.graphs.thread_state import thread_variable

_Refuses = Callable[..., bool]


_refusing: ContextVar[bool] = thread_variable("refusing_host_reads", False)


@contextmanager
def host_reads_refused() -> Iterator[None]:
    """In this thread, raise ``CaptureError`` when a tensor is read without an operator."""
    _watch()
    outer = _refusing.set(True)
    try:
        yield
    finally:
        _refusing.reset(outer)


@contextmanager
def host_reads_allowed() -> Iterator[None]:
    """The opposite, for code that every replay runs again, such as a custom operator's body."""
    outer = _refusing.set(False)
    try:
        yield
    finally:
        _refusing.reset(outer)


class _Watched:
    """Replaces a torch function or method, and raises in threads that are recording.

    torch passes its methods to ``__torch_function__``, and libraries often build handler tables at
    import. So the replacement compares and hashes equal to the original.
    """

    def __init__(self, original: Any, name: str, problem: str, refuses: _Refuses) -> None:
        update_wrapper(self, original)
        self._original = original
        self._name = name
        self._problem = problem
        self._refuses = refuses

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _refusing.get() and self._refuses(*args, **kwargs):
            raise forbidden(self._name, self._problem)
        return self._original(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __eq__(self, other: object) -> bool:
        return other is self or other == self._original

    def __hash__(self) -> int:
        return hash(self._original)

    def __repr__(self) -> str:
        return repr(self._original)


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


def _by_tensor(*args: Any, **kwargs: Any) -> bool:
    """tensor_split with the split points in a tensor, whose memory torch reads directly."""
    sections = kwargs.get("tensor_indices_or_sections", args[1] if len(args) > 1 else None)
    return isinstance(sections, torch.Tensor)


def _packed(*args: Any, **kwargs: Any) -> bool:
    """A recurrent layer on a PackedSequence: torch loops over the batch sizes in a tensor."""
    return len(args) > 2 and isinstance(args[1], torch.Tensor) and args[1].dtype == torch.int64


def _number_at_indices(tensor: Any, index: Any, value: Any) -> bool:
    """A Python number assigned by a tensor of indices, which CUDA copies; one at a mask, it fills.

    A list of indices is refused as host data, an index without dimensions as a host read.
    """
    each = index if isinstance(index, tuple) else (index,)
    return isinstance(value, int | float | complex) and any(
        isinstance(part, torch.Tensor) and part.dim() and part.dtype not in _MASKS for part in each
    )


_MASKS = (torch.bool, torch.uint8)

# Where each function lives, its name in errors, the problem, and the arguments it applies to.
# The private ones:
# - torch._tensor_str._str prints every tensor. It disables dispatch modes, so none sees its reads.
#   Tensor.__repr__ looks itself up in torch.Tensor and is left alone.
# - torch._C._to_dlpack[_versioned] implement Tensor.__dlpack__ (versioned since torch 2.9).
# - Tensor._reduce_ex_internal implements Tensor.__reduce_ex__: pickle, torch.save, copy.copy.
# - torch._VF holds the functions of nn.LSTM and similar layers.
# - _op is what an operator of torch.ops calls; composite operators are not dispatched.
# A name missing from this torch is skipped: its callers then go through one of the others.
_ops = torch.ops.aten
_C, _VF = replaceable("torch._C"), replaceable("torch._VF")
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_READERS: list[tuple[Any, str, str, str, _Refuses]] = [
    (torch.Tensor, "tolist", "Tensor.tolist", HOST_READ, _always),
    (torch.Tensor, "numpy", "Tensor.numpy", HOST_READ, _always),
    (torch.Tensor, "cpu", "Tensor.cpu", HOST_COPY, _always),
    (torch.Tensor, "_reduce_ex_internal", "Tensor.__reduce_ex__", HOST_READ, _always),
    (torch.Tensor, "tensor_split", "Tensor.tensor_split", HOST_READ, _by_tensor),
    (torch, "tensor_split", "torch.tensor_split", HOST_READ, _by_tensor),
    (torch.Tensor, "__setitem__", "Tensor.__setitem__", HOST_NUMBER, _number_at_indices),
    (replaceable("torch._tensor_str"), "_str", "Tensor.__repr__", HOST_READ, _always),
    (_C, "_to_dlpack", "Tensor.__dlpack__", HOST_READ, _always),
    (_C, "_to_dlpack_versioned", "Tensor.__dlpack__", HOST_READ, _always),
    (torch.utils.dlpack, "to_dlpack", "torch.utils.dlpack.to_dlpack", HOST_READ, _always),
    (torch, "to_dlpack", "torch.to_dlpack", HOST_READ, _always),
    (torch.UntypedStorage, "__getitem__", "UntypedStorage.__getitem__", HOST_READ, _always),
    (torch.UntypedStorage, "tolist", "UntypedStorage.tolist", HOST_READ, _always),
    (torch.UntypedStorage, "__reduce__", "UntypedStorage.__reduce__", HOST_READ, _always),
    (_VF, "_pad_packed_sequence", "torch._pad_packed_sequence", HOST_READ, _always),
    *((_VF, name, f"torch.{name} of a PackedSequence", HOST_READ, _packed) for name in _RECURRENT),
    (_ops.tensor_split, "_op", "aten.tensor_split", HOST_READ, _by_tensor),
    (_ops.tensor_split.tensor_indices_or_sections, "_op", "aten.tensor_split", HOST_READ, _always),
    (_ops._pad_packed_sequence, "_op", "aten._pad_packed_sequence", HOST_READ, _always),
    (_ops._pad_packed_sequence.default, "_op", "aten._pad_packed_sequence", HOST_READ, _always),
    *((getattr(_ops, name), "_op", f"aten.{name}", HOST_READ, _packed) for name in _RECURRENT),
    *((getattr(_ops, name).data, "_op", f"aten.{name}", HOST_READ, _always) for name in _RECURRENT),
]


@cache
def _watch() -> None:
    for owner, attribute, name, problem, refuses in _READERS:
        if hasattr(owner, attribute):
            original = getattr(owner, attribute)
            watched = _Watched(original, name, problem, refuses)
            setattr(owner, attribute, watched)
            keep_scriptable(original, watched)
