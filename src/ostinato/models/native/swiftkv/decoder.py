"""SwiftKV: a decoder whose late layers run only for tokens that need logits.

The early layers run for all tokens. The keys and values of all late layers come from the hidden
state after the early ones, so a token can run the late layers without the others: in a prompt, only
the last token does. ``AttentionMetadata.logits_indices`` selects the tokens; without it all run.
``convert`` turns any native decoder into such a model.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ostinato.models.native.decoder import Decoder
from ostinato.models.native.swiftkv.config import SwiftKVConfig
from ostinato.models.native.swiftkv.layers import LateLayers
from ostinato.models.weight_slot import WeightSlot


class WithLateLayers(Decoder):
    """A decoder of the early layers, followed by the late ones. None: there are none.

    ``forward`` returns states of all tokens; states of tokens not in ``logits_indices`` must not be
    used for logits. ``compute_logits`` is the plain decoder's.
    """

    late: LateLayers | None

    def add_late_layers(self, late: LateLayers | None) -> None:
        """Call it once."""
        self.late = late
        if late is not None:
            self.attention_specs = [*self.attention_specs, *late.attention_specs]

    @property
    def selects_tokens(self) -> bool:
        return self.late is not None

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(input_ids, positions)
        if self.late is None:
            return hidden
        result: torch.Tensor = self.late(hidden, positions, self.rotary_tables)
        return result

    def ignored_names(self) -> list[str]:
        return [] if self.late is None else self.late.ignored_names()


class SwiftKVDecoder(WithLateLayers):
    """A ``CausalLM`` on one device. ``decoder_layers`` are the early layers."""

    def __init__(
        self,
        config: SwiftKVConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_position: int | None = None,
    ) -> None:
        super().__init__(config.early, device=device, dtype=dtype, max_position=max_position)
        self.config = config.decoder
        self.add_late_layers(
            LateLayers(config, config.decoder, device=device, dtype=dtype)
            if config.late_layers
            else None
        )

    def _own_slots(self) -> Iterator[WeightSlot]:
        yield from super()._own_slots()
        if self.late is not None:
            yield from self.late.weight_slots()


@torch.no_grad()
def convert(decoder: Decoder, num_key_value_layers: int) -> SwiftKVDecoder:
    """The SwiftKV model that training would start from, with copies of ``decoder``'s weights.

    A checkpoint on disk does not need this: a model whose config is not ``trained`` reads a plain
    decoder's checkpoint.
    """
    config = SwiftKVConfig(decoder=decoder.config, num_key_value_layers=num_key_value_layers)
    model = SwiftKVDecoder(
        config, device=decoder.device, dtype=decoder.dtype, max_position=decoder.max_position
    )
    weights = {slot.name: slot.target for slot in decoder.weight_slots()}
    for slot in model.weight_slots():
        slot.target.copy_(weights[slot.name])
    return model
