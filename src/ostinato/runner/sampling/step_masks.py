"""Masks of a step's constrained requests, written between its forward and its sampler.

The mask of a request depends on its last token, and the host reads tokens one step late. So a step
with constrained requests enqueues its forward first, as any other; while the device runs that, the
host catches up with the tokens of the step before, advances the grammars, and only then enqueues
the sampler. The device waits only if all that takes longer than the forward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from ostinato.sampling.sampling_state import SamplingState
from ostinato.scheduling.request import Request, RequestStatus
from ostinato.scheduling.step_plan import DecodePlan, StepPlan
from ostinato.structured.constraint import Constraint

# Commits all steps before the one that runs, so that every request has all its tokens.
CatchUp: TypeAlias = Callable[[], None]


def no_catch_up() -> None:
    """For callers that commit each step before they run the next."""


def write_masks(plan: StepPlan, sampling: SamplingState) -> None:
    """Write the masks of the requests that sample in this step, as of the tokens they have."""
    rows: list[int] = []
    constraints: list[Constraint] = []
    for req_index, request in _sampling_requests(plan):
        if request.constraint is not None and request.status is not RequestStatus.FINISHED:
            rows.append(req_index)
            request.constraint.follow(request.output_token_ids)
            constraints.append(request.constraint)
    if rows:
        sampling.masks.write(rows, partial(Constraint.fill, constraints))


def _sampling_requests(plan: StepPlan) -> list[tuple[int, Request]]:
    if isinstance(plan, DecodePlan):
        return list(zip(plan.req_indices.tolist(), plan.members, strict=True))
    return [(item.req_index, item.request) for item in plan.requests if item.samples]
