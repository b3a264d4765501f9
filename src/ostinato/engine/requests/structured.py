"""The end of requests with structured output, as their grammars see it."""

from __future__ import annotations

import logging

from ostinato.scheduling.request import FinishReason, Request

logger = logging.getLogger(__name__)


def follow_grammar(request: Request) -> tuple[FinishReason | None, str | None]:
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
