"""New values for the weights of a model that runs: checked as a whole, then written in place.

No address changes, so graphs stay valid. Tensors go through the slots, or through transformers'
loading, that a checkpoint goes through when a model is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ostinato.errors import ConfigError, ModelLoadError
from ostinato.loading.description import runs_alone
from ostinato.loading.slots import EMBEDDING, HEAD, has_own_head, slots_once, unread_names
from ostinato.models.base import CausalLM
from ostinato.models.checkpoint import Checkpoint
from ostinato.models.given_tensors import GivenTensors, NamedTensors
from ostinato.models.native.decoder import Decoder
from ostinato.models.weight_slot import WeightSlot
from ostinato.offload.prefetch import PrefetchOffloader
from ostinato.quoting import listed

if TYPE_CHECKING:
    from ostinato.models.hf.model import HFCausalLM


class WeightUpdate(ABC):
    """Checked tensors for a model. ``names``: of the weights that are written."""

    names: frozenset[str]

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors, one at a time, for ``write_tensors`` of other ranks."""

    @abstractmethod
    def write(self) -> None:
        """Overwrite the weights, behind all work so far on the current stream."""


def prepare_update(
    models: Sequence[CausalLM], weights: str | PathLike[str] | NamedTensors
) -> WeightUpdate:
    """Check ``weights``: all names, shapes, dtypes and values. Changes nothing.

    ``models``: one model, or a rank's forms of it. Names and shapes are the same on all ranks.
    """
    check_can_update(models)
    source = _open(weights)
    if not source.tensors:
        raise ConfigError(
            f"there are no weights to write: {source.path} has no tensors; has the iterator been "
            "read before?"
        )
    decoders = _decoders(models)
    in_whole = any("language_model." in name for name in source.tensors)
    if in_whole and (decoders or runs_alone(_generic(models).model.config)):
        source = source.language_model()
    if decoders:
        return _NativeUpdate(decoders, source)
    return _GenericUpdate(_generic(models), source)


def weight_names(models: Sequence[CausalLM]) -> frozenset[str]:
    """All weights that updates can write, by the names of ``WeightUpdate.names``."""
    decoders = _decoders(models)
    if decoders:
        return frozenset(slot.name for each in decoders for slot in each.weight_slots())
    return frozenset(name for name, _ in _generic(models).model.named_parameters())


def check_can_update(models: Sequence[CausalLM]) -> None:
    """Raises ConfigError if the weights of ``models`` cannot be updated."""
    if models[0].uses_mrope:
        raise ConfigError(
            "update_weights does not support models that take images; build a new LLM from the "
            "new checkpoint"
        )


def check_can_discard(models: Sequence[CausalLM]) -> None:
    """Raises ConfigError if updates could not write all weights of ``models`` again."""
    check_can_update(models)
    if not _decoders(models):
        config = _generic(models).model.config
        if getattr(config, "quantization_config", None) is not None:
            raise ConfigError(
                "the weights of a quantized model cannot be updated, so they must not be "
                "discarded; use sleep(level=1)"
            )


def write_tensors(models: Sequence[CausalLM], tensors: Mapping[str, torch.Tensor]) -> None:
    """Overwrite weights by some of ``WeightUpdate.tensors``, as they are."""
    decoders = _decoders(models)
    if decoders:
        _write(decoders, GivenTensors(tensors))
    else:
        _generic(models).write(tensors)


def _decoders(models: Sequence[CausalLM]) -> list[Decoder]:
    return [model for model in models if isinstance(model, Decoder)]


def _generic(models: Sequence[CausalLM]) -> HFCausalLM:
    from ostinato.models.hf.model import HFCausalLM  # imports transformers

    (model,) = models
    assert isinstance(model, HFCausalLM), "every other model is native"
    return model


def _open(weights: str | PathLike[str] | NamedTensors) -> Checkpoint:
    if not isinstance(weights, str | PathLike):
        return GivenTensors(weights)
    path = Path(weights).expanduser()
    if path.is_file():
        return Checkpoint(path.parent, only=path)
    if not path.is_dir():
        raise ModelLoadError(
            f"{path} does not exist; update_weights takes a safetensors file, a directory that has "
            "some, or pairs of a name and a tensor"
        )
    return Checkpoint(path)


class _NativeUpdate(WeightUpdate):
    """Writes through the decoders' weight slots."""

    def __init__(self, decoders: Sequence[Decoder], source: Checkpoint) -> None:
        self._decoders, self._source = decoders, source
        self._check_names()
        for decoder in decoders:
            source.check(_slots_of(decoder, source), ignored=unread_names(decoder))
        self._check_head()
        slots = {slot.name: slot for each in decoders for slot in _slots_of(each, source)}
        source.check_finite(slots.values())
        self.names = frozenset(slots)

    def _check_names(self) -> None:
        decoder = self._decoders[0]
        own = [slot.name for slot in decoder.weight_slots()]
        unknown = self._source.names_besides(own, unread_names(decoder))
        if unknown:
            near = get_close_matches(unknown[0], own, n=1, cutoff=0.0)
            raise ModelLoadError(
                f"this model has no weight called {listed(unknown)}, as in {self._source.path}; "
                f"use the names of the checkpoint that it was loaded from, such as {listed(near)}"
            )

    def _check_head(self) -> None:
        given = self._source.tensors
        if self._decoders[0].lm_head is not None or HEAD not in given:
            return
        if EMBEDDING not in given or has_own_head(self._source):
            raise ModelLoadError(
                f"this model has no {HEAD} of its own: its embeddings are its head. Pass "
                f"{EMBEDDING} alone, or both with the same values"
            )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._source.read(self.names, None)

    def write(self) -> None:
        _write(self._decoders, self._source)


def _slots_of(decoder: Decoder, source: Checkpoint) -> list[WeightSlot]:
    return [slot for slot in decoder.weight_slots() if slot.name in source.tensors]


def _write(decoders: Sequence[Decoder], source: Checkpoint) -> None:
    with ExitStack() as stack:
        for decoder in decoders:
            if isinstance(decoder.offloader, PrefetchOffloader):
                stack.enter_context(decoder.offloader.in_host_memory())
        for slots in slots_once(decoders):
            given = [slot for slot in slots if slot.name in source.tensors]
            source.copy_into(given, None, show_progress=False)


class _GenericUpdate(WeightUpdate):
    """Has transformers load the tensors into a second model in host memory, then copies them."""

    def __init__(self, model: HFCausalLM, source: Checkpoint) -> None:
        self._model = model
        self._staged = model.read_some(source)
        self.names = frozenset(self._staged)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._staged.items())

    def write(self) -> None:
        self._model.write(self._staged)
