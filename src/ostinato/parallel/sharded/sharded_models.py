"""The models of one rank: the base model and, with a shift threshold, the shift model.

Both use the same KV heads on the rank, so they share one KV cache. Logits come from the base
model's head, so the shift model has none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch

from ostinato.models.base import CausalLM
from ostinato.models.checkpoint import Checkpoint
from ostinato.models.native.config.decoder_config import DecoderConfig, first_layers
from ostinato.models.native.decoder import Decoder
from ostinato.models.native.layer import DecoderLayer
from ostinato.models.native.shapes import draw_parameters, initial_constant
from ostinato.models.native.weight_rows import WeightRows
from ostinato.models.weight_slot import WeightSlot
from ostinato.parallel.rank_context import RankContext
from ostinato.parallel.sharded.sharded_decoder import ShardedDecoder, build_base, build_shift
from ostinato.parallel.sharded.sharding import own_experts


def build_models(
    config: DecoderConfig,
    rank_context: RankContext,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_position: int | None = None,
) -> list[ShardedDecoder]:
    """The base model, and the shift model if the rank context has a threshold; uninitialised."""
    experts, replicas = None, rank_context.replicas
    if rank_context.spreads_experts:
        assert config.experts is not None, "checked before"
        per_replica = rank_context.layout.world_size
        index = replicas.index * per_replica + rank_context.rank
        experts = own_experts(config.experts.num_experts, replicas.size * per_replica, index)
    base = build_base(
        config,
        rank_context.layout,
        rank_context.rank,
        rank_context.comm_of,
        device=device,
        dtype=dtype,
        max_position=max_position,
        experts=experts,
        replicas=replicas,
    )
    if not rank_context.threshold:
        return [base]
    shift = build_shift(
        replace(config, tied_head=True),  # the head is the base model's
        rank_context.layout,
        rank_context.rank,
        rank_context.comm_of,
        device=device,
        dtype=dtype,
        max_position=max_position,
    )
    return [base, shift]


@torch.no_grad()
def draw_sharded_weights(models: Sequence[ShardedDecoder], seed: int) -> None:
    """Fill the parts of a decoder with the weights that ``draw_weights`` draws for the whole.

    Each layer is drawn whole, into memory that all layers reuse, and the rank's part is kept.
    """
    first = models[0]
    config, device = first.shard.config, first.device
    generator = torch.Generator(device).manual_seed(seed)
    slots = [{slot.name: slot for slot in model.weight_slots()} for model in models]
    for model in models:
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                constant = initial_constant(module, name)
                if constant is not None:
                    parameter.fill_(constant)
    whole = Decoder(
        first_layers(config, 1),
        device=device,
        dtype=first.dtype,
        max_position=1,
    )
    layers = {layer.mixture is not None: layer for layer in whole.decoder_layers()}
    outside = {slot.name: slot for slot in whole.weight_slots()}
    whole_rows = WeightRows.whole(config)

    def keep(part_of_whole: WeightSlot) -> None:
        if part_of_whole.target.numel() != part_of_whole.shape.numel():
            return  # a norm, repeated for each head
        drawn = _as_in_checkpoint(whole_rows.place(part_of_whole))
        for own in slots:
            slot = own.get(part_of_whole.name)
            if slot is None:
                continue
            if slot.parts:
                rows = torch.tensor([row for part in slot.parts for row in part], device=device)
                slot.target.copy_(drawn.index_select(slot.dim, rows).view(slot.target.shape))
            elif slot.parts is None:
                slot.target.copy_(drawn.view(slot.target.shape))  # the same on every rank

    # In the order of a whole decoder's modules.
    draw_parameters(whole.embed_tokens, generator)
    keep(outside["model.embed_tokens.weight"])
    for index in range(config.num_layers):
        has_experts = config.experts is not None and index in config.experts.layers
        if has_experts not in layers:
            layers[has_experts] = DecoderLayer(config, index, device=device, dtype=first.dtype)
        layer = layers[has_experts]
        draw_parameters(layer, generator)
        for slot in layer.weight_slots(f"model.layers.{index}"):
            keep(slot)
    if whole.lm_head is not None:
        draw_parameters(whole.lm_head, generator)
        keep(outside["lm_head.weight"])


def _as_in_checkpoint(slot: WeightSlot) -> torch.Tensor:
    """The target of ``slot``, which reads its whole tensor, in the order of that tensor's rows."""
    if not slot.parts or len(slot.parts) == 1:
        return slot.target.reshape(slot.shape)
    rows = torch.tensor([row for part in slot.parts for row in part], device=slot.target.device)
    return torch.empty_like(slot.target).index_copy_(slot.dim, rows, slot.target)


def weights_fingerprint(model: CausalLM, path: Path | None) -> str:
    """A hash of the model, equal on ranks that have parts of the same one.

    It covers the model's dimensions, and the name, shape and first row of every tensor of a
    checkpoint. Random weights, which have no ``path``, follow from dimensions and seed.
    """
    digest = hashlib.sha256(repr(_dimensions(model)).encode())
    if path is not None:
        checkpoint = Checkpoint(path)
        rows = {
            name: ((range(1),), 0) for name, t in checkpoint.tensors.items() if len(t.shape) > 1
        }
        for name, row in checkpoint.read(sorted(checkpoint.tensors), torch.device("cpu"), rows):
            digest.update(f"{name} {checkpoint.tensors[name].shape} {row.dtype}".encode())
            digest.update(row.float().numpy().tobytes())
    return digest.hexdigest()


def _dimensions(model: CausalLM) -> dict[str, object]:
    if not isinstance(model, ShardedDecoder):  # each rank has all of it
        return {"vocab_size": model.vocab_size, "layers": model.attention_specs}
    stated = {
        field.name: getattr(model.shard.config, field.name) for field in fields(DecoderConfig)
    }
    stated["early_layers"] = model.shard.num_layers  # of a SwiftKV model
    del stated["rotary"]  # computed, so its last bit may differ between machines
    return stated
