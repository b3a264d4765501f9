"""What a run of a callable does besides returning: which memory it writes, whether it draws.

To find out what a graph will do, a callable has to be run, more often than its caller asked for.
``EffectsProbe`` watches such a run and keeps what was in memory before it was written, and the
state of random number generators before it drew from them, so that all of it can be put back as if
the run had not happened.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch

from ostinato.compat import OpOverload, TorchDispatchMode, storage_number
from ostinato.errors import CaptureError
from ostinato.graphs.capture.tree import tensors_in

_CASTS = frozenset({torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default})

# Operators by name, without the underscore of in-place ones. What adds up rows of integers:
_SUMS = frozenset(
    (
        *("sum", "nansum", "cumsum", "prod", "cumprod", "bincount", "histc", "dot", "mv", "mm"),
        *("bmm", "addmm", "addmv", "index_add", "scatter_add", "scatter_reduce", "index_reduce"),
        *("index_put", "_index_put_impl", "put"),
    )
)
_ARITHMETIC = frozenset(
    (
        *("add", "sub", "rsub", "mul", "addcmul", "pow"),
        *("bitwise_or", "bitwise_xor", "bitwise_left_shift"),
    )
)
_INDEXING = frozenset(
    (
        *("index", "index_select", "index_add", "index_copy", "index_fill", "index_put", "take"),
        *("_index_put_impl", "index_reduce", "gather", "scatter", "scatter_add", "put"),
        *("scatter_reduce", "embedding", "_embedding_bag", "_embedding_bag_forward_only"),
        *("nll_loss_forward", "nll_loss2d_forward", "_unsafe_index", "_unsafe_index_put"),
    )
)
# What asserts, on CUDA, that its numbers are probabilities or the like.
_OF_PROBABILITIES = frozenset(
    ("bernoulli", "multinomial", "binomial", "poisson", "normal", "binary_cross_entropy")
)


class Contents(NamedTuple):
    """Of written storages, by ``storage_id``, and the states of random number generators."""

    memory: dict[int, torch.Tensor]
    generators: dict[torch.Generator, torch.Tensor]


class EffectsProbe(TorchDispatchMode):
    """Runs operators unchanged; remembers contents of memory from outside before it is written.

    Operators say what they write. A kernel that is launched past torch's dispatcher does not, and
    what it writes is not seen. Enter it around one run or several; ``restore`` puts everything back
    to what it was when first written, or first drawn from. Holds a copy of each written storage
    until it is dropped.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sees_floats = False
        self._needs_probabilities = False
        self._casts_to_integers = False
        self._computes_integers = False
        self._indexes = False
        self._created: set[int] = set()
        # By storage: all of it, in place, and a copy of what was there before.
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.draws_random_numbers = False
        self._generators: dict[torch.Generator, torch.Tensor] = {}  # and their states before

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would otherwise import all of torch._dynamo, two seconds of it, on the first call.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, OpOverload):
            for tensor in _written(func, args, kwargs):
                self._keep(tensor)
            if torch.Tag.nondeterministic_seeded in func.tags:
                self.draws_random_numbers = True
                self.keep_state_of(_generator(args, kwargs))
            if func in _CASTS:
                target = args[0] if func is torch.ops.aten.copy_.default else kwargs.get("dtype")
                source = args[-1] if func is torch.ops.aten.copy_.default else args[0]
                if _is_integer(target) and not _is_integer(source):
                    self._casts_to_integers = True
            integers = [tensor for tensor in tensors_in(args) if _is_integer(tensor)]
            name = func._schema.name.removeprefix("aten::").rstrip("_")
            self._needs_probabilities |= name in _OF_PROBABILITIES
            # What a custom operator does with integers is not known.
            indexes = name in _INDEXING or func.namespace != "aten"
            self._indexes |= indexes and bool(integers)
            together = [tensor for tensor in integers if tensor.dim() > 0]
            self._computes_integers |= name in _SUMS and bool(together)
            self._computes_integers |= name in _ARITHMETIC and len(together) > 1
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

    def keep_state_of(self, generator: torch.Generator) -> None:
        """Have ``restore`` put it back, whether or not a run draws from it."""
        if generator not in self._generators:
            self._generators[generator] = generator.get_state()

    @property
    def takes_any_number(self) -> bool:
        """Whether numbers that no caller passed are harmless: made into an index, or taken for a
        probability, one would end a CUDA process."""
        return not (self._needs_probabilities or (self._casts_to_integers and self._indexes))

    @property
    def may_index_anywhere(self) -> bool:
        """Whether indices may be computed of several rows, and rows that no caller passed together
        could lead to one out of range."""
        return self._indexes and self._computes_integers

    @property
    def written(self) -> frozenset[int]:
        """Storages from outside that were written."""
        return frozenset(self._before)

    def absorb(self, later: EffectsProbe) -> None:
        """Know what a probe of a later run kept, where this one did not."""
        for storage, kept in later._before.items():
            if storage not in self._created:
                self._before.setdefault(storage, kept)
        for generator, state in later._generators.items():
            self._generators.setdefault(generator, state)
        self.draws_random_numbers |= later.draws_random_numbers
        self._created |= later._created

    @property
    def created(self) -> frozenset[int]:
        """Storages that came into being while it watched; some may be gone."""
        return frozenset(self._created)

    def contents(self) -> Contents:
        """What is in the written storages now, and the generators' states."""
        return Contents(
            {storage: memory.clone() for storage, (memory, _) in self._before.items()},
            {generator: generator.get_state() for generator in self._generators},
        )

    def in_place(self, storage: int) -> torch.Tensor:
        """A written storage itself."""
        return self._before[storage][0]

    def restore(self) -> None:
        """Put back what was there before."""
        before = {storage: before for storage, (_, before) in self._before.items()}
        self.write(Contents(before, self._generators))

    def write(self, contents: Contents) -> None:
        """Put in place what ``contents()`` gave."""
        with torch.inference_mode(False), torch.no_grad():
            for storage, memory in contents.memory.items():
                self.in_place(storage).copy_(memory)
        for generator, state in contents.generators.items():
            generator.set_state(state)


