"""A tiny model that talks, and the options of the engines that serve it in tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adapters import save_adapter
from tiny_models import save_talking

from ostinato import GraphConfig

TEMPLATE = "w7 {% for message in messages %}{{ message['content'] }} {% endfor %}w9"
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
    "kv_cache_memory_bytes": "4M",
    "show_progress": False,
    "enable_lora": True,
    "max_loras": 2,
    "graphs": GraphConfig(capture_sizes=[1, 4, 8]),
}


def save_served(directory: Path) -> tuple[str, str]:
    """The directories of a checkpoint and of an adapter for it."""
    model = save_talking(directory / "model", TEMPLATE)
    save_adapter(directory / "adapter", model)
    return str(model), str(directory / "adapter")
