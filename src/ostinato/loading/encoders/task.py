"""What a model is for: to generate, to embed or to classify, by its config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from ostinato.loading.encoders.sentence import MODULES
from ostinato.loading.locate import find_model
from ostinato.models.json_file import read_object
from ostinato.models.native.shapes import SHAPES

Task = Literal["generate", "embed", "classify"]

# Named shapes that embed, with what differs from the defaults of transformers' configs. For a
# decoder that embeds, such as Qwen3-Embedding, name its shape and the task.
ENCODER_SHAPES: dict[str, dict[str, Any]] = {
    "bert-base": {"model_type": "bert"},
    "minilm-l6": {
        "model_type": "bert",
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
    },
    "modernbert-base": {"model_type": "modernbert"},
}


def find_task(name: str | None, *, random_weights: bool, show_progress: bool) -> Task:
    """The task of the model called ``name``, fetched from the hub if necessary.

    The embedded default (None) and the shapes of decoders generate.
    """
    if name is None:
        return "generate"
    if not random_weights:
        return task_of(find_model(name, show_progress=show_progress))
    if name in ENCODER_SHAPES:
        return "embed"
    return "generate" if name in SHAPES else task_of(Path(name).expanduser())


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
