"""A second form of the model for small batches, and which runners can have one."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.config import GraphConfig
from ostinato.errors import ConfigError
from ostinato.graphs.policy.plan import CapturePlan
from ostinato.models.base import CausalLM
from ostinato.parallel.agreement import Reducer


@dataclass(frozen=True, kw_only=True)
class SmallBatchModel:
    """Another form of the model, for batches of up to ``threshold`` tokens before padding.

    It stores keys and values in the same layout as the first, and uses the first's head.
    """

    model: CausalLM
    plan: CapturePlan
    threshold: int
    name: str


def check_can_agree(
    agreement: Reducer | None,
    graphs: GraphConfig,
    small: SmallBatchModel | None,
) -> None:
    """Raise for what ranks that step together cannot have."""
    if agreement is None:
        return
    ranks = f"{agreement.size} ranks that step together"
    if graphs.eager_fallback:
        raise ConfigError(
            f"eager_fallback does not work with {ranks}: a rank that lacks a graph cannot run the "
            "mode they agree on; leave it off"
        )
    if small is not None:
        raise ConfigError(
            f"a {small.name} for small batches does not work with {ranks}: they would run "
            "different models"
        )
