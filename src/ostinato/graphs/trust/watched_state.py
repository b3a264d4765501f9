"""Watches the state that a callable reads besides its arguments, and detects replacements.

A graph reads weights at their addresses at capture and keeps the Python numbers of that moment.
``WatchedState`` finds what a callable refers to (``state_walk``) and checks on every call whether
any of it was replaced. Changes made in place need no check: graphs see them as eager code does.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ostinato.compat import compare_addresses, storage_number
from ostinato.errors import ReplayMismatchError
from ostinato.graphs.capture.signature import same_value
from ostinato.graphs.tree import tensors_in
from ostinato.graphs.trust.state_views import Length
from ostinato.graphs.trust.state_walk import SCALARS, Slot, StateWalk, is_tensor

# Checked in rotation, a few per call: tensor shapes, which may change at the same address, and, in
# detail, everything else: strides, types, attributes and hooks of torch's own modules.
_SHAPES_PER_CALL = 12
_CLOSELY_PER_CALL = 2
# Modules whose forward is the same in training and evaluation mode.
_NEVER_MIND_TRAINING = (
    *(nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.Identity),
    *(nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Conv1d, nn.Conv2d),
    *(nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid),
)

_address_of = torch.Tensor.data_ptr
_training = operator.itemgetter("training")
_chain = itertools.chain.from_iterable


class Replaced(NamedTuple):
    slot: Slot
    was: Any
    now: Any


class WatchedState:
    """A snapshot of everything a callable was found to refer to.

    Keeps all tensor memory alive, so that a new tensor cannot take the address of a replaced one.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        arguments: Mapping[str, Any] | None = None,
        ignored: frozenset[str] = frozenset(),
        in_breaks: bool = True,
    ) -> None:
        """``arguments``: arguments that refer to further state, by name. ``ignored``: names that
        are not watched.

        Without ``in_breaks``, state of eager breaks is left out: they run on every replay.
        """
        self._function, self._ignored, self._in_breaks = function, ignored, in_breaks
        self._arguments = arguments or {}
        walk = StateWalk(function, self._arguments, in_breaks=in_breaks)
        self._slots = [slot for slot in walk.slots if slot.name not in ignored]
        self._values = [slot.read() for slot in self._slots]
        pairs = list(zip(self._slots, self._values, strict=True))
        self._pinned = {id(slot): _Pinned(value) for slot, value in pairs if is_tensor(value)}
        # Checked on every call: module tables, other names, and container lengths.
        self._tables = walk.tables
        # Whole tables are compared, which is fast. That would compare one-element tensors by
        # value, so those are checked as names instead.
        in_tables = set(map(id, self._tables))
        often = [
            slot
            for slot, value in pairs
            if slot.often
            and (id(slot.container) not in in_tables or (is_tensor(value) and value.numel() == 1))
        ]
        self._names = _Group([slot for slot in often if not isinstance(slot.container, Length)])
        self._containers = [s.container.container for s in often if isinstance(s.container, Length)]
        self._modules = [(name, m.__dict__) for name, m in walk.modules if _minds_training(m)]
        self._module_dicts = [values for _, values in self._modules]
        self._training = [*map(_training, self._module_dicts)]
        tensors = [value for _, value in pairs if is_tensor(value)]
        self._tensors = list({id(tensor): tensor for tensor in tensors}.values())
        self._addresses = [*map(_address_of, self._tensors)]
        self._positions = list(range(len(self._tensors)))
        self._shapes = [tensor.shape for tensor in self._tensors]
        self._turn = -1
        self._replaced = False  # at the last check
        self._plain: _Plain | None = None
        self._remember()

    def _remember(self) -> None:
        """Snapshot what is checked on every call."""
        self._table_copies = [dict(table) for table in self._tables]
        self._name_ids = [*map(id, self._names.read())]
        self._lengths = [*map(len, self._containers)]

    # --- on every call -------------------------------------------------------------------------

    def check(self) -> None:
        """Raise ``ReplayMismatchError`` if anything was replaced."""
        try:
            stays = (
                not self._replaced
                and self._tables == self._table_copies
                and [*map(id, self._names.read())] == self._name_ids
                and [*map(len, self._containers)] == self._lengths
                and [*map(_training, self._module_dicts)] == self._training
                and _are_at(self._tensors, self._addresses, self._positions)
                and self._a_few_stay()
            )
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError):
            stays = False  # something was removed
        if not stays:
            # What is looked at in rotation must not be forgotten until its next turn.
            self._replaced = True
            self.raise_if_replaced()
            self._replaced = False
            self._remember()  # new objects with equal values

    def _a_few_stay(self) -> bool:
        self._turn += 1
        some = _turn(self._turn, _SHAPES_PER_CALL, len(self._tensors))
        if [tensor.shape for tensor in self._tensors[some]] != self._shapes[some]:
            return False
        few = _turn(self._turn, _CLOSELY_PER_CALL, len(self._slots))
        return all(map(self._stays, self._slots[few], self._values[few]))

    def _stays(self, slot: Slot, was: Any) -> bool:
        now = _read(slot)
        if is_tensor(was):
            return isinstance(now, torch.Tensor) and self._pinned[id(slot)].is_memory_of(now)
        return now is was or _same_value(now, was)

    def plain_changes(self) -> list[str]:
        """Names of the plain values that a run of the callable changed.

        The callable sets them itself, for example to the number of rows, so they do not make its
        graphs stale.
        """
        if self._plain is None:
            self._plain = _Plain(self._slots, self._values)
        changed = [slot.name for slot, was in self._plain.others() if not self._stays(slot, was)]
        return [*changed, *(item.slot.name for item in self._switched())]

    def without(self, names: Iterable[str]) -> WatchedState:
        """A new watch on the same callable that ignores these names."""
        return WatchedState(
            self._function,
            arguments=self._arguments,
            ignored=self._ignored.union(names),
            in_breaks=self._in_breaks,
        )

    # --- by name -------------------------------------------------------------------------------

    def replaced(self) -> list[Replaced]:
        """Everything that now refers to another object."""
        found = [
            Replaced(slot, was, _read(slot))
            for slot, was in zip(self._slots, self._values, strict=True)
            if not self._stays(slot, was)
        ]
        return [*found, *self._switched()]

    def _switched(self) -> Iterator[Replaced]:
        """Modules that were switched between training and evaluation."""
        if [*map(_training, self._module_dicts)] != self._training:
            for (name, module), was in zip(self._modules, self._training, strict=True):
                if module["training"] != was:
                    slot = Slot(f"attribute '{name}training'", module, "training")
                    yield Replaced(slot, was, not was)

    def raise_if_replaced(self) -> None:
        for slot, was, now in self.replaced():
            if is_tensor(was):
                place = self._pinned[id(slot)].describe()
                raise ReplayMismatchError(
                    f"{slot.name} moved: the graphs read it at {place}, but it is now {show(now)}; "
                    "write new values in place (copy_, load_state_dict without assign), or call "
                    "clear_graphs() to capture again"
                )
            if _is_plain(was):
                raise ReplayMismatchError(
                    f"{slot.name} is {show(now)}, but the graphs were captured with "
                    f"{show(was)} and keep that value; set it back, or call clear_graphs() "
                    "to capture again"
                )
            raise ReplayMismatchError(
                f"{slot.name} is a different {type(was).__name__} than at capture, and the graphs "
                "still use the old one; set it back, or call clear_graphs() to capture again"
            )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor, as it was found, by name."""
        for slot, value in zip(self._slots, self._values, strict=True):
            if is_tensor(value):
                yield slot.name, value

    def tensors_now(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What a new walk from the callable finds, by name."""
        walk = StateWalk(self._function, self._arguments, in_breaks=self._in_breaks)
        for slot in walk.slots:
            if is_tensor(value := slot.read()):
                yield slot.name, value

    def name_of(self, storage: int) -> str | None:
        """The name of the memory with this ``storage_id``, if known."""
        for slot in self._slots:
            pinned = self._pinned.get(id(slot))
            if pinned is not None and pinned.storage_id == storage:
                return slot.name
        return None

    @property
    def storages(self) -> frozenset[int]:
        """The ``storage_id`` of every tensor."""
        return frozenset(pinned.storage_id for pinned in self._pinned.values())


