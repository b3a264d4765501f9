"""Checkpoints of one config with different weights, transformers' tokens with any of them, and
groups that send them."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tiny_models import save_tiny
from transformers import AutoModelForCausalLM, PretrainedConfig

from ostinato import LLM, GraphConfig, SamplingParams, WeightGroup

NEW_TOKENS = 10
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
LONG = list(range(3, 60))
PROMPTS = [[5, 9, 33, 7, 21], LONG, [100]]


class WeightSets:
    """Checkpoints called "a", "b", ..., by seed; ``of``: the tensors as in the files."""

    def __init__(self, config: PretrainedConfig, directory: Path, names: str = "ab") -> None:
        self.paths = {
            name: save_tiny(config, directory / name, seed=seed) for seed, name in enumerate(names)
        }
        self._model: Any = AutoModelForCausalLM.from_pretrained(self.paths["a"])
        self._known: dict[Any, list[list[int]]] = {}

    def of(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.paths[name] / "model.safetensors")

    def tokens(self, name: str) -> list[list[int]]:
        """transformers' tokens with the weights of a checkpoint."""
        if name not in self._known:
            model = AutoModelForCausalLM.from_pretrained(self.paths[name])
            self._known[name] = _generate(model)
        return self._known[name]

    def mixed_tokens(self, tensors: dict[str, torch.Tensor]) -> list[list[int]]:
        """The same with these tensors, by transformers' names; "a" has the others."""
        self._model.load_state_dict(tensors, strict=False)
        return _generate(self._model)


def _generate(model: Any) -> list[list[int]]:
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    return [
        model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]


def open_llm(path: Path, device: Any = "cpu", **options: Any) -> LLM:
    defaults: dict[str, Any] = {
        "device": str(device),
        "dtype": "float32",
        "max_num_seqs": 4,
        "max_model_len": 128,
        "kv_cache_memory_bytes": "4M",
        "show_progress": False,
        "graphs": GraphConfig(capture_sizes=[1, 4]),
    }
    return LLM(path, **{**defaults, **options})


def tokens_of(llm: LLM) -> list[list[int]]:
    return [each.outputs[0].token_ids for each in llm.generate(PROMPTS, GREEDY)]


def free_address() -> str:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listening.getsockname()[1]}"


def join(world_size: int = 2, **options: Any) -> list[WeightGroup]:
    """All ranks of a group, in this process."""
    address = free_address()
    with ThreadPoolExecutor(world_size) as threads:
        joining = [
            threads.submit(
                WeightGroup, address, rank=rank, world_size=world_size, timeout_s=20.0, **options
            )
            for rank in range(world_size)
        ]
        return [each.result() for each in joining]
