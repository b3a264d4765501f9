"""LoRA adapters with random weights, in PEFT's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers_tokens import greedy_tokens

LINEARS = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj", "c_fc", "c_proj"),
)  # of all families; a model has some of them


def save_adapter(
    path: Path,
    model: Path,
    *,
    rank: int = 8,
    targets: tuple[str, ...] = LINEARS,
    ranks: dict[str, int] | None = None,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Save an adapter of the checkpoint ``model``, strong enough to change its tokens.

    ``ranks``: other ranks than ``rank``, by target. ``config``: further fields of its config.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    with safe_open(model / "model.safetensors", framework="pt") as reader:
        for name in reader.keys():  # noqa: SIM118  (not a mapping)
            module = name.removesuffix(".weight")
            target = module.rpartition(".")[2]
            if target not in targets:
                continue
            outputs, inputs = reader.get_slice(name).get_shape()
            r = (ranks or {}).get(target, rank)
            prefix = f"base_model.model.{module}"
            a = torch.randn(r, inputs, generator=generator)
            b = torch.randn(outputs, r, generator=generator)
            tensors[f"{prefix}.lora_A.weight"] = a / inputs**0.5
            tensors[f"{prefix}.lora_B.weight"] = b * 0.2
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 16,
        "target_modules": list(targets),
        "inference_mode": True,
        **({"rank_pattern": ranks} if ranks else {}),
        **config,
    }
    (path / "adapter_config.json").write_text(json.dumps(fields))
    return path


def edit_config(path: Path, **fields: Any) -> Path:
    """Change fields of an adapter's config; None removes one."""
    file = path / "adapter_config.json"
    config = json.loads(file.read_text()) | fields
    kept = {name: value for name, value in config.items() if value is not None}
    file.write_text(json.dumps(kept))
    return path


class Merged:
    """A checkpoint in transformers, with an adapter merged into its weights, or without."""

    def __init__(self, model: Path, adapter: Path | None = None) -> None:
        import transformers

        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._model.generation_config.eos_token_id = None
        if adapter is None:
            return
        for name, change in changes_of(adapter).items():
            self._model.get_parameter(name).data += change

    def tokens(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Greedy tokens after ``prompt``."""
        return greedy_tokens(self._model, prompt, num_tokens)

    def logprobs(self, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        """The log-probability of each of ``tokens`` after ``prompt`` and those before it."""
        with torch.no_grad():
            logits = self._model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def changes_of(adapter: Path) -> dict[str, torch.Tensor]:
    """What an adapter adds to each weight, by the weight's name in the checkpoint."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale, changes = config["lora_alpha"] / config["r"], {}
    with safe_open(adapter / "adapter_model.safetensors", framework="pt") as reader:
        for name in reader.keys():  # noqa: SIM118  (not a mapping)
            if ".lora_A." in name:
                a, b = (reader.get_tensor(name.replace("lora_A", each)) for each in _PAIR)
                module = name.removeprefix("base_model.model.").partition(".lora_A")[0]
                changes[f"{module}.weight"] = scale * (b @ a)
    return changes


_PAIR = ("lora_A", "lora_B")
