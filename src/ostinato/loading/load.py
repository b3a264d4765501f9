"""From a model's name to a model that can run: ``load_model``.

A name is a local directory, a name on the Hugging Face hub, a named shape (with random weights), or
nothing at all: the embedded default. Models that the native decoder can run are read straight
into its fused parameters; every other causal LM goes through transformers' modules, and
``LoadedModel.generic_reason`` says why. Code from checkpoints is never run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ostinato.errors import ConfigError
from ostinato.loading.description import (
    ModelDescription,
    NativeConfig,
    describe,
    describe_shape,
    errors_named,
)
from ostinato.loading.free_memory import FreeMemory, check_fit, free_memory
from ostinato.loading.locate import find_model
from ostinato.loading.progress import progress_bars
from ostinato.loading.slots import has_own_head, slots_once, unread_names
from ostinato.loading.tokenizer import eos_token_ids, read_tokenizer
from ostinato.models.base import CausalLM
from ostinato.models.checkpoint import Checkpoint
from ostinato.models.native.config.decoder_config import DecoderConfig
from ostinato.models.native.config.raw_config import RawConfig
from ostinato.models.native.decoder import Decoder
from ostinato.models.native.shapes import draw_weights
from ostinato.models.native.swiftkv.config import SwiftKVConfig
from ostinato.models.native.swiftkv.decoder import SwiftKVDecoder
from ostinato.offload.offload_config import OffloadConfig
from ostinato.offload.prefetch import PrefetchOffloader, offload_bytes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from ostinato.loading.description import ModelConfig
    from ostinato.models.hf.model import HFCausalLM
    from ostinato.parallel.rank_context import RankContext
    from ostinato.parallel.sharded.sharded_decoder import ShardedDecoder

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DEFAULT_SHAPE = "smollm2-135m"
_STACKED = ".experts.gate_up_proj"  # how the name of all experts of a layer in one tensor ends


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model, ready to run, with its config and tokenizer.

    ``model`` may be one rank's part; ``shift`` is then another part of it, for small batches.
    ``path`` is the directory it came from: None for named shapes. ``tokenizer`` is None if there is
    none, and for random weights. ``generic_reason`` says why the model does not run on the native
    decoder; None if it does.
    """

    model: CausalLM
    path: Path | None
    config: ModelConfig
    tokenizer: Any | None
    eos_token_ids: frozenset[int]
    generic_reason: str | None
    shift: CausalLM | None = None


