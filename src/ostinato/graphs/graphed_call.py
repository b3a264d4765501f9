"""How a call of a graphed function maps onto static memory: arguments in, results out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from ostinato.errors import BatchError, ConfigError
from ostinato.graphs.buffers import StaticBuffer
from ostinato.graphs.signature import TensorSpec, compare_leaf, fixed, positional_names
from ostinato.graphs.tree import leaves_with_path, map_tensors

BatchDim: TypeAlias = int | Literal["static"] | None


class _WholeBuffer:
    """An argument without a batch dimension, copied whole on every call."""

    def __init__(self, name: str, example: torch.Tensor) -> None:
        with torch.inference_mode(False):
            self.tensor = torch.empty_like(example).copy_(example)
        self.name = name
        self.num_bytes = self.tensor.nbytes

    def fill(self, value: torch.Tensor) -> None:
        for what in ("shape", "dtype", "device"):
            was, now = getattr(self.tensor, what), getattr(value, what)
            if was != now:
                raise BatchError(
                    f"argument {self.name!r} has {what} {now}, but the graphs were captured with "
                    f"{was}; convert it first, or make another graphed() for it"
                )
        self.tensor.copy_(value)


class CallLayout:
    """The arguments of a graphed call: which tensors are batched, and the buffers behind them.

    Built from the first call. Every leaf of the arguments is one of: a batched tensor with a
    ``StaticBuffer``; a whole tensor that is copied; a static tensor, read in place; a constant.
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
        self._arguments = self._named(args, kwargs)
        self._check_names("batch_dims", batch_dims)
        if isinstance(padding, Mapping):
            self._check_names("padding", padding)
        self._paths: list[str] = []
        self._targets: list[StaticBuffer | _WholeBuffer | TensorSpec | Any] = []
        for name, value in self._arguments.items():
            batch_dim = batch_dims.get(name, 0)
            if batch_dim != "static" and batch_dim is not None and type(batch_dim) is not int:
                raise ConfigError(
                    f"batch_dims[{name!r}] must be a dimension, None or 'static', got {batch_dim!r}"
                )
            pad = padding.get(name, 0) if isinstance(padding, Mapping) else padding
            for path, leaf in leaves_with_path(value, name):
                self._paths.append(path)
                self._targets.append(_target(path, leaf, batch_dim, pad, max_rows))
        # A copy of the structure: the caller's containers may change, and its tensors may go.
        self._arguments = {
            name: value
            if batch_dims.get(name, 0) == "static"
            else map_tensors(lambda tensor: tensor.new_empty(0), value)
            for name, value in self._arguments.items()
        }
        self._buffers = [
            (index, target)
            for index, target in enumerate(self._targets)
            if isinstance(target, StaticBuffer)
        ]
        if not self._buffers:
            raise ConfigError(
                "no argument has a batch dimension (all are static or without one), so there is "
                f"no batch size to choose a graph by; arguments: {list(self._arguments)}"
            )

    # --- per call ------------------------------------------------------------------------------

    def values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The leaves of a call, in the order of the first call's."""
        named = self._named(args, kwargs)
        if named.keys() != self._arguments.keys():
            raise BatchError(
                f"called with arguments {list(named)}, but captured with {list(self._arguments)}; "
                "pass the same arguments on every call"
            )
        values = []
        paths = []
        for name in self._arguments:
            value = named[name]
            if isinstance(value, torch.Tensor):
                values.append(value)
                paths.append(name)
            else:
                for path, leaf in leaves_with_path(value, name):
                    values.append(leaf)
                    paths.append(path)
        if paths != self._paths:
            raise BatchError(
                f"the arguments have another structure than at capture: {paths} instead of "
                f"{self._paths}"
            )
        return values

    def batch_size(self, values: Sequence[Any]) -> int:
        """The number of rows of a call, after checking every leaf against the captured ones."""
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
        assert rows is not None
        if rows == 0:
            raise BatchError(f"the batch is empty: {first!r} has 0 rows; skip the call")
        return rows

    def fill(self, values: Sequence[Any], size: int) -> None:
        """Copy a call's tensors into the buffers, padded to ``size``; check what is not copied."""
        for path, target, value in zip(self._paths, self._targets, values, strict=True):
            if isinstance(target, StaticBuffer):
                target.fill(value, size)
            elif isinstance(target, _WholeBuffer):
                target.fill(value)
            else:
                compare_leaf(path, target, value)

    # --- for capture ---------------------------------------------------------------------------

    def reset(self) -> None:
        """Padding in all batched buffers."""
        for _, buffer in self._buffers:
            buffer.reset()

    def static_call(self, size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments made of the static memory, as graphs of ``size`` rows see it."""
        return self._call(lambda buffer: buffer.view(size))

    def trial_call(self, rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of any batch size, in memory of their own."""
        return self._call(lambda buffer: buffer.padded_copy(rows))

    def _call(
        self, tensor_of: Callable[[StaticBuffer], torch.Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        targets = iter([t for t in self._targets if not _is_constant(t)])

        def replace(original: torch.Tensor) -> torch.Tensor:
            target = next(targets)
            if isinstance(target, StaticBuffer):
                return tensor_of(target)
            return target.tensor if isinstance(target, _WholeBuffer) else original

        values = [map_tensors(replace, value) for value in self._arguments.values()]
        keywords = dict(zip(self._keywords, values[self._num_args :], strict=True))
        return tuple(values[: self._num_args]), keywords

    @property
    def num_bytes(self) -> int:
        held = (StaticBuffer, _WholeBuffer)
        return sum(target.num_bytes for target in self._targets if isinstance(target, held))

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
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


@dataclass(frozen=True)
class OutputLayout:
    """Which dimensions of which results follow the batch, found by trying two batch sizes."""

    scaling: tuple[tuple[tuple[int, int], ...], ...]  # per tensor: (dimension, rows per batch row)

    @classmethod
    def infer(cls, function: Callable[..., Any], layout: CallLayout, size: int) -> OutputLayout:
        """Run the function eagerly on padding, at ``size`` rows and at another number of rows."""
        other = 1 if size > 1 else 2
        results = []
        for rows in (size, other):
            args, kwargs = layout.trial_call(rows)
            results.append(list(leaves_with_path(function(*args, **kwargs), "output")))
        if [path for path, _ in results[0]] != [path for path, _ in results[1]]:
            raise BatchError(
                f"the result has another structure for a batch of {size} than for one of {other}"
            )
        scaling = []
        for (path, large), (_, small) in zip(*results, strict=True):
            if isinstance(large, torch.Tensor):
                scaling.append(_scaling(path, large.shape, small.shape, size, other))
            elif not (large is small or large == small):
                raise BatchError(
                    f"{path} is {large!r} for a batch of {size} and {small!r} for one of {other}; "
                    "values other than tensors are fixed when a graph is captured, so return "
                    "tensors only"
                )
        return cls(tuple(scaling))

    def cut(self, output: Any, rows: int, size: int) -> Any:
        """Views of the real rows of a padded result."""
        if rows == size and isinstance(output, torch.Tensor):
            return output
        scaling = iter(self.scaling)

        def cut_one(tensor: torch.Tensor) -> torch.Tensor:
            for dim, per_row in next(scaling):
                tensor = tensor.narrow(dim, 0, rows * per_row)
            return tensor

        # Containers are made anew even where nothing is cut: the caller may change them.

        return map_tensors(cut_one, output)


def _target(
    path: str, leaf: Any, batch_dim: BatchDim, padding: float, max_rows: int
) -> StaticBuffer | _WholeBuffer | TensorSpec | Any:
    if not isinstance(leaf, torch.Tensor):
        return fixed(path, leaf)
    if batch_dim == "static":
        return TensorSpec.of(leaf)
    if leaf.requires_grad and torch.is_grad_enabled():
        raise _autograd(path)
    if batch_dim is None:
        return _WholeBuffer(path, leaf)
    if leaf.dim() == 0:
        raise ConfigError(
            f"argument {path!r} is a scalar tensor and has no batch dimension; set "
            f"batch_dims[...] to None (copied on every call) or 'static' for it"
        )
    return StaticBuffer(path, leaf, max_rows=max_rows, batch_dim=batch_dim, padding=padding)


def _is_constant(target: Any) -> bool:
    return not isinstance(target, (StaticBuffer, _WholeBuffer, TensorSpec))


def _scaling(
    path: str, large: torch.Size, small: torch.Size, size: int, other: int
) -> tuple[tuple[int, int], ...]:
    if len(large) == len(small):
        dims = [dim for dim in range(len(large)) if large[dim] != small[dim]]
        if all(large[d] * other == small[d] * size and large[d] % size == 0 for d in dims):
            return tuple((dim, large[dim] // size) for dim in dims)
    raise BatchError(
        f"{path} has shape {tuple(large)} for a batch of {size} and {tuple(small)} for one of "
        f"{other}; each dimension must stay the same or grow in proportion to the batch"
    )


def _autograd(name: str) -> BatchError:
    return BatchError(
        f"argument {name!r} requires grad, but graphs are for inference and compute no gradients; "
        "call inside torch.no_grad(), pass it detached, or use the plain model for training"
    )
