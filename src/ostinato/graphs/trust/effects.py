"""Tracks the side effects of a call: the memory it writes and the random numbers it draws.

To learn what a graph will do, ``graphed()`` runs the callable more often than its caller asked for.
``EffectsProbe`` watches such a run. It saves memory before it is written and generator states
before they advance, so that the run can be undone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch

from ostinato import compat
from ostinato.compat import OpOverload, TorchDispatchMode
from ostinato.errors import CaptureError
from ostinato.graphs.backends.ambient import others_captured_meanwhile
from ostinato.graphs.capture.buffers import storage_id
from ostinato.graphs.tree import tensors_in

_CASTS = frozenset({torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default})
# Positions among boundaries, which callables may use as indices.
_TO_POSITIONS = frozenset(("bucketize", "searchsorted"))
_LIFT_FRESH = torch.ops.aten.lift_fresh.default
# Declared as a write, but only autograd's view of the tensor changes. ``torch.tensor`` runs it.
_WRITES_NO_MEMORY = frozenset({torch.ops.aten.detach_.default})

# Operator names, without the trailing underscore of in-place variants. These combine integer rows:
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
# On CUDA these assert that their inputs are in range, such as probabilities.
_OF_PROBABILITIES = frozenset(
    ("bernoulli", "multinomial", "binomial", "poisson", "normal", "binary_cross_entropy")
)


class Contents(NamedTuple):
    """Contents of written storages, by ``storage_id``, and generator states."""

    memory: dict[int, torch.Tensor]
    generators: dict[torch.Generator, torch.Tensor]


class EffectsProbe(TorchDispatchMode):
    """Runs operators unchanged, and saves memory from outside before an operator writes it.

    Operator schemas say what is written. A kernel launched outside torch's dispatcher has no
    schema, so its writes are not seen. Enter the probe around one or more runs; ``restore`` returns
    all memory and generators to their state before the first write or draw. Holds a copy of each
    written storage until it is dropped.
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
        # By storage: the whole storage in place, and a copy of its contents before the write.
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.draws_random_numbers = False
        self._generators: dict[torch.Generator, torch.Tensor] = {}  # with their earlier states

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch imports torch._dynamo on the first call, which takes two seconds.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        draw = _Draw.of(func, args, kwargs)
        if isinstance(func, OpOverload):
            for tensor in written_tensors(func, args, kwargs):
                self._keep(tensor)
            if draw is not None:
                self.keep_state_of(draw.generator)
            if func in _CASTS:
                target = args[0] if func is torch.ops.aten.copy_.default else kwargs.get("dtype")
                source = args[-1] if func is torch.ops.aten.copy_.default else args[0]
                if _is_integer(target) and not _is_integer(source):
                    self._casts_to_integers = True
            integers = [tensor for tensor in tensors_in(args) if _is_integer(tensor)]
            name = func._schema.name.removeprefix("aten::").rstrip("_")
            self._needs_probabilities |= name in _OF_PROBABILITIES
            self._casts_to_integers |= name in _TO_POSITIONS
            # A custom operator may do anything with integers.
            indexes = name in _INDEXING or func.namespace != "aten"
            self._indexes |= indexes and bool(integers)
            together = [tensor for tensor in integers if tensor.dim() > 0]
            self._computes_integers |= name in _SUMS and bool(together)
            self._computes_integers |= name in _ARITHMETIC and len(together) > 1
        result = func(*args, **kwargs)
        self.draws_random_numbers |= draw is not None and draw.happened
        # What torch.tensor copied from a Python value is new; from_numpy's memory is the array's.
        fresh = func is _LIFT_FRESH and args[0].untyped_storage().resizable()
        given = {storage_id(tensor) for tensor in tensors_in((args, kwargs)) if not fresh}
        for tensor in tensors_in(result):
            self.sees_floats |= tensor.is_floating_point() or tensor.is_complex()
            if (storage := storage_id(tensor)) not in given:
                self._created.add(storage)
        return result

    def _keep(self, tensor: torch.Tensor) -> None:
        storage = storage_id(tensor)
        if storage in self._created or storage in self._before or tensor.numel() == 0:
            return
        with compat.inference_mode(False), torch.no_grad():
            everything = _whole(tensor)
            self._before[storage] = (everything, everything.clone())

    def keep_state_of(self, generator: torch.Generator) -> None:
        """Make ``restore`` reset this generator, whether or not a run draws from it."""
        if generator not in self._generators:
            self._generators[generator] = generator.get_state()

    @property
    def takes_any_number(self) -> bool:
        """Whether the callable is safe to run on made-up numbers. Used as an index or as a
        probability, one could crash a CUDA process."""
        return not (self._needs_probabilities or (self._casts_to_integers and self._indexes))

    @property
    def may_index_anywhere(self) -> bool:
        """Whether indices may depend on several rows, so that a new combination of rows could
        produce one that is out of range."""
        return self._indexes and self._computes_integers

    @property
    def written(self) -> dict[int, torch.Tensor]:
        """Storages from outside the run that it wrote, in place.

        Keep the tensors with their numbers: the number of a freed storage is given out again.
        """
        return {storage: memory for storage, (memory, _) in self._before.items()}

    def absorb(self, later: EffectsProbe) -> None:
        """Take over what a later run's probe saved, unless this probe saved it already."""
        for storage, kept in later._before.items():
            if storage not in self._created:
                self._before.setdefault(storage, kept)
        for generator, state in later._generators.items():
            self._generators.setdefault(generator, state)
        self.draws_random_numbers |= later.draws_random_numbers
        self._created |= later._created

    @property
    def created(self) -> frozenset[int]:
        """Storages allocated during the run; some may have been freed since."""
        return frozenset(self._created)

    def contents(self) -> Contents:
        """The current contents of the written storages, and the generator states."""
        return Contents(
            {storage: memory.clone() for storage, (memory, _) in self._before.items()},
            {generator: generator.get_state() for generator in self._generators},
        )

    def in_place(self, storage: int) -> torch.Tensor:
        """A written storage, not a copy."""
        return self._before[storage][0]

    def restore(self) -> None:
        """Undo all writes and draws."""
        before = {storage: before for storage, (_, before) in self._before.items()}
        self.write(Contents(before, self._generators))

    def write(self, contents: Contents) -> None:
        """Restore what ``contents()`` returned, all of it even if that is interrupted."""
        try:
            self._write(contents)
        except BaseException:
            self._write(contents)
            raise

    def _write(self, contents: Contents) -> None:
        with compat.inference_mode(False), torch.no_grad():
            for storage, memory in contents.memory.items():
                self.in_place(storage).copy_(memory)
        for generator, state in contents.generators.items():
            generator.set_state(state)