class SeedingProbe(TorchDispatchMode):
    """Raises if a generator changes but by an operator: if it is seeded, or its state is set.

    A replay runs no Python and would do neither. Moves the generators on when it is entered: if a
    callable seeds a generator that was just seeded so, nothing is there to be seen.
    """

    supports_higher_order_operators = True

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators = tuple(generators)
        self._states: list[torch.Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as above

    def __enter__(self) -> SeedingProbe:
        for generator in self._generators:
            torch.rand((), generator=generator, device=generator.device)
        self._look()
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        if kind is None:
            self._check()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._check()
        result = func(*args, **(kwargs or {}))
        self._look()  # custom operators may draw without saying so
        return result

    def _look(self) -> None:
        self._states = [generator.get_state() for generator in self._generators]

    def _check(self) -> None:
        for generator, state in zip(self._generators, self._states, strict=True):
            if not torch.equal(generator.get_state(), state):
                raise CaptureError(
                    f"a random generator of {generator.device} is seeded, or its state set, inside "
                    "the call, which a replay would not repeat; seed it between calls"
                )


class FixedDraws(TorchDispatchMode):
    """Runs operators that draw random numbers, and replaces what they drew by one fixed number.

    So runs of other numbers of rows can be compared, which draw other numbers for a row.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as above

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(func, OpOverload):
            if func is torch.ops.aten.native_dropout.default:
                result[0].copy_(args[0])
                result[1].fill_(True)
            elif torch.Tag.nondeterministic_seeded in func.tags:
                for tensor in tensors_in(result):
                    tensor.fill_(0.5 if tensor.is_floating_point() else 0)
        return result


def _is_integer(thing: Any) -> bool:
    """Of a tensor, or a dtype; None stands for the same as before."""
    dtype = thing.dtype if isinstance(thing, torch.Tensor) else thing
    return dtype is not None and not (dtype.is_floating_point or dtype.is_complex)


def _generator(args: Any, kwargs: dict[str, Any]) -> torch.Generator:
    """What an operator that draws random numbers draws them from."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Generator):
            return value
    first = next(tensors_in(args), None)
    device = kwargs.get("device") or (first.device if first is not None else torch.device("cpu"))
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def storage_id(tensor: torch.Tensor) -> int:
    """A number for the memory behind a tensor; tensors that share memory have the same."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return id(tensor)
    return storage_number(tensor.untyped_storage())


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's storage, in elements of its type where they fill it."""
    storage = tensor.untyped_storage()
    whole = storage.nbytes() % tensor.itemsize == 0
    dtype = tensor.dtype if whole else torch.uint8
    count = storage.nbytes() // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(storage, 0, (count,), (1,))


def _written(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[torch.Tensor]:
    for index, name in _written_arguments(func):
        value = args[index] if index < len(args) else kwargs.get(name)
        yield from tensors_in(value)


@cache
def _written_arguments(func: OpOverload) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an operator writes to."""
    # Batch norm in training mode updates its statistics without saying so.
    unsaid = {"running_mean", "running_var"} if "batch_norm" in func.name() else set()
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or argument.name in unsaid
    )
