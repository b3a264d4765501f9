"""Gives a transformers model its weights: exactly those of a checkpoint, or random ones.

transformers initialises missing tensors at random, drops unknown ones and converts any dtype. Here
all of that raises and names the tensor, as in the native decoder. Tensors that transformers allows
to be missing or left over stay allowed: tied weights, buffers that it computes, buffers that old
versions saved. Its renamings and conversions apply as usual.
"""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig, PretrainedConfig

from ostinato import compat
from ostinato.errors import ConfigError, ModelLoadError, OstinatoError
from ostinato.models.checkpoint import FLOAT_TYPES, Checkpoint
from ostinato.models.finite_check import FiniteCheck
from ostinato.models.hf.quiet import without_messages
from ostinato.models.hf.replaced.modules import own_copy
from ostinato.models.hf.support import without_interface
from ostinato.quoting import listed, said, shown

_PLAIN_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_MOST_PACKED = 32  # weights in one number of a quantized checkpoint, one bit each
_LARGEST_BUFFERS = 2**32  # bytes of tables, such as position tables
# Causal masks that old versions of transformers saved with each layer, and lists of positions.
_OLD_BUFFERS = re.compile(
    r"(^|\.)((attn|attention)\.(bias|masked_bias|causal_mask)|embeddings\.position_ids)$"
)
_POOLER = re.compile(r"(^|\.)pooler\.")
_THAN_WEIGHTS = "its checkpoint has weights for, which is incomplete or belongs to another config"
_EXPERT = re.compile(r"(.*experts)\.(\d+)\.(.*)", re.DOTALL)


def load_weights(
    checkpoint: Checkpoint,
    config: PretrainedConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING,
    without_head: bool = False,
    **options: Any,
) -> Any:
    """A model of ``config`` with the weights of ``checkpoint``, all finite, and no others.

    ``mapping``: transformers' classes by config. ``without_head``: the checkpoint may hold a head
    for the model, which is not loaded. ``options`` go to transformers' ``from_pretrained``.
    """
    model_class, config = _model_class(config, mapping)
    method = _quantization(checkpoint, config)
    checkpoint.check_num_layers(config.get_text_config().num_hidden_layers)
    limit = 2 * checkpoint.num_elements() * (_MOST_PACKED if method else 1)  # tied: built twice
    with no_larger_than(limit, _THAN_WEIGHTS):
        model, info = _read(checkpoint, model_class, config, method, dtype=dtype, **options)
    if without_head:
        _drop_head(checkpoint, info, model_class)
    _check_none_missing(checkpoint, info)
    _check_loaded(checkpoint, info)
    if method is None:
        _check_types(checkpoint, model)
    else:
        _check_shapes(checkpoint, model, model_class, config)
    model = model.to(device)
    _check_finite(checkpoint, model.state_dict())
    return model


def load_some_weights(checkpoint: Checkpoint, like: Any, **options: Any) -> dict[str, torch.Tensor]:
    """The weights that ``checkpoint`` has for a model of the class and config of ``like``.

    By their names in its ``state_dict``, in host memory, all finite. ``options``: as in
    ``load_weights``. Weights that share memory do so in ``like`` too, and the reverse.
    """
    model_class, config = type(like), own_copy(like.config)
    if _quantization(checkpoint, config) is not None:
        raise ConfigError(
            "update_weights does not support quantized models; build a new LLM from the new "
            "checkpoint"
        )
    with without_messages("transformers.modeling_utils", "seem corrupted"):  # so it calls a part
        model, info = _read(checkpoint, model_class, config, None, dtype=like.dtype, **options)
    _check_loaded(checkpoint, info)
    if info["missing_keys"]:  # of a whole checkpoint the same is dropped as when it was loaded
        _check_none_dropped(checkpoint, model)
    _check_types(checkpoint, model)
    patterns: Iterable[str] = model._keys_to_ignore_on_load_missing or ()
    found = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name not in info["missing_keys"]
        and (
            name in checkpoint.tensors or not any(re.search(pattern, name) for pattern in patterns)
        )
    }
    _check_finite(checkpoint, found)
    _check_ties(checkpoint, found, like.state_dict())
    return found


def _read(
    checkpoint: Checkpoint, model_class: Any, config: Any, method: str | None, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """transformers' model in host memory, and what it says about the checkpoint's tensors."""
    _check_names(checkpoint, model_class)
    try:
        # Buffers are filled from constants; the seed makes any random one reproducible.
        with (
            checkpoint.opened() as tensors,
            # Its table of mismatches: our error reports them.
            without_messages("transformers.modeling_utils", "LOAD REPORT"),
            torch.random.fork_rng([]),
        ):
            torch.default_generator.manual_seed(0)  # that of the CPU, where it is built
            loaded: tuple[Any, dict[str, Any]] = model_class.from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                ignore_mismatched_sizes=True,  # they raise below, by name
                output_loading_info=True,
                generation_config=GenerationConfig(),  # type: ignore[no-untyped-call]
                trust_remote_code=False,
                local_files_only=True,
                **options,
            )
    except (OstinatoError, MemoryError):
        raise
    except Exception as error:  # any failure must name the checkpoint
        if error.args == (options.get("attn_implementation"),):  # not in a table of its own
            raise without_interface(model_class.__name__) from error
        raise ModelLoadError(
            f"transformers cannot load {checkpoint.path} as {model_class.__name__}: {said(error)}; "
            + _advice(error, method)
        ) from error
    return loaded


