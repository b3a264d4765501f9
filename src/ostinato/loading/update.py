"""New values for the weights of a model that runs: checked as a whole, then written in place.

No address changes, so graphs stay valid. Tensors go through the slots, or through transformers'
loading, that a checkpoint goes through when a model is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.errors import ConfigError, ModelLoadError
from ostinato.loading.slots import EMBEDDING, HEAD, has_own_head, unread_names
from ostinato.models.base import CausalLM
from ostinato.models.checkpoint import Checkpoint
from ostinato.models.given_tensors import GivenTensors, NamedTensors
from ostinato.models.native.decoder import Decoder
from ostinato.models.weight_slot import WeightSlot
from ostinato.offload.prefetch import PrefetchOffloader

if TYPE_CHECKING:
    from ostinato.models.hf.model import HFCausalLM


class WeightUpdate(ABC):
    """Checked tensors for a model. ``names``: of the weights that ``write`` changes."""

    names: frozenset[str]

    @abstractmethod
    def write(self) -> None:
        """Overwrite the weights, behind all work so far on the current stream."""


def prepare_update(model: CausalLM, weights: str | PathLike[str] | NamedTensors) -> WeightUpdate:
    """Check ``weights`` for ``model``: all names, shapes, dtypes and values. Changes nothing."""
    if model.uses_mrope:
        raise ConfigError(
            "update_weights does not support models that take images; build a new LLM from the "
            "new checkpoint"
        )
    source = _open(weights)
    if not source.tensors:
        raise ConfigError(
            f"there are no weights to write: {source.path} has no tensors; has the iterator been "
            "read before?"
        )
    if isinstance(model, Decoder):
        return _NativeUpdate(model, source)
    from ostinato.models.hf.model import HFCausalLM

    assert isinstance(model, HFCausalLM), "every model is one of these"
    return _GenericUpdate(model, source)


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
    """Writes through the decoder's weight slots."""

    def __init__(self, decoder: Decoder, source: Checkpoint) -> None:
        if any("language_model." in name for name in source.tensors):
            source = source.language_model()
        self._decoder, self._source = decoder, source
        self.names = frozenset(source.tensors)
        with self._in_place():
            slots = self._slots()
            source.check(slots, ignored=unread_names(decoder))
            self._check_head()
            source.check_finite(slots)

    def _in_place(self) -> AbstractContextManager[None]:
        """Inside, the slots of offloaded layers are in host memory, where their weights are."""
        offloader = self._decoder.offloader
        return (
            offloader.in_host_memory()
            if isinstance(offloader, PrefetchOffloader)
            else nullcontext()
        )

    def _slots(self) -> list[WeightSlot]:
        return [slot for slot in self._decoder.weight_slots() if slot.name in self.names]

    def _check_head(self) -> None:
        if self._decoder.lm_head is not None or HEAD not in self.names:
            return
        if EMBEDDING not in self.names or has_own_head(self._source):
            raise ModelLoadError(
                f"this model has no {HEAD} of its own: its embeddings are its head. Pass "
                f"{EMBEDDING} alone, or both with the same values"
            )

    def write(self) -> None:
        with self._in_place():
            self._source.copy_into(self._slots(), None, show_progress=False)


class _GenericUpdate(WeightUpdate):
    """Has transformers load the tensors into a second model in host memory, then copies them."""

    def __init__(self, model: HFCausalLM, source: Checkpoint) -> None:
        self._model = model
        self._staged = model.read_some(source)
        self.names = frozenset(self._staged)

    def write(self) -> None:
        self._model.write(self._staged)
