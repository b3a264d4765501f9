"""The KV slots of the running batch's tokens, by which layers tell tokens from padding."""

from __future__ import annotations

import torch

from ostinato.attention.base import AttentionMetadata
from ostinato.compile.operators import splitting_operator
from ostinato.graphs.capture.context import get_forward_context
from ostinato.graphs.capture.segments import eager_break

TOKEN_SLOTS = "ostinato::token_slots"  # the operator at which a traced model is split


def token_slots(hidden: torch.Tensor) -> torch.Tensor | None:
    """The slots [T] int64 of the tokens of ``hidden`` [T, ...], negative for padding.

    Graphs may read them: a replay finds those of its batch at the same address. None if the batch
    has no slots, and no padding. A model that is traced is split here.
    """
    if torch.compiler.is_compiling():
        out = hidden.new_empty(hidden.shape[0], dtype=torch.int64)
        _operator(out)
        return out
    return _current_slots()


def _current_slots() -> torch.Tensor | None:
    metadata = get_forward_context().attn_metadata
    return metadata.slot_mapping if isinstance(metadata, AttentionMetadata) else None


@eager_break
def _copy_slots(out: torch.Tensor) -> None:
    slots = _current_slots()
    if slots is None:
        out.zero_()
    else:
        out.copy_(slots)


_operator = splitting_operator("token_slots(Tensor(a!) out) -> ()", _copy_slots)