def load_model(
    name: str | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    random_weights: bool = False,
    seed: int = 0,
    max_position: int | None = None,
    show_progress: bool = True,
    free_memory: FreeMemory = free_memory,
    rank_context: RankContext | None = None,
    tokenizer: bool = True,
    swiftkv_layers: int | None = None,
    offload: OffloadConfig | None = None,
) -> LoadedModel:
    """Load the model called ``name``; None is the embedded default.

    ``max_position``: the longest sequence that will be run, which limits tables that grow with it.
    With ``random_weights`` the weights are drawn from ``seed`` and only the config is read. With a
    ``rank_context``, only this rank's part of the model is loaded; a rank that sees no text does
    not need the ``tokenizer``. ``swiftkv_layers`` turns a plain model into a SwiftKV model: all
    layers after that number compute keys and values from the output of the last one before them.
    ``offload``: which layers keep their weights in host memory.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype is {dtype}; choose one of {', '.join(map(str, _DTYPES))}")
    build = _Build(device, dtype, max_position, show_progress, free_memory, rank_context, offload)
    path: Path | None
    if random_weights:
        path, described = describe_shape(name or _DEFAULT_SHAPE)
    else:
        path = find_model(name, show_progress=show_progress)
        described = describe(path)
    _check_can_split(rank_context, described)
    if swiftkv_layers is not None:
        described = described.as_swiftkv(swiftkv_layers)
    if offload is not None:
        _check_can_offload(described)
    if random_weights or path is None:
        model, *shift = build.random(path, described, seed)
    else:
        model, *shift = build.from_files(path, described)
    config = described.config
    return LoadedModel(
        model=model,
        path=path,
        config=config,
        tokenizer=read_tokenizer(path) if tokenizer and path and not random_weights else None,
        eos_token_ids=eos_token_ids(path, config, model.vocab_size),
        generic_reason=described.generic_reason,
        shift=shift[0] if shift else None,
    )


def _check_can_split(rank_context: RankContext | None, described: ModelDescription) -> None:
    if rank_context is None:
        return
    layout = rank_context.layout
    spread = ", enable_expert_parallel" if rank_context.spreads_experts else ""
    ranks = (
        f"several ranks (tensor_parallel_size {layout.tp}, ulysses_sequence_parallel_size "
        f"{layout.sp}{spread})"
    )
    if described.generic_reason is not None:
        raise ConfigError(
            f"only models of the native decoder run on {ranks}; this one does not: "
            f"{described.generic_reason}"
        )
    decoder = _decoder_config(described.native_config)
    if decoder.latent is not None and layout.dcp > 1:
        raise ConfigError(
            f"decode_context_parallel_size is {layout.dcp}, but the cache of models with latent "
            "attention is not split over ranks; leave it out"
        )
    if spread and decoder.experts is None:
        raise ConfigError(
            "enable_expert_parallel is on, but the model has no mixture of experts; leave it out"
        )


def _check_can_offload(described: ModelDescription) -> None:
    reason = described.generic_reason
    if reason is None and isinstance(described.native_config, SwiftKVConfig):
        reason = "it is a SwiftKV model"
    if reason is not None:
        raise ConfigError(
            f"offload needs a model of the native decoder; this one is not: {reason}. Leave "
            "it out, and use a smaller dtype or a GPU with more memory if the model does not fit"
        )


@dataclass(frozen=True)
class _Build:
    """Builds a model from its config: a list of one, or of a rank's parts."""

    device: torch.device
    dtype: torch.dtype
    max_position: int | None
    show_progress: bool
    free_memory: FreeMemory
    rank_context: RankContext | None
    offload: OffloadConfig | None

    def random(
        self, path: Path | None, described: ModelDescription, seed: int
    ) -> Sequence[CausalLM]:
        if described.generic_reason is not None:
            with errors_named((path or Path()) / "config.json"):
                hf_config = as_hf(described.config)
                model = _hf_class(hf_config).from_config(
                    hf_config,
                    device=self.device,
                    dtype=self.dtype,
                    seed=seed,
                    max_model_len=self.max_position,
                    most_bytes=self.free_memory(self.device),
                )
            return [model]
        config = described.native_config
        self._check_decoders_fit("the model", self._decoders(config, "meta"))
        if self.rank_context is not None:
            from ostinato.parallel.sharded.sharded_models import draw_sharded_weights

            parts = self._parts(config, self.device, self.rank_context)
            draw_sharded_weights(parts, seed)
            return parts
        models = self._decoders(config, self.device)
        draw_weights(models[0], seed)
        _bind_slots(models)
        return models

    def from_files(self, path: Path, described: ModelDescription) -> Sequence[CausalLM]:
        checkpoint = Checkpoint(path)
        if described.whole is not None:
            checkpoint = checkpoint.language_model()
        if described.generic_reason is not None:
            self._check_fit(str(path), checkpoint.num_elements() * self.dtype.itemsize)
            with errors_named(path / "config.json"), progress_bars(self.show_progress):
                hf_config = as_hf(described.config)
                model = _hf_class(hf_config).from_pretrained(
                    path,
                    config=hf_config,
                    device=self.device,
                    dtype=self.dtype,
                    max_model_len=self.max_position,
                    checkpoint=checkpoint,
                )
            return [model]
        config = described.native_config
        checkpoint.check_num_layers(_decoder_config(config).num_layers)
        if _decoder_config(config).tied_head and has_own_head(checkpoint):
            config = _untied(config)
        config = _named_as_in(checkpoint, config)
        plans = self._decoders(config, "meta")
        for plan in plans:
            checkpoint.check(plan.weight_slots(), ignored=unread_names(plan))
        self._check_decoders_fit(str(path), plans)
        models = self._decoders(config, self.device)
        for slots in slots_once(models):
            for device in dict.fromkeys(slot.target.device for slot in slots):
                own = [slot for slot in slots if slot.target.device == device]
                checkpoint.copy_into(own, device, show_progress=self.show_progress)
        _bind_slots(models)
        return models

    def _decoders(self, config: NativeConfig, device: torch.device | str) -> Sequence[Decoder]:
        device = torch.device(device)
        if self.rank_context is not None:
            return self._parts(config, device, self.rank_context)
        dtype, max_position = self.dtype, self.max_position
        if isinstance(config, SwiftKVConfig):
            return [SwiftKVDecoder(config, device=device, dtype=dtype, max_position=max_position)]
        offloader = None
        if self.offload is not None and device.type != "meta":
            layers = self.offload.layers_of(config.num_layers)
            offloader = PrefetchOffloader(layers, self.offload.prefetch, device)
        return [
            Decoder(
                config, device=device, dtype=dtype, max_position=max_position, offloader=offloader
            )
        ]

    def _parts(
        self, config: NativeConfig, device: torch.device, rank_context: RankContext
    ) -> Sequence[ShardedDecoder]:
        from ostinato.parallel.sharded.sharded_models import build_models
        from ostinato.parallel.sharded.swiftkv_sharded import build_swiftkv_models

        dtype, max_position = self.dtype, self.max_position
        if isinstance(config, SwiftKVConfig):
            return build_swiftkv_models(
                config, rank_context, device=device, dtype=dtype, max_position=max_position
            )
        return build_models(
            config, rank_context, device=device, dtype=dtype, max_position=max_position
        )

    def _check_decoders_fit(self, what: str, plans: Sequence[Decoder]) -> None:
        """``plans``: the models, on ``meta``."""
        needed = _bytes_of(plans)
        if self.offload is not None:
            in_host, in_slots = offload_bytes(list(plans[0].decoder_layers()), self.offload)
            if self.device.type != "cpu":
                needed -= in_host
                host, part = torch.device("cpu"), f"the offloaded part of {what}"
                check_fit(part, in_host, host, self.dtype, self.free_memory)
            needed += in_slots
        self._check_fit(what, needed)

    def _check_fit(self, what: str, needed: int) -> None:
        check_fit(what, needed, self.device, self.dtype, self.free_memory)