class _Group:
    """Slots read together, with one call per container."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._getters: list[tuple[Callable[[Any], tuple[Any, ...]], Any]] = []
        for _, together in itertools.groupby(slots, key=lambda slot: id(slot.container)):
            members = list(together)
            keys = [slot.key for slot in members]
            # An itemgetter of a single key returns no tuple.
            get = operator.itemgetter(*keys) if len(keys) > 1 else operator.itemgetter(*keys * 2)
            self._getters.append((get, members[0].container))

    def read(self) -> list[Any]:
        return [*_chain([get(container) for get, container in self._getters])]


class _Plain:
    """The slots with plain values, to find those that changed: every eager call looks twice."""

    def __init__(self, slots: Sequence[Slot], values: Sequence[Any]) -> None:
        pairs = zip(slots, values, strict=True)
        self._pairs = [(slot, was) for slot, was in pairs if _is_plain(was)]
        self._containers = [slot.container for slot, _ in self._pairs]
        self._keys = [slot.key for slot, _ in self._pairs]
        self._ids = [id(was) for _, was in self._pairs]

    def others(self) -> list[tuple[Slot, Any]]:
        """Slots that may have other values, and what they had."""
        try:
            now = map(operator.getitem, self._containers, self._keys)
            same = [*map(id, now)] == self._ids
        except (KeyError, IndexError, TypeError, ValueError):
            same = False  # something was removed
        return [] if same else self._pairs


class _Pinned:
    """A tensor's memory, kept alive, with its original shape, strides and type."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = tensor.untyped_storage()
        self.storage_id = storage_number(self._storage)
        self._address = tensor.data_ptr()
        self._looks = (tensor.shape, tensor.stride(), tensor.dtype)

    def is_memory_of(self, tensor: torch.Tensor) -> bool:
        looks = (tensor.shape, tensor.stride(), tensor.dtype)
        return looks == self._looks and tensor.data_ptr() == self._address

    def describe(self) -> str:
        shape, _, dtype = self._looks
        return f"{self._address:#x} ({tuple(shape)}, {dtype})"


