"""The mixture of experts of a layer: its weights, stacked by expert, and their checkpoint names."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from ostinato.models.native.config.experts_config import ExpertsConfig
from ostinato.models.weight_slot import WeightSlot
from ostinato.ops.experts.mixture import Mixture

EmptyLinear = Callable[[int, int], nn.Linear]


class MixtureOfExperts(nn.Module):
    """The weights of one layer's experts, uninitialised. ``layer_kernels.py`` runs them.

    ``linear``: makes the linears of the shared expert. ``load`` [E] int64 counts the tokens that
    chose each expert since it was last set to zero, padding excluded.
    """

    def __init__(
        self,
        config: ExpertsConfig,
        hidden: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        linear: EmptyLinear,
    ) -> None:
        super().__init__()
        self._config = config
        experts, width = config.num_experts, config.width

        def empty(there: bool, *shape: int, dtype: torch.dtype = dtype) -> nn.Parameter | None:
            if not there:
                return None
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=False)

        def weight(*shape: int) -> nn.Parameter:
            made = empty(True, *shape)
            assert made is not None
            return made

        self.router = weight(experts, hidden)
        self.gate_up = weight(experts, 2 * width, hidden)
        self.down = weight(experts, hidden, width)
        self.router_bias = empty(config.router_bias, experts)
        self.gate_up_bias = empty(config.biases, experts, 2 * width)
        self.down_bias = empty(config.biases, experts, hidden)
        self.correction_bias = empty(config.correction, experts, dtype=torch.float32)
        shared = config.shared_width
        self.shared_gate_up = linear(hidden, 2 * shared) if shared else None
        self.shared_down = linear(shared, hidden) if shared else None
        self.shared_gate = linear(hidden, 1) if shared and config.shared_gate else None
        load = torch.zeros(experts, device=device, dtype=torch.int64)
        self.register_buffer("load", load, persistent=False)
        self.load: torch.Tensor

    @property
    def weights(self) -> Mixture:
        """What the operators take, at the current addresses: offload moves parameters."""
        return Mixture(
            options=self._config.options,
            router=self.router,
            gate_up=self.gate_up,
            down=self.down,
            router_bias=self.router_bias,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
            correction=self.correction_bias,
            load=self.load,
            activation=self._config.activation,
        )

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """The tensors by their checkpoint names."""
        names = self._config.names
        yield _slot(f"{prefix}.{names.router}.weight", self.router)
        if self.router_bias is not None:
            yield _slot(f"{prefix}.{names.router}.bias", self.router_bias)
        if self.correction_bias is not None:
            yield _slot(f"{prefix}.{names.correction}", self.correction_bias)
        yield from self._expert_slots(f"{prefix}.{names.experts}")
        if self.shared_gate_up is not None and self.shared_down is not None:
            gate, up = self.shared_gate_up.weight.chunk(2)
            shared = f"{prefix}.{names.shared}"
            yield _slot(f"{shared}.gate_proj.weight", gate)
            yield _slot(f"{shared}.up_proj.weight", up)
            yield _slot(f"{shared}.down_proj.weight", self.shared_down.weight)
        if self.shared_gate is not None:
            yield _slot(f"{prefix}.{names.shared_gate}.weight", self.shared_gate.weight)

    def _expert_slots(self, prefix: str) -> Iterator[WeightSlot]:
        names, width = self._config.names, self._config.width
        if names.transposed:
            yield from self._transposed_slots(prefix)
            return
        if names.stacked:
            yield _slot(f"{prefix}.gate_up_proj", self.gate_up)
            yield _slot(f"{prefix}.down_proj", self.down)
            return
        for number in range(self._config.num_experts):
            gate, up = self.gate_up[number].split(width)
            yield _slot(f"{prefix}.{number}.{names.gate}.weight", gate)
            yield _slot(f"{prefix}.{number}.{names.up}.weight", up)
            yield _slot(f"{prefix}.{number}.{names.down}.weight", self.down[number])

    def _transposed_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Gate and up alternate in the file, so there they are a dimension of their own."""
        in_turn = self.gate_up.unflatten(1, (2, -1)).permute(0, 3, 2, 1)
        shape = self.gate_up.mT.shape
        yield _slot(f"{prefix}.gate_up_proj", in_turn)._replace(shape=shape)
        yield _slot(f"{prefix}.down_proj", self.down.mT)
        if self.gate_up_bias is not None and self.down_bias is not None:
            in_turn = self.gate_up_bias.unflatten(1, (2, -1)).mT
            slot = _slot(f"{prefix}.gate_up_proj_bias", in_turn)
            yield slot._replace(shape=self.gate_up_bias.shape)
            yield _slot(f"{prefix}.down_proj_bias", self.down_bias)


def _slot(name: str, target: torch.Tensor) -> WeightSlot:
    target = target.detach()
    return WeightSlot(name, target, target.shape)
