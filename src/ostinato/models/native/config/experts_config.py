"""The mixture of experts of a decoder: sizes, routing, and the names of its weights.

A frozen record of plain values, like ``DecoderConfig``, which has one for models with experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ostinato.errors import ConfigError
from ostinato.models.native.config.size_check import check_size
from ostinato.ops.experts.mixture import ExpertActivation
from ostinato.ops.experts.routing import RouterOptions

_MOST_EXPERTS = 1 << 14
_WIDEST = 1 << 22


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """The checkpoint names of a mixture's weights, without the layer's prefix.

    Checkpoints have a tensor for each expert, named ``{experts}.{number}.{gate}.weight``, or all
    experts in one (``stacked``): [E, 2 * width, hidden] and [E, hidden, width]. ``transposed``:
    [E, hidden, 2 * width] and [E, width, hidden], with gate and up in turn, as in GPT-OSS.
    """

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    correction: str = "mlp.gate.e_score_correction_bias"
    shared: str = "mlp.shared_expert"  # gate_proj, up_proj and down_proj follow
    shared_gate: str = "mlp.shared_expert_gate"
    stacked: bool = False
    transposed: bool = False

    def as_stacked(self) -> ExpertNames:
        """The names that transformers' modules have, whose experts are stacked."""
        return replace(self, router="mlp.gate", experts="mlp.experts", stacked=True)


@dataclass(frozen=True, kw_only=True)
class ExpertsPart:
    """What one rank has of a mixture: these experts, and of each this range of its width.

    Either range is whole. ``shared``: of the shared expert's width. ``adds_biases``: of the down
    projections, which one of the ranks that sum their results adds.
    """

    experts: range
    width: range
    shared: range
    adds_biases: bool = True


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """``layers``: the numbers of the layers that have experts; others have a dense MLP.

    ``shared_width``: of an expert that runs for every token, if there is one; with ``shared_gate``
    its output is multiplied by a sigmoid of another projection. ``correction``: the router has
    one (``ops.experts.routing``). ``router_bias``, ``biases``: of the router, and of the experts'
    linears. ``part``: what of the mixture a rank has, if not all. Sizes are those of the whole.
    """

    num_experts: int
    width: int
    options: RouterOptions
    layers: frozenset[int]
    names: ExpertNames = ExpertNames()
    activation: ExpertActivation = "silu"
    shared_width: int | None = None
    shared_gate: bool = False
    correction: bool = False
    router_bias: bool = False
    biases: bool = False
    part: ExpertsPart | None = None

    @property
    def owned(self) -> ExpertsPart:
        """``part``, or all."""
        if self.part is not None:
            return self.part
        return ExpertsPart(
            experts=range(self.num_experts),
            width=range(self.width),
            shared=range(self.shared_width or 0),
        )

    def __post_init__(self) -> None:
        options = self.options
        for what, value, most in (
            ("the number of experts", self.num_experts, _MOST_EXPERTS),
            ("the width of an expert", self.width, _WIDEST),
            ("num_experts_per_tok", options.top_k, self.num_experts),
            ("n_group", options.num_groups, self.num_experts),
            ("topk_group", options.top_groups, options.num_groups),
        ):
            check_size(what, value, most)
        if self.shared_width is not None:
            check_size("the width of the shared expert", self.shared_width, _WIDEST)
        if self.num_experts % options.num_groups:
            raise ConfigError(
                f"{self.num_experts} experts cannot be divided into {options.num_groups} equal "
                "groups; n_group must divide the number of experts"
            )
        in_groups = options.top_groups * self.num_experts // options.num_groups
        if options.top_k > in_groups:
            raise ConfigError(
                f"{options.top_k} experts per token cannot be chosen from {options.top_groups} "
                f"groups with {in_groups} experts together"
            )
