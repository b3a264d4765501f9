"""Which tensors of a checkpoint go into native decoders: for loading, and for later updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ostinato.models.checkpoint import Checkpoint
from ostinato.models.native.decoder import Decoder
from ostinato.models.weight_slot import WeightSlot

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def slots_once(models: Sequence[Decoder]) -> Iterator[list[WeightSlot]]:
    """The slots of each model, without those of layers that an earlier one has too."""
    read: set[tuple[str, int]] = set()
    for decoder in models:
        places = {(slot.name, slot.target.data_ptr()): slot for slot in decoder.weight_slots()}
        yield [slot for place, slot in places.items() if place not in read]
        read.update(places)


def unread_names(decoder: Decoder) -> list[str]:
    """Tensors that a checkpoint of ``decoder`` may have in addition, as ``Checkpoint.check``."""
    tied = [HEAD] if decoder.lm_head is None else []
    return [*tied, *decoder.ignored_names()]


def has_own_head(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint has a head that differs from its embeddings.

    If the config ties them, we follow the checkpoint, like transformers.
    """
    if not {HEAD, EMBEDDING} <= checkpoint.tensors.keys():
        return False
    head, embedding = checkpoint.tensors[HEAD], checkpoint.tensors[EMBEDDING]
    if (head.shape, head.dtype) != (embedding.shape, embedding.dtype):
        return True
    tensors = dict(checkpoint.read([HEAD, EMBEDDING], torch.device("cpu")))
    return not torch.equal(tensors[HEAD], tensors[EMBEDDING])