def _check_finite(checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor]) -> None:
    finite = FiniteCheck()
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            finite.add(name, tensor, dtype=tensor.dtype)
    finite.verify(checkpoint.path)


def _check_ties(
    checkpoint: Checkpoint, found: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]
) -> None:
    """Raise unless the same weights are one, or equal, in ``found`` and in ``own``."""
    known: dict[int, str] = {}
    for name, tensor in found.items():
        first = known.setdefault(own[name].data_ptr(), name)
        if not torch.equal(found[first], tensor):
            raise ModelLoadError(
                f"{first} and {name} are one weight in this model, and they differ in "
                f"{checkpoint.path}; pass one of them, or both with the same values"
            )
    known = {}
    for name, tensor in found.items():
        first = known.setdefault(tensor.data_ptr(), name)
        if own[first].data_ptr() != own[name].data_ptr():
            raise ModelLoadError(f"{first} and {name} are two weights in this model; pass both")


def draw_weights(
    auto: Any,
    config: PretrainedConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    **options: Any,
) -> Any:
    """A model of ``config`` and the kind ``auto`` with random weights, the same for the same seed.

    ``options`` go to transformers' ``from_config``.
    """
    generators = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=generators), torch.device(device):
        torch.manual_seed(seed)
        return auto.from_config(own_copy(config), dtype=dtype, trust_remote_code=False, **options)


def _quantization(checkpoint: Checkpoint, config: Any) -> str | None:
    """The quantization method. transformers ignores methods that it does not know."""
    stated = getattr(config, "quantization_config", None)
    if stated is None:
        return None
    fields = stated if isinstance(stated, dict) else getattr(stated, "to_dict", dict)()
    bits = bool(fields.get("load_in_4bit") or fields.get("load_in_8bit"))
    method = fields.get("quant_method") or ("bitsandbytes" if bits else None)
    if not isinstance(method, str):
        raise ModelLoadError(
            f"the quantization_config in the config.json of {checkpoint.path} has the quant_method "
            f"{shown(method)}; it must be a name, such as 'mxfp4'"
        )
    return method if bits or method in compat.quantization_methods.demand() else None


def _advice(error: Exception, method: str | None) -> str:
    if method is None:
        return "the checkpoint is damaged or belongs to another config"
    quantized = f"its weights are quantized by {method}"
    if isinstance(error, ImportError):
        return f"{quantized}: install what that needs, or use an unquantized checkpoint"
    return (
        f"{quantized}, which may not run here, or the checkpoint is damaged: use an unquantized one"
    )


def _model_class(config: Any, mapping: Any) -> tuple[Any, Any]:
    """As ``AutoModelForCausalLM`` chooses, and its like."""
    model_class: Any = mapping[type(config)]
    if model_class.config_class == config.sub_configs.get("text_config"):
        config = config.get_text_config()
    return model_class, config


def check_size(
    auto: Any, config: PretrainedConfig, most_bytes: int | None, dtype: torch.dtype
) -> None:
    """Raise if a model of the kind ``auto`` does not fit, before any of it is built."""
    if most_bytes is None:
        return
    limit = most_bytes // dtype.itemsize
    reason = f"fits into the {most_bytes / 2**30:.2f} GiB that are free, in {dtype}"
    with torch.device("meta"), compat.no_init_weights.demand()(), no_larger_than(limit, reason):
        auto.from_config(own_copy(config), trust_remote_code=False)


