"""Reads LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

Everything is checked before it is returned: an adapter that was trained with an option that is not
supported here would give wrong results, so such options are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ostinato.errors import ModelLoadError
from ostinato.lora.adapter_weights import AdapterWeights, Matrices, Target
from ostinato.models.checkpoint import Checkpoint
from ostinato.models.finite_check import FiniteCheck
from ostinato.models.json_file import check_numbers, read_object
from ostinato.quoting import listed, shown

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])(\.default)?\.weight")

# Options that change what an adapter computes, and the values that do not.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "fan_in_fan_out": (False, None),
    "layer_replication": (None, []),
    "megatron_config": (None,),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "use_qalora": (False, None),
    "use_bdlora": (False, None, {}),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
}
# Initialisations that change the model's own weights too.
_CHANGES_WEIGHTS = ("pissa", "olora", "corda", "loftq")


def read_adapter(path: Path, weights: AdapterWeights) -> Matrices:
    """The adapter in the directory ``path``, for ``AdapterWeights.write``, on the CPU.

    Raises ``ModelLoadError`` if it is missing, damaged, not supported, or for another model.
    """
    config = _read_config(path)
    checkpoint = Checkpoint(path, only=path / WEIGHTS)
    pairs = _pairs(checkpoint, weights)
    _check_targeted(path, config, pairs)
    ranks = {
        module: _check_shapes(checkpoint, module, pair, weights.targets[module])
        for module, pair in pairs.items()
    }
    scales = _scales(path, config, ranks)
    largest = max(ranks, key=ranks.__getitem__)
    if ranks[largest] > weights.max_rank:
        raise ModelLoadError(
            f"the adapter in {path} has rank {ranks[largest]} (of {largest}), but max_lora_rank is "
            f"{weights.max_rank}; build the LLM with max_lora_rank={ranks[largest]}"
        )
    finite = FiniteCheck()
    read = dict(checkpoint.read([n for pair in pairs.values() for n in pair], torch.device("cpu")))
    matrices = {}
    for module, (a_name, b_name) in pairs.items():
        b = weights.targets[module].ordered(read[b_name].float() * scales[module])
        for name, tensor in ((a_name, read[a_name]), (b_name, b)):
            finite.add(name, tensor, dtype=weights.dtype)
        matrices[module] = read[a_name].to(weights.dtype), b.to(weights.dtype)
    finite.verify(path / WEIGHTS)
    return matrices


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise ModelLoadError(
            f"there is no directory {path}; an adapter is a directory with {CONFIG} and {WEIGHTS}"
        )
    missing = [name for name in (CONFIG, WEIGHTS) if not (path / name).is_file()]
    if missing:
        pickled = (path / "adapter_model.bin").is_file() and missing == [WEIGHTS]
        raise ModelLoadError(
            f"{path} has no {' and no '.join(missing)}; an adapter is a directory with both, as "
            "PEFT's save_pretrained writes them"
            + (" (adapter_model.bin is a pickle file, which is not read)" if pickled else "")
        )
    file = path / CONFIG
    config = read_object(file)
    check_numbers(file, config)
    if config.get("peft_type") != "LORA":
        raise ModelLoadError(
            f"{file} has peft_type {shown(config.get('peft_type'))}; only LORA is supported"
        )
    for name, harmless in _UNSUPPORTED.items():
        if name in config and not any(config[name] == value for value in harmless):
            raise ModelLoadError(
                f"{file} has {name}={shown(config[name])}, which is not supported for adapters at "
                "run time; merge the adapter into the model with PEFT (merge_and_unload), and load "
                "the result"
            )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_WEIGHTS):
        raise ModelLoadError(
            f"{file} has init_lora_weights={shown(start)}, which changes the model's own weights; "
            "save the adapter with path_initial_model_for_weight_conversion, as PEFT describes"
        )
    for name in ("r", "lora_alpha"):
        value = config.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise ModelLoadError(f"{name} in {file} must be a positive number, got {shown(value)}")
    return config


def _pairs(checkpoint: Checkpoint, weights: AdapterWeights) -> dict[str, tuple[str, str]]:
    """The names of the tensors A and B, by the linear that they change."""
    found: dict[str, dict[str, str]] = {}
    targets = weights.targets
    for name in checkpoint.tensors:
        match = _TENSOR.fullmatch(name.removeprefix(_PREFIX))
        if match is not None and match["module"].startswith(weights.encoder_prefixes):
            raise ModelLoadError(
                f"{checkpoint.path / WEIGHTS} changes {match['module']}, a linear of the vision "
                "encoder; adapters can change the language model only. Merge the adapter into the "
                "model with PEFT (merge_and_unload), or train it again with "
                "exclude_modules='.*visual.*'"
            )
        if match is None or match["module"] not in targets:
            kinds = sorted({target.rpartition(".")[2] for target in targets})
            raise ModelLoadError(
                f"{checkpoint.path / WEIGHTS} has the tensor {listed([name])}, which is not LoRA "
                f"of a linear of this model; its layers are numbered 0 to {_last_layer(targets)}, "
                f"and adapters can change {', '.join(kinds)}. Is it an adapter of this model?"
            )
        checkpoint.check_type(name)
        found.setdefault(match["module"], {})[match["matrix"]] = name
    if not found:
        raise ModelLoadError(f"{checkpoint.path / WEIGHTS} has no tensors; save the adapter again")
    for module, pair in found.items():
        if len(pair) < 2:
            (lacking,) = {"A", "B"} - pair.keys()
            raise ModelLoadError(
                f"{checkpoint.path / WEIGHTS} lacks lora_{lacking} of {module}; it is incomplete: "
                "save the adapter again"
            )
    _check_spellings(checkpoint, found, targets)
    return {module: (pair["A"], pair["B"]) for module, pair in found.items()}


def _check_targeted(path: Path, config: dict[str, Any], modules: Iterable[str]) -> None:
    """Raise if the config does not name a linear that has tensors: PEFT would leave them out.

    Patterns are not looked at: they may be for names of another version of transformers.
    """
    targets, layers = config.get("target_modules"), config.get("layers_to_transform")
    layers = [layers] if isinstance(layers, int) else layers
    for module in modules:
        layer = int(module.partition(".layers.")[2].partition(".")[0])
        if isinstance(targets, list) and not f".{module}".endswith(
            tuple(f".{target}" for target in targets)
        ):
            field = "target_modules"
        elif isinstance(layers, list) and layers and layer not in layers:
            field = "layers_to_transform"
        else:
            continue
        raise ModelLoadError(
            f"{path / WEIGHTS} changes {module}, which {field} in {path / CONFIG} leaves out "
            f"({shown(config[field])}); the files belong to different adapters"
        )


def _check_spellings(
    checkpoint: Checkpoint, modules: Iterable[str], targets: Mapping[str, Target]
) -> None:
    """Raise if two names stand for the same linear."""
    seen: dict[tuple[int, int], str] = {}
    for module in modules:
        other = seen.setdefault((targets[module].gemm, targets[module].part), module)
        if other != module:
            raise ModelLoadError(
                f"{checkpoint.path / WEIGHTS} has both {other} and {module}, two names of the same "
                "linear; save the adapter again"
            )


def _last_layer(targets: Mapping[str, Target]) -> int:
    return max(int(name.partition(".layers.")[2].partition(".")[0]) for name in targets)


def _check_shapes(
    checkpoint: Checkpoint, module: str, pair: tuple[str, str], target: Target
) -> int:
    """The rank of one linear's adapter."""
    a, b = (checkpoint.tensors[name].shape for name in pair)
    rank = a[0] if len(a) == 2 else 0
    if rank < 1 or a != (rank, target.inputs) or b != (target.outputs, rank):
        raise ModelLoadError(
            f"the adapter of {module} in {checkpoint.path / WEIGHTS} has the shapes {list(a)} and "
            f"{list(b)}, but the model's linear takes [r, {target.inputs}] and "
            f"[{target.outputs}, r]; it belongs to another model"
        )
    return rank


