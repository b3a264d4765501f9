"""Safetensors checkpoints: which tensors a directory holds, and copying them into a model.

All headers are read and compared with what the model needs before anything is allocated, so a
checkpoint that is incomplete, damaged or another model's fails at once and names the file. Pickle
weights are refused: reading them can run code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from ostinato.errors import ModelLoadError
from ostinato.runtime.models.decoder import WeightSlot

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Old conversions saved the rotary frequencies; we compute them from the config.
_HARMLESS = ("rotary_emb.inv_freq",)


# Stretches of a dimension, and which dimension.
Parts: TypeAlias = tuple[tuple[range, ...], int]
_NO_PARTS: Mapping[str, Parts] = {}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint, by its file's header; ``dtype`` as safetensors names it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class Checkpoint:
    """The tensors of a directory of safetensors files. Holds no file open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, TensorInfo] = {}
        index = path / _INDEX
        if index.is_file():
            placed = _read_index(index)
            files = sorted({path / file for file in placed.values()})
        else:
            placed, files = {}, [_single_file(path)]
        for file in files:
            self.tensors.update(_read_header(file))
        for name, file_name in placed.items():
            if name not in self.tensors:
                raise ModelLoadError(
                    f"{index} places the tensor {name} in {file_name}, which does not have it; the "
                    "index and the files are not of one checkpoint: fetch it again"
                )

    def num_elements(self) -> int:
        """How many numbers all tensors hold together."""
        return sum(math.prod(info.shape) for info in self.tensors.values())

    def read(
        self, names: Iterable[str], device: torch.device, parts: Mapping[str, Parts] = _NO_PARTS
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors called ``names``, on ``device``, file by file.

        Of those in ``parts``, only these stretches of one dimension are read and joined.
        """
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.tensors[name].file, []).append(name)
        for file, its_names in by_file.items():
            try:
                with safe_open(file, framework="pt", device=str(device)) as reader:
                    for name in its_names:
                        wanted = parts.get(name)
                        yield name, _read(reader, name, wanted)
            except (SafetensorError, OSError) as error:
                raise _damaged(file, error) from error

    def check(self, slots: Iterable[WeightSlot], *, ignored: Iterable[str] = ()) -> None:
        """Raise unless the tensors are those that ``slots`` names, in shape and kind."""
        wanted = {slot.name: slot for slot in slots}
        missing = [name for name in wanted if name not in self.tensors]
        if missing:
            raise ModelLoadError(
                f"{self.path} lacks {_listed(missing)}, which its config.json asks for; the "
                "checkpoint is incomplete or belongs to another config"
            )
        known = wanted.keys() | set(ignored)
        extra = [n for n in self.tensors if n not in known and not n.endswith(_HARMLESS)]
        if extra:
            raise ModelLoadError(
                f"{self.tensors[extra[0]].file} has {_listed(extra)}, for which this architecture "
                "has no place; running without would give wrong results. Is its config.json right?"
            )
        for name, slot in wanted.items():
            info = self.tensors[name]
            if info.shape != tuple(slot.shape):
                raise ModelLoadError(
                    f"the tensor {name} in {info.file} has the shape {list(info.shape)}; "
                    f"config.json asks for {list(slot.shape)}"
                )
            if info.dtype not in _FLOAT_TYPES:
                raise ModelLoadError(
                    f"the tensor {name} in {info.file} is of type {info.dtype}; weights must be "
                    f"one of {', '.join(_FLOAT_TYPES)}: use an unquantized checkpoint"
                )

    def copy_into(
        self, slots: Iterable[WeightSlot], device: torch.device, *, show_progress: bool
    ) -> None:
        """Copy every tensor to its slot, converted to its dtype; zeros where nothing is read."""
        everything = list(slots)
        for slot in everything:
            if slot.parts == ():
                slot.target.zero_()
        slots = [slot for slot in everything if slot.parts != ()]
        targets = {slot.name: slot.target for slot in slots}
        parts = {slot.name: (slot.parts, slot.dim) for slot in slots if slot.parts is not None}
        tensors = self.read(targets, device, parts)
        for name, tensor in tqdm(
            tensors,
            desc="loading weights",
            unit="tensor",
            total=len(targets),
            disable=not show_progress,
        ):
            targets[name].copy_(tensor)


def _read(reader: Any, name: str, wanted: Parts | None) -> torch.Tensor:
    if wanted is None:
        whole: torch.Tensor = reader.get_tensor(name)
        return whole
    stretches, dim = wanted
    part = reader.get_slice(name)
    if dim == 0:
        return torch.cat([part[r.start : r.stop] for r in stretches])
    return torch.cat([part[:, r.start : r.stop] for r in stretches], dim=1)


def _read_index(index: Path) -> dict[str, str]:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        placed = {str(name): str(file) for name, file in content["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(
            f"{index} cannot be read as the index of a checkpoint ({error!r}); fetch it again"
        ) from error
    missing = sorted({file for file in placed.values() if not (index.parent / file).is_file()})
    if missing:
        raise ModelLoadError(
            f"{_listed(missing)} of the {len(set(placed.values()))} files that {index} lists "
            "cannot be found; fetch the rest of the checkpoint"
        )
    return placed


def _single_file(path: Path) -> Path:
    if (path / _SINGLE).is_file():
        return path / _SINGLE
    found = sorted(path.glob("*.safetensors"))
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
            f"{path} has its weights as pickle files only ({_listed(pickles)}), which can run code "
            "when they are read; convert them once, where you trust them, with transformers: "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(new_directory)"
        )
    raise ModelLoadError(
        f"{path} has no .safetensors file; a model is a directory with config.json and its weights "
        "as safetensors (pickle weights are not read). For made-up weights: random_weights=True, "
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
        f"{file} ({size}) cannot be read as safetensors: {error}; it is damaged or was not copied "
        "completely: fetch it again"
    )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
