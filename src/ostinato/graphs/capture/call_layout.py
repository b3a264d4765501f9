"""Maps the arguments of a graphed call onto static memory."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch

from ostinato.errors import BatchError, ConfigError
from ostinato.graphs.capture.buffers import (
    StaticBuffer,
    WholeBuffer,
    fingerprint,
    overlap,
    span,
    storage_id,
    unsupported_kind,
)
from ostinato.graphs.capture.signature import TensorSpec, compare_leaf, fixed, positional_names
from ostinato.graphs.tree import (
    check_distinct,
    flatten,
    leaves_with_path,
    map_tensors,
    nested_too_deeply,
)

# At most this many rows are tried in place of others.
_MOST_ROWS = 4

BatchDim: TypeAlias = int | Literal["static"] | None


class CallLayout:
    """The arguments of a graphed call: which tensors are batched, and their buffers.

    Built from the first call. Every leaf of the arguments is one of: a batched tensor with a
    ``StaticBuffer``; a tensor copied as a whole; a static tensor, read in place; a constant.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        max_rows: int,
        batch_dims: Mapping[str, BatchDim],
        padding: float | Mapping[str, float],
    ) -> None:
        self._names = positional_names(function)
        self._num_args = len(args)
        self._keywords = tuple(kwargs)
        self._arguments = self.named(args, kwargs)
        self._check_names("batch_dims", batch_dims)
        if isinstance(padding, Mapping):
            self._check_names("padding", padding)
        self._paths: list[str] = []
        # The type of every container, by argument: what it does may depend on it.
        self._types: list[tuple[str, list[type]]] = []
        # Buffers whose padding the caller chose, because it has meaning to the callable.
        self._chosen_padding: set[int] = set()
        self._targets: list[StaticBuffer | WholeBuffer | TensorSpec | Any] = []
        for name, value in self._arguments.items():
            batch_dim = batch_dims.get(name, 0)
            if batch_dim != "static" and batch_dim is not None and type(batch_dim) is not int:
                raise ConfigError(
                    f"batch_dims[{name!r}] must be a dimension, None or 'static', got {batch_dim!r}"
                )
            pad = padding.get(name, 0) if isinstance(padding, Mapping) else padding
            leaves: list[Any] = []
            types: list[type] = []
            flatten(value, name, self._paths, leaves, types)
            if types:
                self._types.append((name, types))
            for index, leaf in enumerate(leaves, start=len(self._targets)):
                if pad != 0 or (isinstance(padding, Mapping) and name in padding):
                    self._chosen_padding.add(index)
                self._targets.append(_target(self._paths[index], leaf, batch_dim, pad, max_rows))
        # Copy the structure: the caller may change its containers and drop its tensors.
        self._arguments = {
            name: value
            if batch_dims.get(name, 0) == "static"
            else map_tensors(lambda tensor: tensor.new_empty(0), value)
            for name, value in self._arguments.items()
        }
        check_distinct(self._paths)
        targets = list(enumerate(self._targets))
        self._buffers = [(index, each) for index, each in targets if isinstance(each, StaticBuffer)]
        self._whole = [(index, each) for index, each in targets if isinstance(each, WholeBuffer)]
        if not self._buffers:
            raise ConfigError(
                "no argument has a batch dimension (each is static or has batch_dims None), so "
                f"there is no batch size to choose a graph by; arguments: {list(self._arguments)}"
            )

    # --- per call ------------------------------------------------------------------------------

    def values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The leaves of a call, in the same order as the first call's."""
        named = self.named(args, kwargs)
        if named.keys() != self._arguments.keys():
            raise BatchError(
                f"called with arguments {list(named)}, but captured with {list(self._arguments)}; "
                "pass the same arguments on every call"
            )
        values: list[Any] = []
        paths: list[str] = []
        types: list[tuple[str, list[type]]] = []
        for name in self._arguments:
            value = named[name]
            if isinstance(value, torch.Tensor):
                paths.append(name)
                values.append(value)
            else:
                containers: list[type] = []
                try:
                    flatten(value, name, paths, values, containers)
                except RecursionError:
                    raise nested_too_deeply(f"argument {name!r}") from None
                if containers:
                    types.append((name, containers))
        if paths != self._paths:
            raise BatchError(
                f"the arguments have a different structure than at capture: {paths} instead of "
                f"{self._paths}"
            )
        if types != self._types:
            raise BatchError(
                f"the arguments have other containers than at capture: {_shown(types)} instead of "
                f"{_shown(self._types)}; pass the same types on every call"
            )
        return values

    def batch_size(self, values: Sequence[Any]) -> int:
        """The number of rows in a call. Checks every leaf against the captured ones."""
        rows: int | None = None
        first = ""
        for index, buffer in self._buffers:
            value = values[index]
            if not isinstance(value, torch.Tensor):
                raise BatchError(f"argument {buffer.name!r} must be a tensor, got {value!r}")
            if value.requires_grad and torch.is_grad_enabled():
                raise _autograd(buffer.name)
            count = buffer.rows_of(value)
            if rows is None:
                rows, first = count, buffer.name
            elif count != rows:
                raise BatchError(
                    f"argument {buffer.name!r} has {count} rows in its batch dimension "
                    f"{buffer.batch_dim}, but {first!r} has {rows}; if it has no batch dimension, "
                    "say so in batch_dims"
                )
        for index, whole in self._whole:
            whole.check(values[index])
        assert rows is not None
        if rows == 0:
            raise BatchError(f"the batch is empty: {first!r} has 0 rows; skip the call")
        return rows

    def fill(self, values: Sequence[Any], size: int) -> None:
        """Copy a call's tensors into the buffers, padded to ``size``; check the other leaves."""
        for path, target, value in zip(self._paths, self._targets, values, strict=True):
            if isinstance(target, StaticBuffer):
                target.fill(value, size)
            elif isinstance(target, WholeBuffer):
                target.fill(value)
            else:
                compare_leaf(path, target, value)

    def write_back(self, values: Sequence[Any], size: int, written: Iterable[int]) -> None:
        """Copy arguments that a graph wrote to back to the caller's tensors.

        ``written``: their positions, from ``written_by``.
        """
        for index in written:
            target, value = self._targets[index], values[index]
            if isinstance(target, StaticBuffer):
                rows = value.shape[target.batch_dim]
                value.copy_(target.view(size).narrow(target.batch_dim, 0, rows))
            elif isinstance(target, WholeBuffer):
                value.copy_(target.tensor)

    def check_separate(
        self,
        values: Sequence[Any],
        written: Iterable[int],
        written_state: Container[int],
        read_state: Container[int],
    ) -> None:
        """Raise if an argument overlaps other memory of the call, and one of the two is written.

        A graph works on copies, which share no memory. ``written``: arguments, by position; the
        others: memory outside the arguments, by ``storage_id``.
        """
        writes = set(written)
        spans = {i: span(value) for i, value in enumerate(values) if _has_memory(value)}
        for index, target in enumerate(self._targets):
            if not isinstance(target, (StaticBuffer, WholeBuffer)):
                continue
            storage = storage_id(values[index])
            other = "memory" if storage in written_state else ""
            if index in writes and storage in read_state:
                other = "memory"
            for position, other_span in spans.items():
                one_is_written = position in writes or index in writes
                if position != index and one_is_written and overlap(spans[index], other_span):
                    other = f"argument {self._paths[position]!r}"
            if other:
                raise BatchError(
                    f"argument {self._paths[index]!r} shares memory with {other} that the callable "
                    "reads or writes, and one of them is written in place; a graph works on "
                    "copies that share no memory, so pass a clone"
                )

    # --- for capture and trials ----------------------------------------------------------------

    def fill_repeated(self, values: Sequence[Any], size: int) -> None:
        """Fill ``size`` rows of the buffers with a call's rows, repeated as needed."""
        for target, value in zip(self._targets, values, strict=True):
            if isinstance(target, StaticBuffer):
                target.fill_repeated(value, size)
            elif isinstance(target, WholeBuffer):
                target.fill(value)

    def varies(self, values: Sequence[Any], *, floats: bool) -> bool:
        """Whether padding rows of floating-point (or else integer) arguments may be varied.

        They may not if the caller chose their contents, which have meaning to the callable.
        """
        return any(values[index].is_floating_point() is floats for index, _ in self._free_buffers)

    def vary_padding(self, values: Sequence[Any], size: int, noise: float) -> None:
        """Like ``fill``, with other numbers in padding rows of floating-point arguments."""
        self.fill(values, size)
        for index, buffer in self._free_buffers:
            if values[index].is_floating_point():
                buffer.vary_padding(values[index], size, noise)

    def fill_far_off(
        self, values: Sequence[Any], size: int, distance: float, *, padding: bool = False
    ) -> None:
        """Like ``fill``, with floating-point rows far from 0; ``padding``: padding rows too."""
        self.fill(values, size)
        for index, buffer in self._free_buffers:
            if values[index].is_floating_point():
                buffer.fill_far_off(values[index], size, distance, padding=padding)

    def fill_with_row(
        self, values: Sequence[Any], size: int, row: int, padding: int | None = None
    ) -> None:
        """Like ``fill``, with ``row`` in all real rows, and the row ``padding`` in padding rows
        that may vary.
        """
        self.fill(values, size)
        free = dict(self._free_buffers)
        for index, buffer in self._buffers:
            buffer.fill_with_row(values[index], size, row, padding if index in free else None)

    def extreme_rows(self, values: Sequence[Any]) -> list[int]:
        """Rows that are smallest or largest in an integer argument. Synchronises."""
        found: dict[int, None] = {}
        for index, buffer in self._free_buffers:
            if not values[index].is_floating_point():
                found.update(dict.fromkeys(buffer.extreme_rows(values[index])))
        return list(found)[:_MOST_ROWS]

    @property
    def _free_buffers(self) -> list[tuple[int, StaticBuffer]]:
        return [each for each in self._buffers if each[0] not in self._chosen_padding]

    @property
    def has_chosen_padding(self) -> bool:
        return bool(self._chosen_padding)

    def fingerprint(self, values: Sequence[Any]) -> tuple[int, ...]:
        """Numbers that differ for most batches with other contents. Synchronises."""
        return tuple(fingerprint(values[index]) for index, _ in self._buffers)

    def differs_from_padding(self, values: Sequence[Any]) -> bool:
        """Whether confusing a row of this batch with padding would show in the results."""
        return any(buffer.differs_from_padding(values[index]) for index, buffer in self._buffers)

    def has_distinct_rows(self, values: Sequence[Any]) -> bool:
        """Whether confusing two rows of this batch would show, whichever argument is read."""
        return all(buffer.has_distinct_rows(values[index]) for index, buffer in self._buffers)

    def written_by(self, storages: Iterable[int]) -> tuple[int, ...]:
        """The leaves whose buffers are among ``storages`` (``storage_id`` numbers)."""
        found = set(storages)
        return tuple(
            index
            for index, target in enumerate(self._targets)
            if isinstance(target, (StaticBuffer, WholeBuffer)) and target.storage_id in found
        )

    @property
    def storages(self) -> frozenset[int]:
        """The memory of all buffers."""
        held = (StaticBuffer, WholeBuffer)
        return frozenset(t.storage_id for t in self._targets if isinstance(t, held))

    def name_of(self, storage: int, values: Sequence[Any]) -> str | None:
        """The name of the argument that is a view of this memory."""
        for path, value in zip(self._paths, values, strict=True):
            if isinstance(value, torch.Tensor) and storage_id(value) == storage:
                return f"argument {path!r}"
        return None

    def static_call(self, size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as graphs of ``size`` rows see them: views of static memory.

        Containers and views are new each time: a call may change them, or keep something in them.
        """
        targets = iter([t for t in self._targets if not _is_constant(t)])

        def replace(original: torch.Tensor) -> torch.Tensor:
            target = next(targets)
            if isinstance(target, StaticBuffer):
                return target.view(size).detach()
            return target.tensor.detach() if isinstance(target, WholeBuffer) else original

        values = [map_tensors(replace, value) for value in self._arguments.values()]
        keywords = dict(zip(self._keywords, values[self._num_args :], strict=True))
        return tuple(values[: self._num_args]), keywords

    @property
    def callables(self) -> dict[str, Any]:
        """Modules and functions among the arguments, by name; they refer to further state."""
        pairs = zip(self._paths, self._targets, strict=True)
        return {path: target for path, target in pairs if callable(target)}

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that graphs read as arguments, by name: buffers, and static tensors."""
        rows = max(buffer.max_rows for _, buffer in self._buffers)
        args, kwargs = self.static_call(rows)
        leaves = [leaf for _, leaf in leaves_with_path([*args, *kwargs.values()], "")]
        for path, leaf in zip(self._paths, leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                yield path, leaf

    @property
    def num_bytes(self) -> int:
        held = (StaticBuffer, WholeBuffer)
        return sum(target.num_bytes for target in self._targets if isinstance(target, held))

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name."""
        named = {
            self._names[index] if index < len(self._names) else f"args[{index}]": value
            for index, value in enumerate(args)
        }
        named.update(kwargs)
        return named

    def _check_names(self, option: str, mapping: Mapping[str, Any]) -> None:
        unknown = sorted(set(mapping) - set(self._arguments))
        if unknown:
            raise ConfigError(f"{option} names {unknown}, but the call has {list(self._arguments)}")


def _target(
    path: str, leaf: Any, batch_dim: BatchDim, padding: float, max_rows: int
) -> StaticBuffer | WholeBuffer | TensorSpec | Any:
    if not isinstance(leaf, torch.Tensor):
        return fixed(path, leaf)
    if kind := unsupported_kind(leaf):
        raise ConfigError(f"argument {path!r} is {kind}")
    if batch_dim == "static":
        return TensorSpec.of(leaf)
    if leaf.requires_grad and torch.is_grad_enabled():
        raise _autograd(path)
    if batch_dim is None:
        return WholeBuffer(path, leaf)
    if leaf.dim() == 0:
        raise ConfigError(
            f"argument {path!r} is a scalar tensor and has no batch dimension; set its "
            f"batch_dims[...] to None (copied on every call) or 'static'"
        )
    return StaticBuffer(path, leaf, max_rows=max_rows, batch_dim=batch_dim, padding=padding)


def _has_memory(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 0


def _shown(types: Sequence[tuple[str, list[type]]]) -> str:
    return ", ".join(f"{kind.__name__} in {name!r}" for name, kinds in types for kind in kinds)


def _is_constant(target: Any) -> bool:
    return not isinstance(target, (StaticBuffer, WholeBuffer, TensorSpec))


def _autograd(name: str) -> BatchError:
    return BatchError(
        f"argument {name!r} requires grad, but graphs are for inference and compute no gradients; "
        "call inside torch.no_grad(), detach it, or use the plain model for training"
    )
