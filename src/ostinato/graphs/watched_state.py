"""The state that a callable reads beside its arguments, and whether it is still where it was.

A graph reads weights at the addresses they had at capture, and holds the numbers that Python code
had then. ``WatchedState`` finds what a callable refers to (parameters, buffers and attributes of
modules, closures, globals, objects it is bound to) and tells on every call whether any of it was
replaced since. What is changed in place is seen by a graph as by eager code, and is no concern.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ostinato.errors import ReplayMismatchError
from ostinato.graphs.segments import is_eager_break

# Compared by value. All else that is not a tensor is looked into, or left alone.
_SCALARS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
# What nn.Module keeps about itself.
_MODULE_INTERNALS = frozenset(nn.Module().__dict__)
# Libraries whose functions and objects are not looked into.
_LIBRARIES = ("torch", "numpy", "transformers", "builtins", "ostinato.")
_MOST_SLOTS = 100_000
_DEEPEST = 6
# Shapes of so many tensors are compared per call, in turns: one that is replaced by a part of it
# stays at its address.
_SHAPES_PER_CALL = 8
# Modules whose forward is the same in training and in evaluation.
_NEVER_MIND_TRAINING = (
    nn.Linear,
    nn.Embedding,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.Identity,
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Conv1d,
    nn.Conv2d,
)

_address_of = torch.Tensor.data_ptr
_training = operator.itemgetter("training")
_chain = itertools.chain.from_iterable


class _Slot(NamedTuple):
    """One name that refers to a tensor or a plain value."""

    name: str
    container: Any
    key: Any

    def read(self) -> Any:
        return self.container[self.key]

    def write(self, value: Any) -> None:
        self.container[self.key] = value


class _Cell(MutableMapping[str, Any]):
    """A closure's variable, in the form of a container."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def __getitem__(self, key: str) -> Any:
        return self._cell.cell_contents

    def __setitem__(self, key: str, value: Any) -> None:
        self._cell.cell_contents = value

    def __delitem__(self, key: str) -> None:
        del self._cell.cell_contents

    def __iter__(self) -> Iterator[str]:
        return iter(("contents",))

    def __len__(self) -> int:
        return 1


class _Length(Mapping[str, int]):
    """How many items a container has, in the form of a container."""

    def __init__(self, container: Any) -> None:
        self._container = container

    def __getitem__(self, key: str) -> int:
        return len(self._container)

    def __setitem__(self, key: str, length: int) -> None:
        """What was put in does not go by itself: see who keeps what a run made."""

    def __iter__(self) -> Iterator[str]:
        return iter(("length",))

    def __len__(self) -> int:
        return 1


