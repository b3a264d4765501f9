"""What a checkpoint of sentence-transformers says about embeddings: its pooling and its limits.

``modules.json`` lists the steps from text to embedding. A transformer, a pooling and a
normalisation are understood; any other step raises, since leaving it out would give other
embeddings.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ostinato.errors import ModelLoadError
from ostinato.models.json_file import read_object
from ostinato.models.pooling import POOLINGS, Pooling
from ostinato.quoting import said, shown

MODULES = "modules.json"
_LIMITS = "sentence_bert_config.json"
_LARGEST_LIST = 1 << 16
_IGNORED = ("Transformer", "Normalize")
_FLAGS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
}
_NAMES: dict[str, Pooling] = {"cls": "cls", "lasttoken": "last", "last": "last", "mean": "mean"}


@dataclass(frozen=True, kw_only=True)
class SentenceSettings:
    """``pooling`` and ``max_seq_length``: None if the checkpoint does not say."""

    pooling: Pooling | None = None
    max_seq_length: int | None = None
    do_lower_case: bool = False


def read_settings(path: Path) -> SentenceSettings:
    """The settings in the directory ``path``; the defaults if sentence-transformers made none."""
    if not (path / MODULES).is_file():
        return SentenceSettings()
    pooling: Pooling | None = None
    for module in _modules(path / MODULES):
        kind = str(module.get("type")).rpartition(".")[2]
        if kind == "Pooling":
            pooling = _read_pooling(path, module)
        elif kind not in _IGNORED:
            raise ModelLoadError(
                f"{path / MODULES} has a step {shown(module.get('type'))} between the model and "
                "its embeddings, which is not supported; use sentence-transformers for this model"
            )
    limits = read_object(path / _LIMITS) if (path / _LIMITS).is_file() else {}
    length = limits.get("max_seq_length")
    if length is not None and (type(length) is not int or length < 1):
        raise ModelLoadError(
            f"max_seq_length in {path / _LIMITS} is {shown(length)}; it must be a positive integer"
        )
    return SentenceSettings(
        pooling=pooling,
        max_seq_length=length,
        do_lower_case=limits.get("do_lower_case") is True,
    )


def _modules(file: Path) -> list[dict[str, Any]]:
    try:
        if file.stat().st_size > _LARGEST_LIST:
            raise ValueError("it is too large for a list of modules")
        modules = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
            raise ValueError("it is not a list of modules")
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file} cannot be read ({said(error)}); fetch it again") from error
    return modules


def _read_pooling(path: Path, module: dict[str, Any]) -> Pooling:
    folder = Path(str(module.get("path", "")))
    if folder.is_absolute() or ".." in folder.parts:
        raise ModelLoadError(
            f"{path / MODULES} places its pooling in {shown(str(folder))}, outside its directory"
        )
    file = path / folder / "config.json"
    stated = read_object(file)
    named = stated.get("pooling_mode")
    if named is not None:
        found = [_NAMES[named]] if isinstance(named, str) and named in _NAMES else []
    else:
        flags = [
            name for name, value in stated.items() if name.startswith("pooling_mode_") and value
        ]
        found = [_FLAGS[name] for name in flags if name in _FLAGS] if len(flags) == 1 else []
    if len(found) != 1:
        raise ModelLoadError(
            f"{file} asks for a pooling that is not supported; remove modules.json from a copy of "
            f"the model, and choose one of {', '.join(POOLINGS)} with embed(pooling=...)"
        )
    return found[0]
