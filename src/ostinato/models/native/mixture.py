"""The mixture of experts of a layer: its weights, stacked by expert, and their checkpoint names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from ostinato.models.native.config.experts_config import ExpertsConfig
from ostinato.models.weight_slot import WeightSlot
from ostinato.ops.experts.mixture import Mixture

EmptyLinear = Callable[[int, int], nn.Linear]


class MixtureOfExperts(nn.Module):
    """The weights of one layer's experts, uninitialised. ``layer_kernels.py`` runs them.

    ``config.owned`` of them; the router is whole. ``linear``: makes the linears of the shared
    expert. ``load`` [E] int64 counts the tokens that chose each owned expert since it was last set
    to zero, padding excluded.
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
        part = config.owned
        experts, own, width = config.num_experts, len(part.experts), len(part.width)

        def empty(there: bool, *shape: int, dtype: torch.dtype = dtype) -> nn.Parameter | None:
            if not there:
                return None
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=False)

        def weight(*shape: int) -> nn.Parameter:
            made = empty(True, *shape)
            assert made is not None
            return made

        self.router = weight(experts, hidden)
        self.gate_up = weight(own, 2 * width, hidden)
        self.down = weight(own, hidden, width)
        self.router_bias = empty(config.router_bias, experts)
        self.gate_up_bias = empty(config.biases, own, 2 * width)
        self.down_bias = empty(config.biases, own, hidden)
        self.correction_bias = empty(config.correction, experts, dtype=torch.float32)
        shared = len(part.shared)
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
            first=self._config.owned.experts.start,
        )

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """The tensors by their checkpoint names, each with the part of it that this rank has."""
        names = self._config.names
        yield _slot(f"{prefix}.{names.router}.weight", self.router)
        if self.router_bias is not None:
            yield _slot(f"{prefix}.{names.router}.bias", self.router_bias)
        if self.correction_bias is not None:
            yield _slot(f"{prefix}.{names.correction}", self.correction_bias)
        yield from self._expert_slots(f"{prefix}.{names.experts}")
        if self.shared_gate_up is not None and self.shared_down is not None:
            own, size = self._config.owned.shared, self._config.shared_width or 0
            gate, up = self.shared_gate_up.weight.chunk(2)
            yield from _gated_slots(
                f"{prefix}.{names.shared}",
                ("gate_proj", "up_proj", "down_proj"),
                (gate, up, self.shared_down.weight),
                own,
                size,
            )
        if self.shared_gate is not None:
            yield _slot(f"{prefix}.{names.shared_gate}.weight", self.shared_gate.weight)

    def ignored_names(self, prefix: str) -> Iterator[str]:
        """The names of experts that other ranks have."""
        names, owned = self._config.names, self._config.owned.experts
        if names.transposed or names.stacked:
            return
        for number in range(self._config.num_experts):
            if number not in owned:
                for linear in (names.gate, names.up, names.down):
                    yield f"{prefix}.{names.experts}.{number}.{linear}.weight"

    def _expert_slots(self, prefix: str) -> Iterator[WeightSlot]:
        names, part, size = self._config.names, self._config.owned, self._config.width
        width = len(part.width)
        if names.transposed:
            yield from self._transposed_slots(prefix)
            return
        if names.stacked:
            up = range(part.width.start + size, part.width.stop + size)
            gate_up = _slot(f"{prefix}.gate_up_proj", self.gate_up)
            yield self._some_experts(_ranges(gate_up, 1, 2 * size, part.width, up))
            down = _slot(f"{prefix}.down_proj", self.down)
            yield self._some_experts(_ranges(down, 2, size, part.width))
            return
        linears = (names.gate, names.up, names.down)
        for place, number in enumerate(part.experts):
            weights = (*self.gate_up[place].split(width), self.down[place])
            yield from _gated_slots(f"{prefix}.{number}", linears, weights, part.width, size)

    def _transposed_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Gate and up alternate in the file, so there they are a dimension of their own."""
        part, size = self._config.owned, self._config.width
        pairs = range(2 * part.width.start, 2 * part.width.stop)
        in_turn = self.gate_up.unflatten(1, (2, -1)).permute(0, 3, 2, 1)
        gate_up = _slot(f"{prefix}.gate_up_proj", in_turn)._replace(shape=self.gate_up.mT.shape)
        yield self._some_experts(_ranges(gate_up, 2, 2 * size, pairs))
        down = _slot(f"{prefix}.down_proj", self.down.mT)
        yield self._some_experts(_ranges(down, 1, size, part.width))
        if self.gate_up_bias is not None and self.down_bias is not None:
            in_turn = self.gate_up_bias.unflatten(1, (2, -1)).mT
            slot = _slot(f"{prefix}.gate_up_proj_bias", in_turn)
            slot = slot._replace(shape=self.gate_up_bias.shape)
            yield self._some_experts(_ranges(slot, 1, 2 * size, pairs))
            slot = self._some_experts(_slot(f"{prefix}.down_proj_bias", self.down_bias))
            yield slot if part.adds_biases else slot._replace(parts=())

    def _some_experts(self, slot: WeightSlot) -> WeightSlot:
        """``slot`` of the owned experts, in a tensor of all."""
        part = self._config.owned
        return _ranges(slot, 0, self._config.num_experts, part.experts)


def _gated_slots(
    prefix: str,
    names: Sequence[str],
    weights: Sequence[torch.Tensor],
    own: range,
    size: int,
) -> Iterator[WeightSlot]:
    """Gate, up and down of an expert of width ``size``, of which there is the part ``own``."""
    for name, weight, dim in zip(names, weights, (0, 0, 1), strict=True):
        yield _ranges(_slot(f"{prefix}.{name}.weight", weight), dim, size, own)


def _ranges(slot: WeightSlot, dim: int, size: int, *own: range) -> WeightSlot:
    """``slot`` for these ranges of ``dim``, which has ``size`` rows in the file."""
    if sum(map(len, own)) == size:
        return slot
    assert slot.parts is None, "a rank has part of the experts, or of their width"
    shape = list(slot.shape)
    shape[dim] = size
    return slot._replace(shape=torch.Size(shape), parts=own, dim=dim)


def _slot(name: str, target: torch.Tensor) -> WeightSlot:
    target = target.detach()
    return WeightSlot(name, target, target.shape)
