"""Logs the operators of a run: what each was called with, and what it returned.

A graph's log is taken at its capture, an eager run's when the two are to be told apart. Tensors
that the run itself made are identified by the call that made them, all others by their address.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from ostinato.compat import OpOverload
from ostinato.graphs.backends.guard import CaptureGuard
from ostinato.graphs.capture.buffers import storage_id
from ostinato.graphs.capture.segments import watching_breaks
from ostinato.graphs.tree import tensors_in
from ostinato.graphs.trust.effects import written_tensors
from ostinato.graphs.trust.shadow.kept_value import KeptValue


class Given(NamedTuple):
    """A tensor from outside the run."""

    address: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Made(NamedTuple):
    """A tensor that call number ``call`` of the run made, or a view of it."""

    call: int
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class LoggedCall(NamedTuple):
    """An operator, its operands by name, and the tensors it gave or wrote.

    ``results``: as ``CallLog.keep`` returned them; the last ``num_given`` of them are tensors
    from outside the run. ``segment`` and ``num_steps``: where in the
    tape it is done; 0 steps if that is not known.
    """

    operator: str
    operands: Mapping[str, Hashable]
    results: tuple[Any, ...]
    num_given: int
    segment: int
    num_steps: int

    @property
    def own_results(self) -> tuple[Any, ...]:
        """Those in tensors that the run made."""
        return self.results[: len(self.results) - self.num_given]


class CallLog:
    """An ``OperatorObserver``. ``keep`` is applied to the tensors that a call gave or wrote."""

    def __init__(self, keep: Callable[[torch.Tensor], Any]) -> None:
        self.calls: list[LoggedCall] = []
        self.breaks: list[tuple[KeptValue, ...]] = []  # arguments of eager breaks, after each
        self._keep = keep
        self._made: dict[int, int] = {}  # by storage, the call that made it
        self._segment = -1

    @property
    def widths(self) -> Iterator[int]:
        """The last dimension of every tensor that was an operand."""
        for call in self.calls:
            for operand in call.operands.values():
                if isinstance(operand, (Given, Made)) and operand.shape:
                    yield operand.shape[-1]

    def new_segment(self) -> None:
        self._segment += 1

    def saw(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        num_steps: int | None,
    ) -> None:
        if not isinstance(func, OpOverload):
            return
        given = {storage_id(tensor) for tensor in tensors_in((args, kwargs))}
        fresh = [tensor for tensor in tensors_in(result) if storage_id(tensor) not in given]
        written = list(written_tensors(func, args, kwargs))
        given_written = [tensor for tensor in written if storage_id(tensor) not in self._made]
        own_written = [tensor for tensor in written if storage_id(tensor) in self._made]
        changed = [*fresh, *own_written, *given_written]
        if not changed:
            return  # a view; which operator makes it may depend on inference mode
        operands = dict(self._operands(func, args, kwargs))
        self._made.update((storage_id(tensor), len(self.calls)) for tensor in fresh)
        results = tuple(self._keep(tensor) for tensor in changed)
        self.calls.append(
            LoggedCall(
                str(func),
                operands,
                results,
                len(given_written),
                max(self._segment, 0),
                num_steps or 0,
            )
        )

    def _operands(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[str, Hashable]]:
        names = [argument.name for argument in func._schema.arguments]
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            items = value if isinstance(value, (list, tuple)) else (value,)
            for index, item in enumerate(items):
                label = f"{name}[{index}]" if isinstance(value, (list, tuple)) else name
                yield label, self._operand(item)

    def _operand(self, value: Any) -> Hashable:
        if not isinstance(value, torch.Tensor):
            return value if isinstance(value, Hashable) else repr(value)
        shape = tuple(value.shape)
        call = self._made.get(storage_id(value))
        if call is not None:
            return Made(call, int(value.storage_offset()), shape, value.dtype)
        return Given(value.data_ptr() if value.numel() else 0, shape, value.dtype)


class _Observed(CaptureGuard):
    """Runs operators as captures do, composite ones in their parts, and forbids none."""

    def check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        return


class CallLogging:
    """A context manager that logs the operators inside, with the values they give.

    Of tensors whose first dimension is a key of ``rows``, only those rows are kept.
    ``split_at_breaks``: operators inside eager breaks are left out, as in a capture that is split
    there; what the breaks were called with is logged instead.
    """

    def __init__(
        self, device_type: str, rows: Mapping[int, slice], *, split_at_breaks: bool
    ) -> None:
        self._rows = rows
        self._split_at_breaks = split_at_breaks
        self._mode = _Observed(device_type)
        self._entered = ExitStack()
        self.log = CallLog(self._kept)

    def _kept(self, tensor: torch.Tensor) -> KeptValue:
        return KeptValue.of(tensor, self._rows)

    def __enter__(self) -> None:
        self.log.new_segment()
        self._mode.observer = self.log
        if self._split_at_breaks:
            self._entered.enter_context(watching_breaks(self._run_break))
        self._entered.enter_context(self._mode)

    def __exit__(self, *raised: Any) -> None:
        self._entered.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is logged."""
        self._mode.observer, outer = None, self._mode.observer
        try:
            yield
        finally:
            self._mode.observer = outer

    def _run_break(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with self.paused():
            result = function(*args, **kwargs)
            # Afterwards: some arguments are memory for the results.
            self.log.breaks.append(tuple(map(self._kept, tensors_in((args, kwargs)))))
        self.log.new_segment()
        return result
