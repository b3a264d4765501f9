"""Safetensors checkpoints: lists the tensors of a directory, and copies them into a model.

All headers are read and compared with the model before anything is allocated, so a checkpoint that
is incomplete, damaged or for another model fails at once, with the file's name. Pickle weights are
rejected: reading them can run code.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open

from ostinato.errors import ModelLoadError
from ostinato.models.finite_check import FiniteCheck
from ostinato.models.json_file import read_object
from ostinato.models.weight_slot import WeightSlot
from ostinato.progress import ProgressBar
from ostinato.quoting import listed, said, shown

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LARGEST_INDEX = 64 * 2**20
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
_PREFIX = "model."
_ENCODER_PARTS = (
    *("vision_tower.", "multi_modal_projector.", "embed_vision.", "vision_embedder."),
    *("audio_tower.", "embed_audio."),
)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Old conversions saved the rotary frequencies; we compute them from the config.
_HARMLESS = ("rotary_emb.inv_freq",)


# Ranges of a dimension, and the dimension.
Parts: TypeAlias = tuple[tuple[range, ...], int]
NO_PARTS: Mapping[str, Parts] = {}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint, from its file's header; ``dtype`` is safetensors' name for it.

    ``stored_as``: its name in the file, if it is another.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    stored_as: str | None = None


class Checkpoint:
    """The tensors of a directory of safetensors files. Keeps no file open."""

    def __init__(self, path: Path, *, only: Path | None = None) -> None:
        """``only``: the one file to read."""
        self.path = path
        self.tensors: dict[str, TensorInfo] = {}
        index = path / _INDEX
        if only is not None:
            placed, files = {}, [only]
        elif index.is_file():
            placed = _read_index(index)
            files = sorted({path / file for file in placed.values()})
        else:
            placed, files = {}, [_single_file(path)]
        for file in files:
            self._add(_read_header(file), placed)
        for name, file_name in placed.items():
            if name not in self.tensors:
                raise ModelLoadError(
                    f"{index} places the tensor {listed([name])} in {file_name}, which does not "
                    "have it; index and files belong to different checkpoints: fetch it again"
                )

    def _add(self, found: dict[str, TensorInfo], placed: Mapping[str, str]) -> None:
        """Add a file's tensors. If several files have one, the index says which to use."""
        for name, info in found.items():
            if name in placed and self.path / placed[name] != info.file:
                continue
            if name in self.tensors:
                raise ModelLoadError(
                    f"both {self.tensors[name].file} and {info.file} have the tensor "
                    f"{listed([name])}, and {_INDEX} does not say which to use; remove one of them"
                )
            self.tensors[name] = info

    def language_model(self) -> Checkpoint:
        """The language model of a model with encoders, as it would be saved by itself."""
        part = copy.copy(self)
        part.tensors = {}
        for name, info in self.tensors.items():
            if name.removeprefix(_PREFIX).startswith(_ENCODER_PARTS):
                continue
            own = name.removeprefix("language_model.")  # transformers has had two orders
            own = own.replace(f"{_PREFIX}language_model.", _PREFIX, 1)
            part.tensors[own] = replace(info, stored_as=name)
        return part

    def num_elements(self) -> int:
        """The total number of elements in all tensors."""
        return sum(math.prod(info.shape) for info in self.tensors.values())

    def read(
        self,
        names: Iterable[str],
        device: torch.device | None,
        parts: Mapping[str, Parts] = NO_PARTS,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Read the tensors ``names`` to ``device``, file by file; None: to host memory.

        Of tensors in ``parts``, only the given ranges of one dimension are read and concatenated.
        """
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.tensors[name].file, []).append(name)
        for file, its_names in by_file.items():
            try:
                with safe_open(file, framework="pt", device=str(device or "cpu")) as reader:
                    for name in its_names:
                        wanted, stored_as = parts.get(name), self.tensors[name].stored_as or name
                        if wanted is None:
                            yield name, reader.get_tensor(stored_as)
                        else:
                            yield name, part_of(reader.get_slice(stored_as), wanted)
            except (SafetensorError, OSError) as error:
                raise _damaged(file, error) from error

    @contextmanager
    def opened(self) -> Iterator[dict[str, Any]]:
        """Every tensor as a lazy safetensors slice."""
        with ExitStack() as stack:
            readers: dict[Path, Any] = {}
            slices = {}
            for name, info in self.tensors.items():
                if info.file not in readers:
                    readers[info.file] = stack.enter_context(safe_open(info.file, framework="pt"))
                slices[name] = readers[info.file].get_slice(info.stored_as or name)
            yield slices

    def check_num_layers(self, num_layers: int) -> None:
        """Raise if the config has more layers than tensors exist, before they are built."""
        if num_layers > len(self.tensors):
            raise ModelLoadError(
                f"{self.path / 'config.json'} asks for {num_layers:,} layers, but the checkpoint "
                f"has {len(self.tensors):,} tensors; it is incomplete or belongs to another config"
            )

    def check(self, slots: Iterable[WeightSlot], *, ignored: Iterable[str] = ()) -> None:
        """Raise unless the tensors match ``slots`` in names, shapes and dtypes.

        ``ignored``: names of others, or, with a dot at the end, how they begin.
        """
        wanted = {slot.name: slot for slot in slots}
        missing = [name for name in wanted if name not in self.tensors]
        if missing:
            if not any(name.startswith(_PREFIX) for name in self.tensors) and any(
                name.removeprefix(_PREFIX) in self.tensors for name in missing
            ):
                raise ModelLoadError(
                    f"the tensors in {self.path} have no {_PREFIX!r} before their names: this is a "
                    "base model, saved without its head. Save it as a language model, with "
                    "AutoModelForCausalLM"
                )
            raise ModelLoadError(
                f"{self.path} lacks {listed(missing)}, which its config.json asks for; the "
                "checkpoint is incomplete or belongs to another config"
            )
        extra = self.names_besides(wanted, ignored)
        if extra:
            raise ModelLoadError(
                f"{self.tensors[extra[0]].file} has {listed(extra)}, which this architecture does "
                "not use; running without would give wrong results. Is its config.json right?"
            )
        for name, slot in wanted.items():
            info = self.tensors[name]
            if info.shape != tuple(slot.shape):
                raise ModelLoadError(
                    f"the tensor {name} in {info.file} has the shape {list(info.shape)}; "
                    f"config.json asks for {list(slot.shape)}"
                )
            self.check_type(name)

    def names_besides(self, wanted: Iterable[str], ignored: Iterable[str]) -> list[str]:
        """The names of tensors that are neither ``wanted`` nor ``ignored``, as in ``check``."""
        ignored = list(ignored)
        known = {*wanted, *ignored}
        beginnings = tuple(name for name in ignored if name.endswith("."))
        unknown = [name for name in self.tensors if name not in known]
        return [n for n in unknown if not (n.endswith(_HARMLESS) or n.startswith(beginnings))]

    def check_type(self, name: str) -> None:
        """Raise for a weight that does not have a plain float dtype."""
        info = self.tensors[name]
        if info.dtype not in FLOAT_TYPES:
            raise ModelLoadError(
                f"the tensor {listed([name])} in {info.file} has dtype {info.dtype}; weights must "
                f"be one of {', '.join(FLOAT_TYPES)}: use an unquantized checkpoint"
            )

    def check_finite(self, slots: Iterable[WeightSlot]) -> None:
        """Raise for values that are not finite or overflow the dtype of their slot."""
        dtypes = {slot.name: slot.target.dtype for slot in slots}
        finite = FiniteCheck()
        for name, tensor in self.read(dtypes, None):
            finite.add(name, tensor, dtype=dtypes[name])
        finite.verify(self.path)

    def copy_into(
        self, slots: Iterable[WeightSlot], device: torch.device | None, *, show_progress: bool
    ) -> None:
        """Copy every tensor to its slot, converted to its dtype; zeros where nothing is read.

        Tensors are read to ``device`` first; None: to host memory, which takes none on the device.

        The device checks for values that are not finite or overflow the dtype; they raise once all
        is copied, which is the only wait for the device.
        """
        everything = list(slots)
        for slot in everything:
            if slot.parts == ():
                slot.target.zero_()
        slots = [slot for slot in everything if slot.parts != ()]
        targets = {slot.name: slot for slot in slots}
        parts = {slot.name: (slot.parts, slot.dim) for slot in slots if slot.parts is not None}
        tensors = self.read(targets, device, parts)
        finite = FiniteCheck()
        for name, tensor in ProgressBar(
            tensors,
            desc="loading weights",
            unit="tensor",
            total=len(targets),
            disable=not show_progress,
        ):
            slot = targets[name]
            finite.add(name, tensor, dtype=slot.target.dtype)
            if tensor.numel() == slot.target.numel():
                tensor = tensor.reshape(slot.target.shape)
            slot.target.copy_(tensor)
            if slot.offset:
                slot.target.add_(slot.offset)
        finite.verify(self.path)


def part_of(whole: Any, wanted: Parts) -> torch.Tensor:
    """The ``wanted`` part of a tensor or of a lazy safetensors slice."""
    row_ranges, dim = wanted
    if dim == 0:
        return torch.cat([whole[r.start : r.stop][:: r.step] for r in row_ranges])
    before = (slice(None),) * dim
    return torch.cat([whole[(*before, slice(r.start, r.stop))] for r in row_ranges], dim=dim)


def _read_index(index: Path) -> dict[str, str]:
    placed = read_object(index, largest=_LARGEST_INDEX).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
        raise ModelLoadError(
            f"{index} cannot be read as the index of a checkpoint: its weight_map is "
            f"{shown(placed)}, not a map from tensor names to file names; fetch it again"
        )
    files = sorted(set(placed.values()))
    outside = [file for file in files if Path(file).is_absolute() or ".." in Path(file).parts]
    if outside:
        raise ModelLoadError(
            f"{index} names files outside its directory: {listed(outside)}; a checkpoint's files "
            "belong beside its index. Do not use it, unless you know where it came from"
        )
    missing = [file for file in files if not _is_file(index.parent / file)]
    if missing:
        raise ModelLoadError(
            f"{listed(missing)} of the {len(files)} files that {index} lists cannot be found; "
            "fetch the rest of the checkpoint"
        )
    return placed


def _is_file(file: Path) -> bool:
    try:
        return file.is_file()
    except OSError:  # not a valid file name
        return False


def _single_file(path: Path) -> Path:
    if (path / _SINGLE).is_file():
        return path / _SINGLE
    found = sorted(file for file in path.glob("*.safetensors") if file.is_file())
    if len(found) == 1:
        return found[0]
    if found:
        raise ModelLoadError(
            f"{path} has {len(found)} .safetensors files and no {_INDEX} to say which belong "
            "together; fetch the index too"
        )
    pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    if pickles:
        raise ModelLoadError(
            f"{path} has its weights only as pickle files ({listed(pickles)}), which can run code "
            "when they are read; convert them once, if you trust them, with transformers: "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(new_directory)"
        )
    raise ModelLoadError(
        f"{path} has no .safetensors file; a model is a directory with config.json and its weights "
        "as safetensors (pickle weights are not read). For random weights: random_weights=True, "
        "or --random-weights"
    )


def _read_header(file: Path) -> dict[str, TensorInfo]:
    try:
        with safe_open(file, framework="pt") as reader:
            found = {}
            for name in reader.keys():  # noqa: SIM118  (not a mapping)
                part = reader.get_slice(name)
                found[name] = TensorInfo(file, tuple(part.get_shape()), part.get_dtype())
            return found
    except (SafetensorError, OSError) as error:
        raise _damaged(file, error) from error


def _damaged(file: Path, error: Exception) -> ModelLoadError:
    size = f"{file.stat().st_size} bytes" if file.is_file() else "not there"
    return ModelLoadError(
        f"{file} ({size}) cannot be read as safetensors: {said(error)}; it is damaged or was "
        "not copied completely: fetch it again"
    )
