"""The weights of a mixture of experts and how it routes: what its operator and kernels take."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from ostinato.ops.experts.routing import RouterOptions

# ``clamped_swiglu`` is GPT-OSS's: both sides clamped, another slope, an offset of the second.
ExpertActivation = Literal["silu", "clamped_swiglu"]


class Mixture(NamedTuple):
    """The weights of a mixture of E experts of the same width, and how it routes.

    ``router`` [E, hidden], ``gate_up`` [E, 2 * width, hidden], ``down`` [E, hidden, width], with
    biases [E], [E, 2 * width] and [E, hidden], all of one dtype and dense. ``correction`` [E]
    float32: see ``route``. ``load`` [E] int64: how many tokens chose each expert, counted in place.

    A rank may have only some of the experts, from number ``first`` on: ``gate_up``, ``down`` and
    their biases then have that many. Others add nothing, and are not counted.
    """

    options: RouterOptions
    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    router_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    correction: torch.Tensor | None = None
    load: torch.Tensor | None = None
    activation: ExpertActivation = "silu"
    first: int = 0

    @property
    def num_experts(self) -> int:
        return self.router.shape[0]

    @property
    def num_own(self) -> int:
        """The number of experts that are here."""
        return self.gate_up.shape[0]

    @property
    def width(self) -> int:
        return self.down.shape[2]
