"""CPU recording: every dispatched operator of one run, with outputs in the arena.

Operators run for real while they are recorded. Each writes its outputs into arena memory that stays
reserved as long as Python holds them. For replay, the recorder keeps a flat list of calls on
tensors at those fixed addresses. A view is only an address, so it needs no call; an operator with a
verified out-variant writes in place; any other runs again and its result is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

from ostinato.compat import OpOverload, has_internal_overlap, is_zerotensor, storage_number
from ostinato.errors import CaptureError, ReplayMismatchError
from ostinato.graphs.backends.alias import alias_of
from ostinato.graphs.backends.ambient import others_captured_meanwhile
from ostinato.graphs.backends.base import is_unobserved
from ostinato.graphs.backends.cpu.arena import Arena
from ostinato.graphs.backends.cpu.bindings import Call, out_calls
from ostinato.graphs.backends.cpu.host_reads import host_reads_allowed
from ostinato.graphs.backends.cpu.out_variants import OutVariant, out_variant_of
from ostinato.graphs.backends.guard import (
    CaptureGuard,
    KnownOperators,
    has_own_dispatch,
    source_of_caller,
)
from ostinato.graphs.backends.operator_log import OperatorLog
from ostinato.graphs.backends.python_kernels import replay_step
from ostinato.graphs.tree import map_tensors, tensors_in

aten = torch.ops.aten

Step = Callable[[], object]

# These allocate without computing, so a replay has nothing to do for them.
_UNINITIALISED = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_strided.default,
        aten.empty_permuted.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)
_COPIES = frozenset({aten.clone.default, aten._to_copy.default})
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Verified(NamedTuple):
    """An out-variant, the call that gave the right bits, and the metadata of its outputs."""

    variant: OutVariant
    call: Call
    outputs: list[tuple[torch.Size, tuple[int, ...], torch.dtype]]
    one_tensor: bool


class Recorder(CaptureGuard):
    """Collects the steps of one recording. The steps reserve no arena memory.

    ``verified`` and ``known`` keep what earlier recordings found out: a model's layers repeat the
    same calls, and checking an out-variant costs more than the call.
    """

    def __init__(
        self,
        arena: Arena,
        generators: Sequence[torch.Generator],
        verified: dict[Hashable, Verified],
        known: KnownOperators,
    ) -> None:
        super().__init__("cpu", generators, known)
        self.steps: list[Step] = []
        self.operators = OperatorLog(
            "cpu", complete=True, in_pool=arena.contains, count_nodes=self.steps.__len__
        )
        self._random_states = [(each, each.get_state()) for each in generators]
        self._arena = arena
        self._verified = verified
        self._pinned: dict[Hashable, torch.Tensor] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Generated C++ calls no operators; a compiled callable is only recorded if it runs eagerly.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and has_own_dispatch(types):
            return NotImplemented
        if self.is_composite(func):
            self._check_dense(func, tensors_in((args, kwargs)), "was given")
            return self.decomposed(func, args, kwargs)
        self.check(func, args, kwargs)
        first_node = len(self.steps)
        if func.namespace == "aten":
            result = self._record(func, args, kwargs)
        else:
            with host_reads_allowed():  # the body of a custom operator runs again on every replay
                result = self._record(func, args, kwargs)
        # A scalar from the host is copied: the graph does not refer to where it was.
        given = () if func is aten.lift_fresh.default else (args, kwargs)
        self.operators.note(func, given, first_node)
        if self.observer is not None and not is_unobserved():
            self.observer.saw(func, args, kwargs, result, len(self.steps))
        return result

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func``, record the step that repeats it, and return its results in the arena."""
        autocast = self.autocast_in_body(func)
        call = _call_key(func, args, kwargs) if autocast is None else None
        if call is not None and call in self._verified:
            return self._repeat(self._verified[call], args, kwargs)
        given = list(tensors_in((args, kwargs)))
        self._check_dense(func, given, "was given")
        with nullcontext() if autocast is None else torch.autocast("cpu", autocast):
            result = self._run(func, args, kwargs)
        if func is aten.lift_fresh.default:
            return self._constant(result)
        borrowed = {_storage_id(tensor) for tensor in given}
        outputs = list(tensors_in(result))
        self._check_dense(func, outputs, "made")
        fresh = [i for i, tensor in enumerate(outputs) if _storage_id(tensor) not in borrowed]
        if outputs and not fresh and not func._schema.is_mutable:
            return result  # a view: nothing to replay
        placed = {i: self._place(outputs[i]) for i in fresh}
        if func not in _UNINITIALISED:
            replay_args, replay_kwargs = map_tensors(self._fixed, (args, kwargs))
            targets = {i: self._fixed(tensor) for i, tensor in placed.items()}
            recorded = (func, replay_args, replay_kwargs, outputs, targets)
            step = self._in_place_step(*recorded) if autocast is None else None
            if step is not None:
                self.steps.append(step)
                if call is not None and len(placed) == len(outputs):
                    self._remember(call, func, step.func, placed, isinstance(result, torch.Tensor))
            elif autocast is None:
                self.steps.append(self._step(*recorded))
            else:
                self.steps.append(partial(_run_under_autocast, autocast, self._step(*recorded)))
        static = iter([placed.get(i, tensor) for i, tensor in enumerate(outputs)])
        return map_tensors(lambda _: next(static), result)

    def _repeat(self, known: Verified, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call that matches a verified one: it runs once, into its final memory."""
        placed = [self._arena.strong(*looks) for looks in known.outputs]
        step = _out_call(
            known.call,
            known.variant,
            map_tensors(self._fixed, args),
            map_tensors(self._fixed, kwargs),
            [self._fixed(tensor) for tensor in placed],
        )
        step()
        self.steps.append(step)
        return placed[0] if known.one_tensor else tuple(placed)

    def _remember(
        self,
        key: Hashable,
        func: OpOverload,
        call: Call,
        placed: dict[int, torch.Tensor],
        one: bool,
    ) -> None:
        if not all(tensor.numel() for tensor in placed.values()):
            return
        variant = out_variant_of(func)
        assert variant is not None, "the call was just made through it"
        looks = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in placed.values()]
        self._verified[key] = Verified(variant, call, looks, one)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Custom operators may draw without declaring it.
        if func.namespace == "aten" and torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        self.check_random_state()
        result = func(*args, **kwargs)
        self._random_states = [(each, each.get_state()) for each, _ in self._random_states]
        return result

    def check_random_state(self) -> None:
        """Raise if anything but recorded operators touched a generator."""
        same = all(torch.equal(each.get_state(), state) for each, state in self._random_states)
        if not same and not others_captured_meanwhile():
            source = source_of_caller()
            raise CaptureError(
                "a random generator was seeded or its state set during a capture, which a replay "
                f"would not repeat, before {source or 'an unknown line'}; seed before the capture, "
                "and let no other thread draw from that generator meanwhile",
                source=source,
            )

    def _constant(self, scalar: torch.Tensor) -> torch.Tensor:
        """A scalar from the host, stored in the graph and set again by every replay."""
        placed = self._arena.strong_like(scalar).copy_(scalar)
        self.steps.append(partial(aten.copy_.default, self._fixed(placed), scalar.clone()))
        return placed

    def _check_dense(self, func: Any, tensors: Iterable[torch.Tensor], verb: str) -> None:
        for tensor in tensors:
            kind = _unsupported_kind(tensor)
            if kind is not None:
                source = source_of_caller()
                raise CaptureError(
                    f"{func} {verb} a {kind} tensor on {tensor.device} at {source}; the CPU "
                    "backend captures dense tensors on the CPU",
                    operator=str(func),
                    source=source,
                )

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == 0:
            return tensor
        if has_internal_overlap(tensor):
            tensor = tensor.contiguous()  # elements that share memory cannot be written separately
        return self._arena.strong_like(tensor)

    def _step(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: list[torch.Tensor],
        targets: dict[int, torch.Tensor],
    ) -> Step:
        """The call that repeats ``func``, writing output ``i`` into ``targets[i]``.

        On return the targets hold the outputs' values, as if the step had just run.
        """
        for index, target in targets.items():
            target.copy_(outputs[index])
        if func in _COPIES:
            return partial(aten.copy_.default, targets[0], args[0])
        if targets:
            return partial(_run_and_copy, partial(func, *args, **kwargs), targets)
        return replay_step(func, args, kwargs)

    def _in_place_step(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: list[torch.Tensor],
        targets: dict[int, torch.Tensor],
    ) -> partial[object] | None:
        """The out-variant's call, if one exists and gives exactly the same bits."""
        # A second draw would advance the generator, so random operators run again and are copied.
        if func in _COPIES or torch.Tag.nondeterministic_seeded in func.tags:
            return None
        variant = out_variant_of(func)
        if variant is None or len(targets) != len(variant.output_names):
            return None
        for call in out_calls(variant.operator):
            step = _out_call(call, variant, args, kwargs, targets.values())
            if _is_exact(step, outputs, targets):
                return step
        return None

    def _fixed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as the replay refers to it, without reserving arena memory.

        For a tensor outside the arena, that is its current memory. The caller's object may be
        pointed at other memory (``parameter.data = ...``) at any time, one tensor at a time, and a
        replay would then mix old and new ones.
        """
        if tensor.numel() == 0:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        if self._arena.owns(tensor):
            return self._arena.weak(tensor)
        storage = tensor.untyped_storage()
        offset = int(tensor.storage_offset())
        looks = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        key = (storage_number(storage), offset, *looks)
        if key not in self._pinned:  # the alias keeps the storage alive, so its number stays unique
            self._pinned[key] = alias_of(tensor, storage, offset)
        return self._pinned[key]


def _is_exact(step: Step, outputs: list[torch.Tensor], targets: dict[int, torch.Tensor]) -> bool:
    """Run ``step``; return whether it writes exactly the ``outputs`` into their ``targets``."""
    for index, target in targets.items():
        # Start from inverted bits, so that a byte left unwritten is detected.
        torch.bitwise_not(_bits(outputs[index]), out=_bits(target))
    try:
        step()
    except (RuntimeError, TypeError, Warning):
        return False
    return all(torch.equal(_bits(outputs[i]), _bits(target)) for i, target in targets.items())


def _out_call(
    call: Call,
    variant: OutVariant,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    targets: Iterable[torch.Tensor],
) -> partial[object]:
    kept = {name: value for name, value in kwargs.items() if name not in variant.dropped}
    named = dict(zip(variant.output_names, targets, strict=True))
    return partial(call, *args, **kept, **named)


def _call_key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
    """Everything but data that determines a call's kernel; None for calls that are not cached."""
    try:
        named = [(name, _value_key(value)) for name, value in kwargs.items()]
        # torch.ones(3) uses the default dtype.
        return (func, torch.get_default_dtype(), *map(_value_key, args), *named)
    except TypeError:
        return None


def _value_key(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_nested:
            raise TypeError
        # Zero-dim tensors may be wrapped Python numbers, with their own type promotion rules.
        if not value.shape or value.is_conj() or value.is_neg():
            raise TypeError
        return (value.dtype, value.shape, value.stride())
    if isinstance(value, (list, tuple)):
        return tuple(map(_value_key, value))
    return (type(value), value)  # 1, 1.0 and True compare equal but are different arguments


def _run_and_copy(run: partial[Any], targets: dict[int, torch.Tensor]) -> None:
    outputs = list(tensors_in(run()))
    for index, target in targets.items():
        output = outputs[index]
        # copy_ would broadcast and cast.
        if output.shape != target.shape or output.dtype != target.dtype:
            was, now = (f"{tuple(t.shape)} {t.dtype}" for t in (target, output))
            raise ReplayMismatchError(
                f"operator {run.func} returned {was} at capture and {now} on replay; only tensor "
                "contents may change in what a captured operator returns, so capture piecewise "
                "and call it in a function marked with @eager_break"
            )
        target.copy_(output)


def _run_under_autocast(dtype: torch.dtype, step: Step) -> None:
    with torch.autocast("cpu", dtype):
        step()


def _unsupported_kind(tensor: torch.Tensor) -> str | None:
    """Why a tensor is not plain memory at an address; None if it is."""
    if tensor.layout is not torch.strided:
        return str(tensor.layout)
    if tensor.device.type != "cpu":
        return "strided"
    if tensor.is_nested:
        return "nested"
    if is_zerotensor(tensor):  # made by torch.func.jvp; they have no memory
        return "zero"
    return "quantized" if tensor.is_quantized else None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as integers, so that NaN equals itself and -0.0 differs from 0.0."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGER_OF_SIZE[tensor.itemsize])


def _storage_id(tensor: torch.Tensor) -> int:
    return storage_number(tensor.untyped_storage())
