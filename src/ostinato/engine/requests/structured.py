"""Requests with structured output: whether they can run, and their end by their grammars."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ostinato.config import EngineConfig
from ostinato.scheduling.request import FinishReason, Request
from ostinato.scheduling.scheduler import Scheduler
from ostinato.scheduling.step_plan import TokenEvent

logger = logging.getLogger(__name__)


def end_complete(events: Sequence[TokenEvent], schedulers: Sequence[Scheduler]) -> None:
    """End requests whose text is complete by their grammar, and those that left it."""
    for event in events:
        request = event.request
        if request.constraint is None or request.finish_reason is FinishReason.STOP:
            continue
        reason, why = _follow_grammar(request)
        if reason is not None:
            schedulers[request.replica].finish(request, reason, why)
            event.finished = True


def _follow_grammar(request: Request) -> tuple[FinishReason | None, str | None]:
    """Take in the tokens of a constrained request; why it ends now, if it does.

    A text to which nothing can be added ends there: no step is spent on an end-of-sequence token,
    and neither ``ignore_eos`` nor ``min_tokens`` asks for tokens that the grammar does not have.
    """
    constraint = request.constraint
    was_complete = constraint.is_complete
    constraint.follow(request.output_token_ids)
    if constraint.failure is not None:
        logger.warning("request %s was aborted: %s", request.request_id, constraint.failure)
        return FinishReason.ABORT, constraint.failure
    if was_complete or constraint.is_complete:
        return FinishReason.STOP, None
    return None, None


def no_structure(config: EngineConfig) -> str | None:
    """Why requests cannot have structured output, if they cannot."""
    if config.world_size == 1:
        return None
    return (
        f"this engine has {config.world_size} ranks, and masks are not sent to other ranks; use one"
    )
