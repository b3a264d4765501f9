"""RoPE: frequencies from transformers, and a table of cosines and sines.

The frequencies of a model are fixed here. Schemes that change them with the length of the sequence
(``dynamic``, ``longrope``) are right up to the length at which they would change, which is where
``DecoderConfig.max_position`` ends.
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

    from ostinato.models.native.config.raw_config import RawConfig

_PARTIAL = "partial_rotary_factor"
# Tables have a row for every position.
LONGEST_SEQUENCE = 2**27
_TYPES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """The frequencies of a head's rotated pairs and the scale of their cos and sin.

    Here pairs are (i, i + head_dim / 2), with unrotated ones (``num_fixed``) after rotated ones.
    For models that pair differently, the rows of queries and keys are read in another order,
    ``head_rows``; scores do not depend on it.
    """

    inverse_frequencies: tuple[float, ...]
    scale: float
    num_fixed: int = 0
    interleaved: bool = False  # the model pairs (2i, 2i + 1)

    @classmethod
    def none(cls, head_dim: int, *, interleaved: bool = False) -> Rotary:
        """No rotation."""
        pairs = head_dim // 2
        return cls(inverse_frequencies=(), scale=1.0, num_fixed=pairs, interleaved=interleaved)

    @classmethod
    def from_hf(
        cls,
        config: PretrainedConfig | RawConfig,
        head_dim: int,
        *,
        interleaved: bool = False,
        layer_type: str | None = None,
    ) -> Rotary:
        """The frequencies that transformers computes for this config, or a layer type in it."""
        rope = rope_kinds(config)[layer_type]
        rotated, odd = divmod(int(head_dim * rope.get(_PARTIAL, 1.0)), 2)
        if _PARTIAL in rope and (odd or not rotated):
            raise ConfigError(
                f"rope_parameters {shown(rope)} do not rotate whole pairs of head_dim {head_dim}"
            )
        try:
            frequencies, scale = _frequencies(config, 2 * rotated, layer_type)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(f"rope_parameters {shown(rope)}: {said(error)}") from error
        if len(frequencies) != rotated or not all(map(math.isfinite, (*frequencies, scale))):
            raise ConfigError(
                f"rope_parameters {shown(rope)} do not give a finite frequency to each of the "
                f"{rotated} pairs of a head"
            )
        return cls(
            inverse_frequencies=frequencies,
            scale=scale,
            num_fixed=head_dim // 2 - rotated,
            interleaved=interleaved,
        )

    @property
    def head_rows(self) -> tuple[range, ...]:
        """The rows of a query or key head, in the order that pairs them as above."""
        half, fixed = len(self.inverse_frequencies), self.num_fixed
        end = 2 * half
        if self.interleaved:
            first, second = range(0, end, 2), range(1, end, 2)
        else:
            first, second = range(half), range(half, end)
        rows = (first, range(end, end + fixed), second, range(end + fixed, end + 2 * fixed))
        return tuple(part for part in rows if part)

    @property
    def reorders(self) -> bool:
        """Whether ``head_rows`` are in another order than in the checkpoint."""
        rows = [row for part in self.head_rows for row in part]
        return rows != sorted(rows)

    def table(self, max_position: int, device: torch.device) -> torch.Tensor:
        """Cosines, then sines, of positions 0 to max_position - 1: [max_position, head_dim]."""
        if device.type == "meta":  # computing without memory would import all of Dynamo
            pairs = len(self.inverse_frequencies) + self.num_fixed
            return torch.empty((max_position, 2 * pairs), device=device)
        frequencies = torch.tensor(self.inverse_frequencies, dtype=torch.float32, device=device)
        positions = torch.arange(max_position, dtype=torch.float32, device=device)
        angles = torch.outer(positions, frequencies)
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        fixed = angles.new_zeros(max_position, self.num_fixed)
        return torch.cat((cos, fixed + 1, sin, fixed), dim=-1)


def rope_kinds(config: PretrainedConfig | RawConfig) -> dict[str | None, dict[str, Any]]:
    """The config's rope_parameters by layer type; those of all layers under None."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if rope and all(isinstance(each, dict) for each in rope.values()):
        return dict(rope.items())
    return {None: rope}


def _frequencies(
    config: PretrainedConfig | RawConfig, rotary_dim: int, layer_type: str | None
) -> tuple[tuple[float, ...], float]:
    """The frequencies of a head's first ``rotary_dim`` rows, and the scale of cos and sin."""
    rope = rope_kinds(config)[layer_type]
    # The two most common kinds without transformers, whose import takes a second.
    if rope["rope_type"] in ("default", "llama3"):
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        frequencies, scale = 1.0 / rope["rope_theta"] ** exponents, 1.0
        if rope["rope_type"] == "llama3":
            frequencies = _stretch_long_waves(frequencies, rope)
    else:
        compute = rope_functions.demand()[rope["rope_type"]]
        kind = {} if layer_type is None else {"layer_type": layer_type}
        frequencies, scale = compute(config, torch.device("cpu"), **kind)
    return tuple(frequencies.tolist()), float(scale)


def _stretch_long_waves(frequencies: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    """Llama 3's scaling for longer contexts.

    Wavelengths beyond the old context are scaled by ``factor``, short ones are kept, and those in
    between are interpolated.
    """
    factor, low, high = (rope[k] for k in ("factor", "low_freq_factor", "high_freq_factor"))
    context = rope["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    kept = (context / wavelengths - low) / (high - low)  # in this order, to the last bit
    between = (1 - kept) * frequencies / factor + kept * frequencies
    stretched = torch.where(wavelengths > context / low, frequencies / factor, between)
    return torch.where(wavelengths < context / high, frequencies, stretched)


def rotary_unsupported_reason(
    config: PretrainedConfig | RawConfig, *, partial: bool = False, by_layer_type: bool = False
) -> str | None:
    """Why the native decoder does not support this model's RoPE; None if it does.

    ``partial``: its family may rotate a part of each head. ``by_layer_type``: it states RoPE for
    each type of layers.
    """
    kinds = rope_kinds(config)
    if by_layer_type:
        for layer_type in config.layer_types:
            if layer_type not in kinds:
                return f"its rope_parameters do not state RoPE of {shown(layer_type)} layers"
    elif None not in kinds:
        return f"its rope_parameters differ by type of layer ({shown(sorted(map(str, kinds)))})"
    for rope in kinds.values():
        kind = rope.get("rope_type")
        if kind not in _TYPES:
            return f"its RoPE type is {shown(kind)}, not one of {', '.join(_TYPES)}"
        part = rope.get(_PARTIAL, 1.0)
        if part != 1.0 and not (partial and type(part) in (int, float) and 0 < part < 1):
            return f"it rotates only a part ({shown(part)}) of each head"
    return None
