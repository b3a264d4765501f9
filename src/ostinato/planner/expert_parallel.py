"""What a step costs with the experts of a mixture spread over replicas (expert parallel).

Every rank has a whole replica but for the experts, of which it has its share. The tokens of a batch
are divided evenly over the replicas; an all-gather brings all of them to every rank's experts, and
an all-to-all takes the results back. Loads are even: no rank waits for one with more tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ostinato.errors import ConfigError
from ostinato.parallel.layout import ParallelLayout
from ostinato.planner.communication import Collective, Interconnect
from ostinato.planner.compute import Measured, Roofline
from ostinato.planner.cost import Kind, StepTime
from ostinato.planner.weights import num_mixtures, replica_weights

if TYPE_CHECKING:
    from ostinato.models.native.config.decoder_config import DecoderConfig

_SLOT_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class ExpertParallelCost:
    """Step times of ``num_ranks`` replicas of one rank each. Raises if experts do not divide."""

    config: DecoderConfig
    num_ranks: int
    itemsize: int
    compute: Roofline | Measured
    interconnect: Interconnect

    def __post_init__(self) -> None:
        experts = self.config.experts
        if experts is None or experts.num_experts % self.num_ranks:
            count = 0 if experts is None else experts.num_experts
            raise ConfigError(
                f"{count} experts cannot be spread evenly over {self.num_ranks} ranks; choose a "
                "number of ranks that divides them"
            )

    def step(self, kind: Kind, num_tokens: int) -> StepTime:
        """``num_tokens``: of all replicas. A prefill is a prompt of an equal part on each."""
        once, layer = self.collectives(num_tokens)
        communication = self.interconnect.seconds(once)
        communication += num_mixtures(self.config) * self.interconnect.seconds(layer)
        return StepTime(
            compute=self.compute.expert_parallel_seconds(self.num_ranks, kind, num_tokens),
            communication=communication,
        )

    def collectives(self, num_tokens: int) -> tuple[list[Collective], list[Collective]]:
        """Those of a step, which tell tokens from padding, and those of a layer with experts."""
        ranks, share = self.num_ranks, -(-num_tokens // self.num_ranks)
        row = self.config.hidden_size * self.itemsize
        return (
            [Collective("all_gather", ranks, share * _SLOT_BYTES)],
            [
                Collective("all_gather", ranks, share * row),
                Collective("all_to_all", ranks, ranks * share * row),
            ],
        )

    def about(self) -> dict[str, Any]:
        """What follows from the number of ranks alone; bytes are what each sends."""
        size = 64 * self.num_ranks  # without padding
        moved = sum(each.moved_bytes for each in self.collectives(size)[1])
        return {
            "gpus": self.num_ranks,
            "weight_bytes": replica_weights(self.config, self.num_ranks).total * self.itemsize,
            "layer_bytes_per_token": moved / size,
        }

    @property
    def layout(self) -> ParallelLayout:
        """That of one replica."""
        return ParallelLayout()
