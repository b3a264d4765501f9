"""Rotary positions: frequencies from transformers, and a table of angles.

The frequencies of a model never change here. Schemes that change them with the length of the
sequence (``dynamic``, ``longrope``) are right up to the length at which they would change, and
``DecoderConfig.max_position`` ends there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ostinato.compat import rope_functions
from ostinato.errors import ConfigError
from ostinato.quoting import said, shown

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from ostinato.models.native.stated_config import StatedConfig

# Keys that say that only a part of each head is turned.
_PARTIAL = ("partial_rotary_factor",)
# Tables have a row for every position.
LONGEST_SEQUENCE = 2**27
_TYPES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """The frequencies of a head's pairs (head_dim / 2 of them) and the scale of cos and sin."""

    inverse_frequencies: tuple[float, ...]
    scale: float

    @classmethod
    def from_hf(cls, config: PretrainedConfig | StatedConfig, head_dim: int) -> Rotary:
        """The frequencies that transformers computes for this config."""
        rope: dict[str, Any] = config.rope_parameters
        try:
            rotary = cls._from_hf(config, head_dim)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(f"rope_parameters {shown(rope)}: {said(error)}") from error
        numbers = (*rotary.inverse_frequencies, rotary.scale)
        if len(numbers) != head_dim // 2 + 1 or not all(map(math.isfinite, numbers)):
            raise ConfigError(
                f"rope_parameters {shown(rope)} do not give a finite frequency to each of the "
                f"{head_dim // 2} pairs of a head"
            )
        return rotary

    @classmethod
    def _from_hf(cls, config: PretrainedConfig | StatedConfig, head_dim: int) -> Rotary:
        rope: dict[str, Any] = config.rope_parameters
        # The two most common kinds without transformers, whose import takes a second.
        if rope["rope_type"] in ("default", "llama3") and rope.keys().isdisjoint(_PARTIAL):
            exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
            frequencies, scale = 1.0 / rope["rope_theta"] ** exponents, 1.0
            if rope["rope_type"] == "llama3":
                frequencies = _stretch_long_waves(frequencies, rope)
        else:
            compute = rope_functions.demand()[rope["rope_type"]]
            frequencies, scale = compute(config, torch.device("cpu"))
        return cls(inverse_frequencies=tuple(frequencies.tolist()), scale=float(scale))

    def table(self, max_position: int, device: torch.device) -> torch.Tensor:
        """Cosines, then sines, of positions 0 to max_position - 1: [max_position, head_dim]."""
        if device.type == "meta":  # computing without memory would import all of Dynamo
            return torch.empty((max_position, 2 * len(self.inverse_frequencies)), device=device)
        frequencies = torch.tensor(self.inverse_frequencies, dtype=torch.float32, device=device)
        positions = torch.arange(max_position, dtype=torch.float32, device=device)
        angles = torch.outer(positions, frequencies)
        return torch.cat((angles.cos(), angles.sin()), dim=-1) * self.scale


def _stretch_long_waves(frequencies: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    """Llama 3's way to longer contexts: waves longer than the old context turn ``factor`` times
    slower, short ones as before, and those between go over from one to the other.
    """
    factor, low, high = (rope[k] for k in ("factor", "low_freq_factor", "high_freq_factor"))
    context = rope["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    kept = (context / wavelengths - low) / (high - low)  # in this order, to the last bit
    between = (1 - kept) * frequencies / factor + kept * frequencies
    stretched = torch.where(wavelengths > context / low, frequencies / factor, between)
    return torch.where(wavelengths < context / high, frequencies, stretched)


def rotary_obstacle(config: PretrainedConfig | StatedConfig) -> str | None:
    """Why the native decoder cannot give this model its positions; None where it can."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type")
    if kind not in _TYPES:
        return f"its rotary positions are of type {shown(kind)}, not one of {', '.join(_TYPES)}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return f"it rotates only a part ({shown(rope['partial_rotary_factor'])}) of each head"
    return None