class SeedingProbe(TorchDispatchMode):
    """Raises if a generator is seeded, or its state set, rather than advanced by an operator.

    A replay runs no Python, so it would do neither. Entering the probe advances the generators:
    otherwise seeding a generator with the seed it already has would go unnoticed.
    """

    supports_higher_order_operators = True

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators = tuple(generators)
        self._states: list[torch.Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in EffectsProbe

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
        self._look()  # custom operators may draw without declaring it
        return result

    def _look(self) -> None:
        self._states = [generator.get_state() for generator in self._generators]

    def _check(self) -> None:
        for generator, state in zip(self._generators, self._states, strict=True):
            same = torch.equal(generator.get_state(), state)
            if not same and not others_captured_meanwhile():
                raise CaptureError(
                    f"a random generator of {generator.device} is seeded, or its state set, inside "
                    "the call, which a replay would not repeat; seed it between calls"
                )


class FixedDraws(TorchDispatchMode):
    """Runs operators that draw random numbers, and replaces what they drew with a constant.

    Batches of different sizes draw different numbers for the same row. With draws held fixed they
    can be compared.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in EffectsProbe

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        draw = _Draw.of(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if draw is None or not draw.happened:
            return result
        if func is torch.ops.aten.native_dropout.default:
            result[0].copy_(args[0])
            result[1].fill_(True)
        else:
            for tensor in tensors_in(result):
                tensor.fill_(0.5 if tensor.is_floating_point() else 0)
        return result


class _Draw:
    """A call that may draw random numbers. Attention draws some only where it has dropout."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self._before = generator.get_state()

    @classmethod
    def of(cls, func: Any, args: Any, kwargs: dict[str, Any]) -> _Draw | None:
        """For a call that is about to run; None if its operator never draws."""
        if not isinstance(func, OpOverload) or torch.Tag.nondeterministic_seeded not in func.tags:
            return None
        return cls(_generator(args, kwargs))

    @property
    def happened(self) -> bool:
        """Whether the call, which has run, drew any."""
        return not torch.equal(self._before, self.generator.get_state())


def _is_integer(thing: Any) -> bool:
    """Whether a tensor or dtype is integer; None means unchanged."""
    dtype = thing.dtype if isinstance(thing, torch.Tensor) else thing
    return dtype is not None and not (dtype.is_floating_point or dtype.is_complex)


def _generator(args: Any, kwargs: dict[str, Any]) -> torch.Generator:
    """The generator that a random operator draws from."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Generator):
            return value
    first = next(tensors_in(args), None)
    device = kwargs.get("device") or (first.device if first is not None else torch.device("cpu"))
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's entire storage, as elements of its dtype if they fill it evenly."""
    storage = tensor.untyped_storage()
    whole = storage.nbytes() % tensor.itemsize == 0
    dtype = tensor.dtype if whole else torch.uint8
    count = storage.nbytes() // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(storage, 0, (count,), (1,))


def written_tensors(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[torch.Tensor]:
    """The arguments that an operator writes, by its schema."""
    for index, name in _written_arguments(func):
        value = args[index] if index < len(args) else kwargs.get(name)
        yield from tensors_in(value)


@cache
def _written_arguments(func: OpOverload) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments that an operator writes."""
    if func in _WRITES_NO_MEMORY:
        return ()
    # Batch norm in training mode updates its statistics without declaring it.
    unsaid = {"running_mean", "running_var"} if "batch_norm" in func.name() else set()
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or argument.name in unsaid
    )
