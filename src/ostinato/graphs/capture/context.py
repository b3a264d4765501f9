"""The forward context: a description of the running batch, readable from inside any module.

This is the only scoped state in Ostinato. It exists because attention is called from deep inside
third-party modules. It is a context variable, so every thread has its own.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from ostinato.errors import ConfigError, ContextError
from ostinato.graphs.policy.descriptor import BatchDescriptor
from ostinato.graphs.policy.modes import CUDAGraphMode, ModeName
from ostinato.graphs.thread_state import thread_variable


@dataclass(frozen=True, kw_only=True)
class ForwardContext:
    """The running batch. Frozen: a new batch is a new context.

    ``cudagraph_runtime_mode``: NONE, PIECEWISE or FULL. ``batch_descriptor``: the key of its graph;
    needed unless the mode is NONE. ``attn_metadata``, ``slot_mapping``: for attention, in any form.
    ``num_tokens_across_dp``: padded tokens of each data-parallel rank, [ranks] on the CPU. None:
    the batch has no such thing.
    """

    cudagraph_runtime_mode: CUDAGraphMode
    batch_descriptor: BatchDescriptor | None = None
    attn_metadata: Any = None
    slot_mapping: Any = None
    num_tokens_across_dp: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not self.cudagraph_runtime_mode.is_valid_runtime_mode():
            raise ConfigError(
                f"a batch runs under NONE, PIECEWISE or FULL, not "
                f"{self.cudagraph_runtime_mode.name}; use its decode_mode() or mixed_mode()"
            )
        if self.cudagraph_runtime_mode is not CUDAGraphMode.NONE and self.batch_descriptor is None:
            raise ConfigError(
                f"{self.cudagraph_runtime_mode.name} needs a batch_descriptor to find its graph"
            )


_current: ContextVar[ForwardContext | None] = thread_variable("forward_context", None)

# Bound once: the wrapper reads the context on every call. None if no context is set.
current_forward_context = _current.get


def get_forward_context() -> ForwardContext:
    """The context of the running batch. Raises if none is set."""
    context = _current.get()
    if context is None:
        raise ContextError(
            "no forward context is set in this thread; run the model inside "
            "`with set_forward_context(...)`"
        )
    return context


class set_forward_context:  # noqa: N801  (used like a function: `with set_forward_context(...)`)
    """Set the context for a ``with`` block; the previous one is restored, exception or not.

    Takes the fields of ``ForwardContext``: ``cudagraph_runtime_mode`` (a mode or its name; default:
    NONE), ``batch_descriptor``, ``attn_metadata``, ``slot_mapping``, ``num_tokens_across_dp``
    (default: None).
    """

    __slots__ = ("_token", "context")

    def __init__(
        self,
        cudagraph_runtime_mode: CUDAGraphMode | ModeName = CUDAGraphMode.NONE,
        batch_descriptor: BatchDescriptor | None = None,
        *,
        attn_metadata: Any = None,
        slot_mapping: Any = None,
        num_tokens_across_dp: torch.Tensor | None = None,
    ) -> None:
        self._token: Token[ForwardContext | None] | None = None
        self.context = ForwardContext(
            cudagraph_runtime_mode=CUDAGraphMode.parse(cudagraph_runtime_mode),
            batch_descriptor=batch_descriptor,
            attn_metadata=attn_metadata,
            slot_mapping=slot_mapping,
            num_tokens_across_dp=num_tokens_across_dp,
        )

    def __enter__(self) -> ForwardContext:
        if self._token is not None:
            raise ContextError(
                "this set_forward_context(...) is entered already, here or in another thread; "
                "create one for each `with` block"
            )
        self._token = _current.set(self.context)
        return self.context

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._token is not None
        token, self._token = self._token, None
        _current.reset(token)
