"""Collectives as operators: one call that a recording sees and repeats as one node.

torch's own collectives return work objects to wait for, which a recording cannot hold. These wait
themselves: on the CPU (gloo) until the data has arrived, on CUDA (NCCL) by ordering the current
stream after the communication, so they can be part of a CUDA graph. Operators take plain values, so
a process group is identified by a number from ``register``.
"""

from __future__ import annotations

import itertools

import torch.distributed as dist
from torch import Tensor

from ostinato.errors import ClosedError
from ostinato.ops.define import define

# Newer torch has the same function under another name, and the old name warns on every call.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _Registered:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.num_calls = 0


_groups: dict[int, _Registered] = {}
_numbers = itertools.count()


def register(group: dist.ProcessGroup) -> int:
    """A number for ``group``, valid until ``release``."""
    number = next(_numbers)
    _groups[number] = _Registered(group)
    return number


def num_calls(number: int) -> int:
    """How many collectives of a group this rank has begun. CUDA graphs count once, at capture."""
    registered = _groups.get(number)
    return 0 if registered is None else registered.num_calls


def release(number: int) -> None:
    """Forget the group; graphs that contain its collectives raise from now on."""
    _groups.pop(number, None)


def _group(number: int) -> dist.ProcessGroup:
    registered = _groups.get(number)
    if registered is None:
        raise ClosedError("a collective was called on a group of ranks that was closed")
    registered.num_calls += 1
    return registered.group


def all_reduce(tensor: Tensor, group: int) -> None:
    """Sum ``tensor``, which is contiguous, over the group, in place."""
    _all_reduce(tensor, group)


def all_gather(out: Tensor, tensor: Tensor, group: int) -> None:
    """Fill ``out`` with all members' ``tensor``, in torch's order; both contiguous and flat."""
    _all_gather(out, tensor, group)


def all_to_all(out: Tensor, tensor: Tensor, group: int) -> None:
    """Send part i of ``tensor`` to torch's i-th member; flat tensors, parts of equal size."""
    _all_to_all(out, tensor, group)


def _run_all_reduce(tensor: Tensor, group: int) -> None:
    dist.all_reduce(tensor, group=_group(group))


def _run_all_gather(out: Tensor, tensor: Tensor, group: int) -> None:
    _gather(out, tensor, group=_group(group))


def _run_all_to_all(out: Tensor, tensor: Tensor, group: int) -> None:
    dist.all_to_all_single(out, tensor, group=_group(group))


_all_reduce, _all_gather, _all_to_all = (
    define(schema, cpu=body, cuda=body)
    for schema, body in (
        ("all_reduce(Tensor(a!) tensor, int group) -> ()", _run_all_reduce),
        ("all_gather(Tensor(a!) out, Tensor tensor, int group) -> ()", _run_all_gather),
        ("all_to_all(Tensor(a!) out, Tensor tensor, int group) -> ()", _run_all_to_all),
    )
)