@contextmanager
def no_larger_than(num_elements: int | None, reason: str) -> Iterator[None]:
    """Raise while a model is built on ``meta`` in this thread, if it has more weights than that.

    It uses no memory there, but a config can ask for any number of layers.
    """
    thread = threading.get_ident()
    built = {"parameters": 0, "buffers": 0}

    def count_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None or threading.get_ident() != thread or not parameter.is_meta:
            return
        built["parameters"] += parameter.numel()
        if num_elements is not None and built["parameters"] > num_elements:
            raise ModelLoadError(
                f"config.json asks for a larger model than {reason} (reached in "
                f"{type(module).__name__}, {name} of the shape {list(parameter.shape)})"
            )

    def count_buffer(module: nn.Module, name: str, buffer: torch.Tensor | None) -> None:
        if buffer is None or threading.get_ident() != thread or not buffer.is_meta:
            return
        built["buffers"] += buffer.numel() * buffer.element_size()
        if built["buffers"] > _LARGEST_BUFFERS:
            raise ModelLoadError(
                f"config.json asks for tables of more than {_LARGEST_BUFFERS:,} bytes (in "
                f"{type(module).__name__}, {name} of the shape {list(buffer.shape)}); is its "
                "longest sequence right?"
            )

    hooks = [
        register_module_parameter_registration_hook(count_parameter),
        register_module_buffer_registration_hook(count_buffer),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _check_names(checkpoint: Checkpoint, model_class: Any) -> None:
    """Raise for duplicate names, of which transformers drops one, and for gaps it would close."""
    prefix = f"{model_class.base_model_prefix}."
    twice = [name for name in checkpoint.tensors if f"{prefix}{name}" in checkpoint.tensors]
    if twice:
        raise ModelLoadError(
            f"{checkpoint.path} has {listed(twice)} with and without {prefix!r} before it; remove "
            "one of them"
        )
    experts: dict[tuple[str, str], set[str]] = {}
    for name in checkpoint.tensors:
        if match := _EXPERT.fullmatch(name):
            experts.setdefault((match[1], match[3]), set()).add(match[2])
    for (layer, weight), numbers in experts.items():
        missing = [n for n in map(str, range(len(numbers))) if n not in numbers]
        if missing:
            raise ModelLoadError(
                f"{checkpoint.path} lacks {listed([f'{layer}.{n}.{weight}' for n in missing])}, "
                f"and has {len(numbers)} others of that kind; the checkpoint is incomplete"
            )


def _drop_head(checkpoint: Checkpoint, info: dict[str, Any], model_class: Any) -> None:
    """Forget the tensors of a head: those outside the model, and its pooler."""
    prefix = f"{model_class.base_model_prefix}."
    has_head = any(name.startswith(prefix) for name in checkpoint.tensors)
    info["unexpected_keys"] = [
        name
        for name in info["unexpected_keys"]
        if not (_POOLER.search(name) or (has_head and not name.startswith(prefix)))
    ]


def _check_none_missing(checkpoint: Checkpoint, info: dict[str, Any]) -> None:
    if info["missing_keys"]:
        raise ModelLoadError(
            f"{checkpoint.path} lacks {listed(sorted(info['missing_keys']))}, which its "
            "config.json asks for; the checkpoint is incomplete or belongs to another config"
        )


def _check_none_dropped(checkpoint: Checkpoint, model: Any) -> None:
    """Raise for names that transformers takes for old buffers of ``model``, and drops."""
    patterns: Iterable[str] = model._keys_to_ignore_on_load_unexpected or ()
    prefix = f"{model.base_model_prefix}."
    known = {*model.state_dict(), *(name for name, _ in model.named_buffers())}
    dropped = [
        name
        for name in checkpoint.tensors
        if any(re.search(pattern, name) for pattern in patterns)
        and known.isdisjoint((name, f"{prefix}{name}", name.removeprefix(prefix)))
        and not _OLD_BUFFERS.search(name)
    ]
    if dropped:
        raise ModelLoadError(
            f"this model has no weight called {listed(dropped)}, as in {checkpoint.path}; use the "
            "names of the checkpoint that it was loaded from"
        )


def _check_loaded(checkpoint: Checkpoint, info: dict[str, Any]) -> None:
    path = checkpoint.path
    extra = sorted(name for name in info["unexpected_keys"] if not _OLD_BUFFERS.search(name))
    if extra:
        raise ModelLoadError(
            f"{path} has {listed(extra)}, which this architecture does not use; running without "
            "would give wrong results. Is its config.json right?"
        )
    for name, found, wanted in sorted(info["mismatched_keys"]):
        raise ModelLoadError(
            f"the tensor {listed([name])} in {path} has the shape {list(found)}; config.json asks "
            f"for {list(wanted)}"
        )


def _check_shapes(checkpoint: Checkpoint, model: Any, model_class: Any, config: Any) -> None:
    """Raise for shapes that differ from the config's, which transformers accepts with a quantizer.

    Weights that stay quantized have other shapes and dtypes.
    """
    with torch.device("meta"), compat.no_init_weights.demand()():
        wanted = model_class(copy.deepcopy(config)).state_dict()
    for name, tensor in model.state_dict().items():
        if tensor.dtype not in _PLAIN_TYPES or name not in wanted:
            continue
        if tensor.shape != wanted[name].shape:
            raise ModelLoadError(
                f"the tensor {listed([name])} in {checkpoint.path} has the shape "
                f"{list(tensor.shape)} once its quantization is undone; config.json asks for "
                f"{list(wanted[name].shape)}"
            )


def _check_types(checkpoint: Checkpoint, model: Any) -> None:
    """Raise for quantized weights; buffers may have any dtype."""
    odd = [name for name, info in checkpoint.tensors.items() if info.dtype not in FLOAT_TYPES]
    if not odd:
        return
    own: dict[str, torch.Tensor] = model.state_dict()
    patterns: Iterable[str] = model._keys_to_ignore_on_load_unexpected or ()
    prefix = f"{model.base_model_prefix}."
    for name in odd:
        names = (name, prefix + name, name.removeprefix(prefix))
        place = next((own[each] for each in names if each in own), None)
        if place is not None and not place.is_floating_point():
            continue
        if place is None and (
            _OLD_BUFFERS.search(name) or any(re.search(pattern, name) for pattern in patterns)
        ):
            continue
        checkpoint.check_type(name)
