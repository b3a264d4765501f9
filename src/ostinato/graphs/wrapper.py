"""``CUDAGraphWrapper``: captures a callable on the first call with a key, then replays it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from ostinato.errors import ConfigError, ReplayMismatchError
from ostinato.graphs.capture.closing import close_each
from ostinato.graphs.capture.context import current_forward_context
from ostinato.graphs.capture.pool import GraphPool, check_pool
from ostinato.graphs.capture.segments import Tape
from ostinato.graphs.capture.signature import CallSignature
from ostinato.graphs.policy.descriptor import BatchDescriptor
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.tree import map_tensors
from ostinato.graphs.trust.ambient_state import NUMERICS, other_setting, read_numerics

logger = logging.getLogger(__name__)

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class CUDAGraphOptions:
    """Options of a wrapper's captures.

    ``debug_log_enable``: log each capture at level DEBUG. ``gc_disable``: do not collect garbage
    before the capture; for all but the first of many small pieces. ``weak_ref_output``: return a
    weak output even from the first call, so that the pool can reuse its memory at once; for the
    last piece, whose output no other piece reads.
    """

    debug_log_enable: bool = True
    gc_disable: bool = False
    weak_ref_output: bool = False


@dataclass(frozen=True, kw_only=True)
class CUDAGraphEntry(Generic[R]):
    """A captured graph: its key, the signature of its arguments, its tape and its output.

    ``batch_descriptor``: the key. ``signature`` checks arguments, ``tape`` is replayed.
    ``numerics``: torch's settings that change results, at capture. ``is_bare_tensor``: the output
    is one tensor, not a tree of them.
    """

    batch_descriptor: BatchDescriptor
    signature: CallSignature
    numerics: tuple[Any, ...]
    tape: Tape
    output: R
    is_bare_tensor: bool


class CUDAGraphWrapper(Generic[R]):
    """Runs ``runnable`` through graphs when the forward context asks for ``runtime_mode``.

    Under any other mode, or without a context, it just calls the runnable, so a FULL wrapper around
    a model and PIECEWISE wrappers around its pieces nest without interfering.

    The wrapper keeps no input buffers and copies no inputs: the caller must keep addresses stable.
    A call that does not match the captured one raises, as does one under another autocast, matmul
    precision or setting of deterministic algorithms. The output is in the graph's memory, valid
    until the next replay in the pool; the first call returns the strong reference, later ones an
    alias that reserves nothing.

    ``pool``: the memory the graphs use. ``cudagraph_options``: how to capture; None: defaults. With
    ``split_at_breaks`` the runnable is captured as segments around ``@eager_break`` functions.
    """

    def __init__(
        self,
        runnable: Callable[..., R],
        runtime_mode: CUDAGraphMode,
        *,
        pool: GraphPool,
        cudagraph_options: CUDAGraphOptions | None = None,
        split_at_breaks: bool = False,
    ) -> None:
        runtime_mode = CUDAGraphMode.parse(runtime_mode)
        if runtime_mode not in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE):
            raise ConfigError(
                f"a wrapper is bound to FULL or PIECEWISE, not {runtime_mode.name}; for NONE call "
                "the runnable itself"
            )
        check_pool(pool)
        self.runnable = runnable
        self.runtime_mode = runtime_mode
        self.pool = pool
        self.cudagraph_options = cudagraph_options or CUDAGraphOptions()
        self.split_at_breaks = split_at_breaks
        self.concrete_cudagraph_entries: dict[BatchDescriptor, CUDAGraphEntry[R]] = {}
        self._device_type = pool.device.type
        pool.register(self)

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        context = current_forward_context()
        if context is None or context.cudagraph_runtime_mode is not self.runtime_mode:
            return self.runnable(*args, **kwargs)
        descriptor = context.batch_descriptor
        assert descriptor is not None  # the context checks it
        entry = self.concrete_cudagraph_entries.get(descriptor)
        if entry is None:
            return self._capture(descriptor, args, kwargs)
        if not entry.signature.matches(args, kwargs):
            entry.signature.check(args, kwargs)
        if read_numerics(self._device_type) != entry.numerics:
            raise self._other_numerics(entry)
        self.pool.replay(entry.tape)
        if entry.is_bare_tensor:
            return entry.output
        # Copy the containers, so that the caller's changes to them do not show in later results.
        return map_tensors(_itself, entry.output)

    def _capture(
        self, descriptor: BatchDescriptor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> R:
        self.pool.validate_cudagraph_capturing_enabled(descriptor)
        signature = CallSignature(self.runnable, args, kwargs)
        try:
            captured = self.pool.capture(
                lambda: self.runnable(*args, **kwargs),
                split_at_breaks=self.split_at_breaks,
                collect_garbage=not self.cudagraph_options.gc_disable,
            )
        except Exception as error:
            error.add_note(f"while capturing {descriptor} ({self.runtime_mode.name})")
            raise
        weak_output = self.pool.weak(captured.output)
        self.concrete_cudagraph_entries[descriptor] = CUDAGraphEntry(
            batch_descriptor=descriptor,
            signature=signature,
            numerics=read_numerics(self._device_type),
            tape=captured.tape,
            output=weak_output,
            is_bare_tensor=isinstance(weak_output, torch.Tensor),
        )
        if self.cudagraph_options.debug_log_enable:
            logger.debug("captured %s (%s)", descriptor, self.runtime_mode.name)
        return weak_output if self.cudagraph_options.weak_ref_output else captured.output

    def _other_numerics(self, entry: CUDAGraphEntry[R]) -> ReplayMismatchError:
        now = read_numerics(self._device_type)
        name, was, is_now = next(
            (name, was, is_now)
            for name, was, is_now in zip(NUMERICS, entry.numerics, now, strict=True)
            if was != is_now
        )
        return other_setting(name, was, is_now)

    def unwrap(self) -> Callable[..., R]:
        """The callable that was wrapped."""
        return self.runnable

    def tapes(self) -> list[tuple[str, Tape]]:
        """The captured graphs, by name."""
        entries = self.concrete_cudagraph_entries.values()
        mode = self.runtime_mode.name
        return [(f"{mode}, {each.batch_descriptor.describe()}", each.tape) for each in entries]

    def tape_of(self, descriptor: BatchDescriptor) -> Tape | None:
        """What a call with the key ``descriptor`` replays; None if it was not captured."""
        entry = self.concrete_cudagraph_entries.get(descriptor)
        return None if entry is None else entry.tape

    def discard(self, serials: range) -> None:
        """Drop the graphs whose tapes have these ``serials``."""
        for descriptor, entry in list(self.concrete_cudagraph_entries.items()):
            if entry.tape.serial in serials:
                self.concrete_cudagraph_entries.pop(descriptor).tape.close()

    def clear_graphs(self) -> None:
        """Drop all graphs; the next call with each key captures again."""
        try:
            close_each(entry.tape.close for entry in self.concrete_cudagraph_entries.values())
        finally:
            self.concrete_cudagraph_entries.clear()

    def __getattr__(self, name: str) -> Any:
        # Reached only for attributes that the wrapper does not have.
        runnable = self.__dict__.get("runnable")
        if hasattr(runnable, name):
            return getattr(runnable, name)
        raise AttributeError(
            f"neither CUDAGraphWrapper nor its runnable {type(runnable).__name__} has an "
            f"attribute {name!r}"
        )


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
