"""``PreparedBatch``: the inputs that an entry of a plan is captured with, and how they are run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from ostinato.errors import CaptureError
from ostinato.graphs.capture.context import set_forward_context
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.plan import PlanEntry

Inputs = TypeVar("Inputs")
Output = TypeVar("Output")  # of the forward: hidden states [num_tokens, ...], or a tree of those


@dataclass(frozen=True, kw_only=True)
class PreparedBatch(Generic[Inputs]):
    """The inputs of one captured shape, and the contents of its forward context.

    ``inputs``: the forward's argument. ``attn_metadata``, ``slot_mapping`` and
    ``num_tokens_across_dp`` go into the ``ForwardContext``, None included.

    ``output_in_place``: the output of a FULL graph stays in the graph's memory, valid until the
    next replay in the pool, instead of being copied to a buffer; it may have any structure. Tensors
    in it with another number of rows than the padded batch are returned whole.
    """

    inputs: Inputs
    attn_metadata: Any = None
    slot_mapping: Any = None
    num_tokens_across_dp: torch.Tensor | None = None
    output_in_place: bool = False


def prepared(
    prepare: Callable[[PlanEntry], PreparedBatch[Inputs]], entry: PlanEntry
) -> PreparedBatch[Inputs]:
    """What ``prepare`` returns for ``entry``; raises an error if that is something else."""
    batch = prepare(entry)
    if not isinstance(batch, PreparedBatch):
        raise CaptureError(
            f"prepare returned a {type(batch).__name__}; return an "
            "ostinato.PreparedBatch(inputs=...) with the inputs of the forward"
        )
    return batch


def run_prepared(
    forward: Callable[[Inputs], Output],
    batch: PreparedBatch[Inputs],
    entry: PlanEntry,
    mode: CUDAGraphMode,
) -> Output:
    """Run ``forward`` on a batch, under its forward context in ``mode``."""
    with set_forward_context(
        mode,
        entry.descriptor,
        attn_metadata=batch.attn_metadata,
        slot_mapping=batch.slot_mapping,
        num_tokens_across_dp=batch.num_tokens_across_dp,
    ):
        return forward(batch.inputs)
