"""Which layers keep their weights in host memory, and how far ahead they are copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.errors import ConfigError
from ostinato.graphs.policy.sizes import check_positive_int
from ostinato.options import Foreign, option, user_options
from ostinato.quoting import shown


@user_options(
    example="group",
    foreign={
        "offload_group_size": Foreign("write group"),
        "offload_num_in_group": Foreign("write offloaded"),
        "offload_prefetch_step": Foreign("write prefetch"),
    },
)
@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """The last ``offloaded`` of every ``group`` layers are in host memory."""

    group: int = option(4, "Layers in a group.")
    offloaded: int = option(1, "The number of layers at the end of each group that are offloaded.")
    prefetch: int = option(
        1,
        "How many offloaded layers ahead a layer is copied, and the number of layers on the device "
        "that the copies take turns with. With 1, a copy runs while the layers that are not "
        "offloaded do; with 2, also while the offloaded layer before it does.",
    )

    def __post_init__(self) -> None:
        for name in ("group", "offloaded", "prefetch"):
            check_positive_int(name, getattr(self, name))
        if self.offloaded > self.group:
            raise ConfigError(
                f"offloaded is {self.offloaded}, but a group has only {self.group} layers; lower "
                "offloaded or raise group"
            )

    @classmethod
    def parse(cls, text: str) -> OffloadConfig:
        """From ``text`` such as "4", "4,1" or "4,1,1": group, offloaded, prefetch."""
        parts = text.split(",")
        if not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
            parts = []
        if not 1 <= len(parts) <= 3:
            raise ConfigError(
                f"offload takes group,offloaded,prefetch, for example 4,1,1, got {shown(text)}"
            )
        return cls(**dict(zip(("group", "offloaded", "prefetch"), map(int, parts), strict=False)))

    def layers_of(self, num_layers: int) -> Sequence[int]:
        """The offloaded ones of ``num_layers`` layers; raises if that saves no memory."""
        resident = self.group - self.offloaded
        layers = [layer for layer in range(num_layers) if layer % self.group >= resident]
        if not layers:
            raise ConfigError(
                f"offload keeps the last {self.offloaded} of every {self.group} layers in host "
                f"memory, but this model has {num_layers} layers, so it would keep none there; "
                "lower group"
            )
        if len(layers) <= self.prefetch:
            raise ConfigError(
                f"offload keeps {len(layers)} of this model's {num_layers} layers in host memory, "
                f"but prefetch {self.prefetch} needs room for all of them on the device, which "
                "saves nothing; lower prefetch or group, or raise offloaded"
            )
        return layers
