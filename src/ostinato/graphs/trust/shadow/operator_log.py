"""Logs the operators of a run: what each was called with, and what it gave.

A graph's log is taken at its capture, an eager run's when the two are to be told apart. Tensors
that the run itself made are identified by the call that made them, all others by their address.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
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

    ``results``: as ``OperatorLog.keep`` returned them. ``segment`` and ``num_steps``: where in the
    tape it is done; 0 steps if that is not known.
    """

    operator: str
    operands: Mapping[str, Hashable]
    results: tuple[Any, ...]
    segment: int
    num_steps: int


class OperatorLog:
    """An ``OperatorObserver``. ``keep`` is applied to the tensors that a call gave or wrote."""

    def __init__(self, keep: Callable[[torch.Tensor], Any]) -> None:
        self.calls: list[LoggedCall] = []
        self.breaks: list[tuple[KeptValue, ...]] = []  # arguments of eager breaks, after each
        self._keep = keep
        self._made: dict[int, int] = {}  # by storage, the call that made it
        self._segment = -1

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
        operands = dict(self._operands(func, args, kwargs))
        given = {storage_id(tensor) for tensor in tensors_in((args, kwargs))}
        outputs = list(tensors_in(result))
        number = len(self.calls)
        for tensor in outputs:
            if (storage := storage_id(tensor)) not in given:
                self._made[storage] = number
        fresh = [tensor for tensor in outputs if storage_id(tensor) not in given]
        changed = [*fresh, *written_tensors(func, args, kwargs)]
        results = tuple(self._keep(tensor) for tensor in changed)
        self.calls.append(
            LoggedCall(str(func), operands, results, max(self._segment, 0), num_steps or 0)
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


@contextmanager
def logging_operators(
    device_type: str, rows: Mapping[int, slice], *, split_at_breaks: bool
) -> Iterator[OperatorLog]:
    """Log the operators that run inside, with the values they give.

    Of tensors whose first dimension is a key of ``rows``, only those rows are kept. ``split_at_breaks``: those inside eager breaks are left out, as in a
    capture that is split there.
    """

    def keep(tensor: torch.Tensor) -> KeptValue:
        return KeptValue.of(tensor, rows)

    log = OperatorLog(keep)
    log.new_segment()
    mode = _Observed(device_type)
    mode.observer = log

    def run_break(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        mode.observer = None
        try:
            result = function(*args, **kwargs)
            # Afterwards: some arguments are memory for the results.
            log.breaks.append(tuple(map(keep, tensors_in((args, kwargs)))))
        finally:
            mode.observer = log
            log.new_segment()
        return result

    if not split_at_breaks:
        with mode:
            yield log
        return
    with watching_breaks(run_break), mode:
        yield log
