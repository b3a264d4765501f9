"""Host reads that dispatch no operator: tolist(), numpy(), printing, pickling, DLPack, cpu().

A dispatch mode does not see them. A function mode would, but code can see a function mode:
``torch.overrides.has_torch_function`` becomes true, and nn.MultiheadAttention takes another path.
So the functions themselves are replaced, once, when the first CPU recording begins. They stay
replaced: taking them off again after every capture would make Python forget what it has cached
about ``torch.Tensor``, and from 3.13 on it stops caching for a class that changes too often.
Outside of recordings a replaced function costs one look at a thread-local, and other threads are
not refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, update_wrapper
from types import MethodType
from typing import Any

import torch
import torch.utils.dlpack

from ostinato.compat import replaceable
from ostinato.graphs.backends.guard import HOST_COPY, HOST_READ, forbidden

_Refuses = Callable[..., bool]


class _ThisThread(threading.local):
    refusing = False


_this_thread = _ThisThread()


@contextmanager
def host_reads_refused() -> Iterator[None]:
    """In this thread, raise ``CaptureError`` where a tensor is read without an operator."""
    _watch()
    outer, _this_thread.refusing = _this_thread.refusing, True
    try:
        yield
    finally:
        _this_thread.refusing = outer


@contextmanager
def host_reads_allowed() -> Iterator[None]:
    """The opposite, for code that every replay runs again: the body of a custom operator."""
    outer, _this_thread.refusing = _this_thread.refusing, False
    try:
        yield
    finally:
        _this_thread.refusing = outer


class _Watched:
    """Stands in for a function or method of torch and raises in threads that record.

    torch hands its methods to ``__torch_function__``, and tables of handlers are often built when a
    module is imported. So the stand-in is equal to what it replaces, and found under it.
    """

    def __init__(self, original: Any, name: str, problem: str, refuses: _Refuses) -> None:
        update_wrapper(self, original)
        self._original = original
        self._name = name
        self._problem = problem
        self._refuses = refuses

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _this_thread.refusing and self._refuses(*args, **kwargs):
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
    """tensor_split: the places to split at are in a tensor, whose memory torch reads as it is."""
    sections = kwargs.get("tensor_indices_or_sections", args[1] if len(args) > 1 else None)
    return isinstance(sections, torch.Tensor)


def _packed(*args: Any, **kwargs: Any) -> bool:
    """A recurrent layer on a PackedSequence: torch loops over the batch sizes in a tensor."""
    return len(args) > 2 and isinstance(args[1], torch.Tensor) and args[1].dtype == torch.int64


# What is replaced where, what to call it, why, and for which arguments. The private ones:
# - torch._tensor_str._str prints every tensor. It switches dispatch modes off, so what it reads is
#   seen by none. Tensor.__repr__ itself looks itself up in torch.Tensor and is left alone.
# - torch._C._to_dlpack[_versioned] do the work of Tensor.__dlpack__ (versioned from torch 2.9 on).
# - Tensor._reduce_ex_internal does that of Tensor.__reduce_ex__: pickle, torch.save, copy.copy.
# - torch._VF is where nn.LSTM and its like find their functions.
# - _op is what an operator of torch.ops calls; those that are made of others are not dispatched.
# A name that torch does not have is left out: its readers would have to use another one of these.
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
            setattr(owner, attribute, _Watched(original, name, problem, refuses))