def _turn(number: int, size: int, length: int) -> slice:
    """The slice of a list to check this time, going through it ``size`` items at a time."""
    first = number % max(1, -(-length // size)) * size
    return slice(first, first + size)


def _minds_training(module: nn.Module) -> bool:
    # A compiled module has no switch; it shows the inner module's.
    return type(module) not in _NEVER_MIND_TRAINING and "training" in module.__dict__


def _is_plain(value: Any) -> bool:
    """Whether the value compares by equality: numbers, text, tuples of them, enums, ..."""
    if isinstance(value, SCALARS):
        return True
    if isinstance(value, (list, dict, nn.Module)) or callable(value):
        return False
    hashed: Any = type(value).__hash__
    by_value = hashed is not None and hashed is not object.__hash__
    return by_value and next(tensors_in(value), None) is None


def _same_value(now: Any, was: Any) -> bool:
    return _is_plain(was) and same_value(now, was)


def _are_at(tensors: list[torch.Tensor], addresses: list[int], positions: list[int]) -> bool:
    if not compare_addresses:
        return [*map(_address_of, tensors)] == addresses
    return bool(compare_addresses(tensors, addresses, positions))


def _read(slot: Slot) -> Any:
    try:
        return slot.read()
    except (KeyError, IndexError, ValueError):
        return _GONE


class _Gone:
    def __repr__(self) -> str:
        return "gone"


_GONE = _Gone()


def show(value: Any) -> str:
    """A value, or a tensor's address, for messages."""
    if isinstance(value, torch.Tensor):
        return f"at {value.data_ptr():#x} ({tuple(value.shape)}, {value.dtype})"
    text = repr(value)
    return text if len(text) < 80 else f"a {type(value).__name__}"
