"""What a run of a callable does besides returning: which memory it writes, whether it draws.

To find out what a graph will do, a callable has to be run, more often than its caller asked for.
``EffectsProbe`` watches such a run and keeps what was in memory before it was written, so that all
of it can be put back as if the run had not happened.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ostinato.graphs.tree import tensors_in

_CASTS = frozenset({torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default})


class EffectsProbe(TorchDispatchMode):
    """Runs operators unchanged; remembers contents of memory from outside before it is written.

    Operators say what they write. A kernel that is launched past torch's dispatcher does not, and
    what it writes is not seen. Enter it around one run or several; ``restore`` puts everything back
    to what it was when first written. Holds a copy of each written storage until it is dropped.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws_random_numbers = False
        self.sees_floats = False
        # Made into an index, a number that no caller passed would end a CUDA process.
        self.rounds_floats_to_integers = False
        self._created: set[int] = set()
        # By storage: all of it, in place, and a copy of what was there before.
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would otherwise import all of torch._dynamo, two seconds of it, on the first call.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload):
            for tensor in _written(func, args, kwargs):
                self._keep(tensor)
            if torch.Tag.nondeterministic_seeded in func.tags:
                self.draws_random_numbers = True
            if func in _CASTS:
                target = args[0] if func is torch.ops.aten.copy_.default else kwargs.get("dtype")
                source = args[-1] if func is torch.ops.aten.copy_.default else args[0]
                self.rounds_floats_to_integers |= _is_integer(target) and not _is_integer(source)
        result = func(*args, **kwargs)
        given = {storage_id(tensor) for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            self.sees_floats |= tensor.is_floating_point() or tensor.is_complex()
            if (storage := storage_id(tensor)) not in given:
                self._created.add(storage)
        return result

    def _keep(self, tensor: torch.Tensor) -> None:
        storage = storage_id(tensor)
        if storage in self._created or storage in self._before or tensor.numel() == 0:
            return
        with torch.inference_mode(False), torch.no_grad():
            everything = _whole(tensor)
            self._before[storage] = (everything, everything.clone())

    @property
    def written(self) -> frozenset[int]:
        """Storages from outside that were written."""
        return frozenset(self._before)

    def absorb(self, later: EffectsProbe) -> None:
        """Know what a probe of a later run kept, where this one did not."""
        for storage, kept in later._before.items():
            if storage not in self._created:
                self._before.setdefault(storage, kept)
        self._created |= later._created

    @property
    def created(self) -> frozenset[int]:
        """Storages that came into being while it watched; some may be gone."""
        return frozenset(self._created)

    def contents(self) -> dict[int, torch.Tensor]:
        """Copies of what is in the written storages now."""
        return {storage: memory.clone() for storage, (memory, _) in self._before.items()}

    def in_place(self, storage: int) -> torch.Tensor:
        """A written storage itself."""
        return self._before[storage][0]

    def restore(self) -> None:
        """Put back what was there before."""
        self.write(storage_contents=None)

    def write(self, storage_contents: dict[int, torch.Tensor] | None) -> None:
        """Put ``storage_contents``, as ``contents`` gave them, in place; None: those before."""
        with torch.inference_mode(False), torch.no_grad():
            for storage, (memory, before) in self._before.items():
                memory.copy_(before if storage_contents is None else storage_contents[storage])


def _is_integer(thing: Any) -> bool:
    """Of a tensor, or a dtype; None stands for the same as before."""
    dtype = thing.dtype if isinstance(thing, torch.Tensor) else thing
    return dtype is not None and not (dtype.is_floating_point or dtype.is_complex)


def storage_id(tensor: torch.Tensor) -> int:
    """A number for the memory behind a tensor; tensors that share memory have the same."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's storage, in elements of its type where they fill it."""
    storage = tensor.untyped_storage()
    whole = storage.nbytes() % tensor.itemsize == 0
    dtype = tensor.dtype if whole else torch.uint8
    count = storage.nbytes() // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(storage, 0, (count,), (1,))


def _written(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[torch.Tensor]:
    for index, name in _written_arguments(func):
        value = args[index] if index < len(args) else kwargs.get(name)
        yield from tensors_in(value)


@cache
def _written_arguments(func: torch._ops.OpOverload) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an operator writes to."""
    # Batch norm in training mode updates its statistics without saying so.
    unsaid = {"running_mean", "running_var"} if "batch_norm" in func.name() else set()
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or argument.name in unsaid
    )
