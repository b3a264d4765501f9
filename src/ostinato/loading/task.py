"""What a model is for: to generate, to embed or to classify, by its config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from ostinato.loading.sentence import MODULES
from ostinato.models.json_file import read_object

Task = Literal["generate", "embed", "classify"]


def task_of(path: Path) -> Task:
    """The task of the checkpoint in the directory ``path``.

    Files that cannot be read raise when the model is loaded.
    """
    file = path / "config.json"
    architectures: Any = read_object(file).get("architectures") if file.is_file() else None
    names = architectures if isinstance(architectures, list) else []
    if any(str(name).endswith("ForSequenceClassification") for name in names):
        return "classify"
    if (path / MODULES).is_file() or any(map(_is_headless, map(str, names))):
        return "embed"
    return "generate"


def _is_headless(name: str) -> bool:
    """Whether it is a model without a head, or with one that fills in masked tokens."""
    if name.endswith("LMHeadModel"):
        return False
    return name.endswith(("Model", "ForMaskedLM", "ForPreTraining"))