def _bind_slots(models: Sequence[Decoder]) -> None:
    for model in models:
        if isinstance(model.offloader, PrefetchOffloader):
            model.offloader.bind_slots()


def as_hf(config: ModelConfig) -> PretrainedConfig:
    """The config as a transformers object."""
    return config.to_hf() if isinstance(config, RawConfig) else config


def _hf_class(config: PretrainedConfig) -> type[HFCausalLM]:
    """The class that runs a model of ``config`` through transformers' modules."""
    from ostinato.models.hf.vision.vision_language import HFVisionLM, takes_images

    if takes_images(config):
        return HFVisionLM
    from ostinato.models.hf.model import HFCausalLM

    return HFCausalLM


def _bytes_of(models: Sequence[Decoder]) -> int:
    tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
    once = {id(tensor): tensor for tensor in tensors}  # models may share layers
    return sum(tensor.numel() * tensor.element_size() for tensor in once.values())


def _decoder_config(config: NativeConfig) -> DecoderConfig:
    return config.decoder if isinstance(config, SwiftKVConfig) else config


def _untied(config: NativeConfig) -> NativeConfig:
    if isinstance(config, SwiftKVConfig):
        return replace(config, decoder=replace(config.decoder, tied_head=False))
    return replace(config, tied_head=False)


def _named_as_in(checkpoint: Checkpoint, config: NativeConfig) -> NativeConfig:
    """``config`` with the names of experts that the checkpoint has, stacked or one by one."""
    if isinstance(config, SwiftKVConfig) or config.experts is None:
        return config
    if config.experts.names.transposed or not any(
        name.endswith(_STACKED) for name in checkpoint.tensors
    ):
        return config
    experts = replace(config.experts, names=config.experts.names.as_stacked())
    return replace(config, experts=experts)
