"""Finds the local directory of a model by its name, and fetches it from the hub if necessary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ostinato.errors import ModelLoadError
from ostinato.loading.default_model.embedded import embedded_model_path
from ostinato.models.native.shapes import SHAPES
from ostinato.progress import ProgressBar

_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.txt"]
_HUB_UNUSED = ["original/*", "consolidated*", "onnx/*"]


def find_model(name: str | None, *, show_progress: bool) -> Path:
    """The directory of the model called ``name``; None: the embedded default."""
    if name is None:
        return embedded_model_path(show_progress=show_progress)
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise ModelLoadError(f"{path} is a file; name the directory that has its config.json")
    if name.startswith(("/", "~", ".")):
        raise ModelLoadError(f"there is no directory {path} to load a model from; check the path")
    return _fetch(name, show_progress)


def _fetch(name: str, show_progress: bool) -> Path:
    """The local copy of a model on the Hugging Face hub, fetched if it is not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(
            snapshot_download(
                name,
                allow_patterns=_HUB_FILES,
                ignore_patterns=_HUB_UNUSED,
                tqdm_class=None if show_progress else _Silent,
            )
        )
    except (OSError, HFValidationError) as error:  # the hub's errors are OSErrors
        hint = (
            f"{name} is also a named shape: random_weights=True, or --random-weights, runs it "
            "without its weights"
            if name in SHAPES
            else "check the name and the connection, or name a local directory"
        )
        raise ModelLoadError(
            f"there is no directory {name!r}, and it could not be fetched from the Hugging Face "
            f"hub; {hint}. The hub said: {str(error).strip()}"
        ) from error


class _Silent(ProgressBar):
    """A progress bar that shows nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"disable": True})