class WatchedState:
    """Everything a callable was found to refer to, as it was when this was made.

    Keeps the memory of all tensors alive, so that another one cannot come to stand at the address
    of one that was replaced.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        ignored: frozenset[str] = frozenset(),
        in_breaks: bool = True,
    ) -> None:
        """``ignored``: names of plain values that are not watched.

        Without ``in_breaks``, not what eager breaks refer to: they run on every replay.
        """
        self._function, self._ignored, self._in_breaks = function, ignored, in_breaks
        walk = _Walk(function, in_breaks=in_breaks)
        self._slots = [slot for slot in walk.slots() if slot.name not in ignored]
        self._values = [slot.read() for slot in self._slots]
        pairs = list(zip(self._slots, self._values, strict=True))
        tensors = [(slot, value) for slot, value in pairs if _is_tensor(value)]
        self._pinned = {id(slot): _Pinned(value) for slot, value in tensors}
        # Modules have tables of what they hold, which are compared as a whole.
        tables = {id(table): table for table in walk.tables if table}
        self._tables = list(tables.values())
        self._table_copies = [dict(table) for table in self._tables]
        in_tables = [value for slot, value in tensors if id(slot.container) in tables]
        apart = [(slot, value) for slot, value in pairs if id(slot.container) not in tables]
        self._others = _Group([slot for slot, value in apart if not _is_tensor(value)])
        self._other_values = self._others.read_by_container()
        self._apart = _Group([slot for slot, value in apart if _is_tensor(value)])
        # Comparing two tensors of one element compares their values, not which tensors they are.
        single = [s for s, v in tensors if id(s.container) in tables and v.numel() == 1]
        self._single = _Group(single)
        self._single_ids = [*map(id, self._single.read())]
        self._in_tables = in_tables
        now = [*in_tables, *self._apart.read()]
        self._addresses = [*map(_address_of, now)]
        self._positions = list(range(len(now)))
        self._shapes = [tensor.shape for tensor in now]
        self._modules = [(name, m.__dict__) for name, m in walk.modules if _minds_training(m)]
        self._module_dicts = [values for _, values in self._modules]
        self._training = [*map(_training, self._module_dicts)]
        self._turn = 0

    # --- on every call -------------------------------------------------------------------------

    def check(self) -> None:
        """Raise ``ReplayMismatchError`` if anything was replaced since."""
        try:
            stays = (
                self._tables == self._table_copies
                and [*map(id, self._single.read())] == self._single_ids
                and self._others.read_by_container() == self._other_values
                and [*map(_training, self._module_dicts)] == self._training
                and self._tensors_stay()
            )
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError):
            stays = False  # something is gone, or cannot be compared with what it was
        if not stays:
            self.raise_if_replaced()

    def _tensors_stay(self) -> bool:
        now = [*self._in_tables, *self._apart.read()]
        if not _are_at(now, self._addresses, self._positions):
            return False
        first = self._turn if self._turn < len(now) else 0
        self._turn = first + _SHAPES_PER_CALL
        looked_at = slice(first, self._turn)
        return [tensor.shape for tensor in now[looked_at]] == self._shapes[looked_at]

    def after_a_run(self) -> WatchedState:
        """What to watch after a run of the callable: without the plain values that it changed.

        It sets those itself, to the number of rows, say, so they say nothing about its graphs.
        """
        changed = {item.slot.name for item in self.replaced() if isinstance(item.was, _SCALARS)}
        if not changed:
            return self
        return WatchedState(
            self._function, ignored=self._ignored | changed, in_breaks=self._in_breaks
        )

    # --- by name -------------------------------------------------------------------------------

    def replaced(self) -> list[Replaced]:
        """What refers to something else now."""
        found = []
        for slot, was in zip(self._slots, self._values, strict=True):
            now = _read(slot)
            if _is_tensor(was):
                stays = isinstance(now, torch.Tensor) and self._pinned[id(slot)].is_memory_of(now)
            else:
                equal = isinstance(was, _SCALARS) and type(now) is type(was) and now == was
                stays = now is was or equal
            if not stays:
                found.append(Replaced(slot, was, now))
        for (name, module), was in zip(self._modules, self._training, strict=True):
            if module["training"] != was:
                slot = _Slot(f"attribute '{name}training'", module, "training")
                found.append(Replaced(slot, was, not was))
        return found

    def raise_if_replaced(self) -> None:
        for slot, was, now in self.replaced():
            if isinstance(was, _SCALARS):
                raise ReplayMismatchError(
                    f"{slot.name} is {show(now)}, but the graphs were captured when it was "
                    f"{show(was)}, which they hold for good; set it back, or call clear_graphs() "
                    "to capture again"
                )
            if not _is_tensor(was):
                raise ReplayMismatchError(
                    f"{slot.name} is another {type(was).__name__} than at capture, and the graphs "
                    "still use the first; set it back, or call clear_graphs() to capture again"
                )
            place = self._pinned[id(slot)].describe()
            raise ReplayMismatchError(
                f"{slot.name} moved: the graphs read it at {place}, it is now "
                f"{show(now)}; write new values in place (copy_, load_state_dict without assign), "
                "or call clear_graphs() to capture again"
            )

    def name_of(self, storage: int) -> str | None:
        """A name of the memory with this number (``effects.storage_id``)."""
        for slot in self._slots:
            pinned = self._pinned.get(id(slot))
            if pinned is not None and pinned.storage_id == storage:
                return slot.name
        return None


class Replaced(NamedTuple):
    slot: _Slot
    was: Any
    now: Any


class _Group:
    """Slots that are read together, with one call for all those of one container."""

    def __init__(self, slots: Sequence[_Slot]) -> None:
        self._getters: list[tuple[Callable[[Any], tuple[Any, ...]], Any]] = []
        for _, together in itertools.groupby(slots, key=lambda slot: id(slot.container)):
            members = list(together)
            keys = [slot.key for slot in members]
            # An itemgetter of one key gives no tuple.
            get = operator.itemgetter(*keys) if len(keys) > 1 else operator.itemgetter(*keys * 2)
            self._getters.append((get, members[0].container))

    def read_by_container(self) -> list[tuple[Any, ...]]:
        return [get(container) for get, container in self._getters]

    def read(self) -> list[Any]:
        return [*_chain(self.read_by_container())]


class _Pinned:
    """The memory of a tensor as it was, kept alive, and how the tensor looked."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = tensor.untyped_storage()
        self.storage_id = int(self._storage._cdata)
        self._address = tensor.data_ptr()
        self._looks = (tensor.shape, tensor.stride(), tensor.dtype)

    def looks_like(self, tensor: torch.Tensor) -> bool:
        return (tensor.shape, tensor.stride(), tensor.dtype) == self._looks

    def is_memory_of(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() == self._address and self.looks_like(tensor)

    def describe(self) -> str:
        shape, _, dtype = self._looks
        return f"{self._address:#x} ({tuple(shape)}, {dtype})"


class _Walk:
    """Finds what a callable refers to, each thing once."""

    def __init__(self, function: Callable[..., Any], *, in_breaks: bool) -> None:
        self._in_breaks = in_breaks
        self.modules: list[tuple[str, nn.Module]] = []  # with the prefix of what they hold
        self.tables: list[dict[str, Any]] = []
        self._function = function
        self._seen: set[int] = set()

    def slots(self) -> list[_Slot]:
        return list(itertools.islice(self._enter(self._function, "", 0), _MOST_SLOTS))

    def _slot(self, name: str, container: Any, key: Any, path: str, depth: int) -> Iterator[_Slot]:
        """A slot, and what the value in it refers to. ``path``: how that is called, in code."""
        value = container[key]
        if isinstance(value, _SCALARS) or _is_tensor(value):
            yield _Slot(name, container, key)
        elif self._is_looked_into(value):
            if isinstance(value, (nn.Module, types.FunctionType)):
                yield _Slot(name, container, key)  # compared by identity
            yield from self._enter(value, path, depth + 1)

    @staticmethod
    def _is_looked_into(value: Any) -> bool:
        if isinstance(value, (type, types.ModuleType, torch.Tensor)):
            return False
        if isinstance(value, (nn.Module, functools.partial)) or type(value) in (dict, list, tuple):
            return True
        return hasattr(value, "__dict__") and not _of_library(value)

    def _enter(self, value: Any, path: str, depth: int) -> Iterator[_Slot]:
        if depth > _DEEPEST or id(value) in self._seen:
            return
        if not self._in_breaks and is_eager_break(value):
            return
        self._seen.add(id(value))
        if isinstance(value, nn.Module):
            yield from self._module(value, f"{path}." if path else "", depth)
        elif isinstance(value, types.FunctionType):
            yield from self._code(value, depth)
        elif hasattr(value, "__self__") and hasattr(value, "__func__"):  # a bound method
            yield from self._enter(value.__self__, path or "self", depth)
            yield from self._enter(value.__func__, path, depth)
        elif isinstance(value, functools.partial):
            yield from self._enter(value.func, path, depth)
            yield from self._items(value.args, f"{path or 'partial'}.args", depth)
            yield from self._items(value.keywords, f"{path or 'partial'}.keywords", depth)
        elif type(value) in (dict, list, tuple):
            yield from self._items(value, path, depth)
        elif self._is_looked_into(value):
            yield from self._attributes(value.__dict__, f"{path}." if path else "", depth)
            if callable(value) and isinstance(value.__call__, types.MethodType):
                yield from self._enter(value.__call__.__func__, path, depth + 1)

    def _module(self, module: nn.Module, prefix: str, depth: int) -> Iterator[_Slot]:
        self.modules.append((prefix, module))
        self.tables += [module._parameters, module._buffers, module._modules]
        for kind, entries in (("parameter", module._parameters), ("buffer", module._buffers)):
            for key in entries:
                yield _Slot(f"{kind} '{prefix}{key}'", entries, key)
        if not type(module).__module__.startswith("torch.nn"):
            mine = [key for key in module.__dict__ if key not in _MODULE_INTERNALS]
            yield from self._attributes(module.__dict__, prefix, depth, mine)
            forward = getattr(type(module), "forward", None)
            if isinstance(forward, types.FunctionType):
                yield from self._enter(forward, "", depth + 1)
        children = module._modules
        yield from (_Slot(f"module '{prefix}{key}'", children, key) for key in children)
        for key, child in children.items():
            if child is not None and id(child) not in self._seen:
                self._seen.add(id(child))
                yield from self._module(child, f"{prefix}{key}.", depth)

    def _attributes(
        self, values: dict[str, Any], prefix: str, depth: int, keys: Sequence[str] | None = None
    ) -> Iterator[_Slot]:
        for key in list(values) if keys is None else keys:
            path = f"{prefix}{key}"
            yield from self._slot(f"attribute {path!r}", values, key, path, depth)

    def _items(self, container: Any, path: str, depth: int) -> Iterator[_Slot]:
        keys = list(container) if isinstance(container, dict) else range(len(container))
        for key in keys:
            name = f"{path}[{key!r}]"
            yield from self._slot(name, container, key, name, depth)
        if not isinstance(container, tuple):
            yield _Slot(f"the number of items in {path}", _Length(container), "length")

    def _code(self, function: types.FunctionType, depth: int) -> Iterator[_Slot]:
        """A function's closure, and the globals that its code names."""
        if _of_library(function):
            return
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            variable = f"variable {name!r} of {function.__qualname__}"
            with contextlib.suppress(ValueError):  # not set yet
                yield from self._slot(variable, _Cell(cell), "contents", name, depth)
        for name in _global_names(code):
            if name in function.__globals__:
                yield from self._slot(f"global {name!r}", function.__globals__, name, name, depth)


def _global_names(code: types.CodeType) -> list[str]:
    """Names that a function's code, and that of functions inside it, may look up globally."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(_global_names(constant)))
    return list(names)


def _of_library(thing: Any) -> bool:
    if not isinstance(thing, types.FunctionType):
        thing = type(thing)
    return (thing.__module__ or "").startswith(_LIBRARIES)


def _minds_training(module: nn.Module) -> bool:
    return type(module) not in _NEVER_MIND_TRAINING


def _is_tensor(value: Any) -> bool:
    """Whether it is a tensor at an address."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.is_nested
        and value.device.type != "meta"
    )


# Private, in CUDA builds of torch 2.1 to 2.13: compares addresses of many tensors in one call.
# Where it is missing, each is asked for its own.
_compare_addresses: Any = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


def _are_at(tensors: list[torch.Tensor], addresses: list[int], positions: list[int]) -> bool:
    if _compare_addresses is None:
        return [*map(_address_of, tensors)] == addresses
    return bool(_compare_addresses(tensors, addresses, positions))


def _read(slot: _Slot) -> Any:
    try:
        return slot.read()
    except (KeyError, IndexError, ValueError):
        return "gone"


def show(value: Any) -> str:
    """A value, or where a tensor is, for messages."""
    if isinstance(value, torch.Tensor):
        return f"at {value.data_ptr():#x} ({tuple(value.shape)}, {value.dtype})"
    return repr(value)