def _scales(path: Path, config: dict[str, Any], ranks: Mapping[str, int]) -> dict[str, float]:
    """The factor of each linear's adapter: alpha / rank, or alpha / sqrt(rank) (rsLoRA)."""
    scales = {}
    for module, rank in ranks.items():
        stated = _by_pattern(path, config, "rank_pattern", module, config["r"])
        if stated != rank:
            raise ModelLoadError(
                f"{path / CONFIG} gives {module} the rank {shown(stated)}, but its tensors in "
                f"{path / WEIGHTS} have rank {rank}; the files belong to different adapters"
            )
        alpha = _by_pattern(path, config, "alpha_pattern", module, config["lora_alpha"])
        scales[module] = float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)
    return scales


def _by_pattern(
    path: Path, config: dict[str, Any], field: str, module: str, default: float
) -> float:
    """The value that a module has by ``field``, whose keys are the ends of names, or patterns."""
    patterns = config.get(field) or {}
    if not isinstance(patterns, dict) or not all(
        isinstance(value, int | float) for value in patterns.values()
    ):
        raise ModelLoadError(f"{field} in {path / CONFIG} must map names to numbers")
    for pattern, value in patterns.items():
        try:
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                return float(value)
        except re.error as error:
            raise ModelLoadError(
                f"{field} in {path / CONFIG} has the invalid pattern {shown(pattern)}: {error}"
            ) from error
    return default
