"""From a model's name to a model that can run: ``load_model``.

A name is a local directory, a name on the Hugging Face hub, a named shape (with random weights), or
nothing at all: the embedded default. Models that the native decoder can run are read straight
into its fused parameters; every other causal LM goes through transformers' own modules, and
``LoadedModel.generic_reason`` says why. Code from checkpoints is never run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ostinato.errors import ConfigError, ModelLoadError
from ostinato.runtime.models.base import CausalLM
from ostinato.runtime.models.checkpoint import Checkpoint
from ostinato.runtime.models.decoder import Decoder
from ostinato.runtime.models.decoder_config import DecoderConfig, obstacle
from ostinato.runtime.models.locate import find_model
from ostinato.runtime.models.shapes import SHAPES, draw_weights, shape_config
from ostinato.runtime.models.stated_config import StatedConfig, read_stated_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from ostinato.runtime.parallel.place import RankPlace
    from ostinato.runtime.parallel.sharded_decoder import ShardedDecoder

    ModelConfig = PretrainedConfig | StatedConfig

FreeMemory = Callable[[torch.device], int | None]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DEFAULT_SHAPE = "smollm2-135m"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
# Wholly described by their files.
_PLAIN_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model, ready to run, and what belongs to it.

    ``model`` may be one rank's part; ``shift`` is then another part of it, for small batches.
    ``path`` is the directory it came from: None for named shapes. ``tokenizer`` is None where there
    is none, and for random weights. ``generic_reason`` says why the model does not run on the
    native decoder; None if it does.
    """

    model: CausalLM
    path: Path | None
    config: ModelConfig
    tokenizer: Any | None
    eos_token_ids: frozenset[int]
    generic_reason: str | None
    shift: CausalLM | None = None


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be taken on ``device``; None where that cannot be known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + cached
    meminfo = Path("/proc/meminfo")
    if device.type != "cpu" or not meminfo.is_file():
        return None
    for line in meminfo.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


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
    place: RankPlace | None = None,
    tokenizer: bool = True,
) -> LoadedModel:
    """Load the model called ``name``; None is the embedded default.

    ``max_position``: the longest sequence that will be run, which limits tables that grow with it.
    With ``random_weights`` the weights are drawn from ``seed`` and only the config is read. With a
    ``place`` among several ranks, this rank's part of the model is loaded and no more; a rank that
    sees no text can do without the ``tokenizer``.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"weights can be {', '.join(map(str, _DTYPES))}, not {dtype}")
    build = _Build(device, dtype, max_position, show_progress, free_memory, place)
    path: Path | None
    if random_weights:
        path, config = _shape(name or _DEFAULT_SHAPE)
        reason = obstacle(config)
        _check_can_split(place, reason)
        model, *shift = build.random(config, seed, native=reason is None)
    else:
        path = find_model(name, show_progress=show_progress)
        config = _read_config(path)
        reason = obstacle(config)
        _check_can_split(place, reason)
        model, *shift = build.from_files(path, config, native=reason is None)
    return LoadedModel(
        model=model,
        path=path,
        config=config,
        tokenizer=_read_tokenizer(path) if tokenizer and path and not random_weights else None,
        eos_token_ids=_eos_token_ids(path, config),
        generic_reason=reason,
        shift=shift[0] if shift else None,
    )


def _check_can_split(place: RankPlace | None, generic_reason: str | None) -> None:
    if place is not None and generic_reason is not None:
        layout = place.layout
        raise ConfigError(
            f"only models of the native decoder run on several ranks (tensor_parallel "
            f"{layout.tp}, sequence_parallel {layout.sp}); this one does not: {generic_reason}"
        )


@dataclass(frozen=True)
class _Build:
    """How to build a model, once its config is known: a list of one, or a rank's parts of it."""

    device: torch.device
    dtype: torch.dtype
    max_position: int | None
    show_progress: bool
    free_memory: FreeMemory
    place: RankPlace | None

    def random(self, config: ModelConfig, seed: int, *, native: bool) -> Sequence[CausalLM]:
        if not native:
            from ostinato.runtime.models.hf import HFCausalLM

            model = HFCausalLM.from_config(
                as_hf(config),
                device=self.device,
                dtype=self.dtype,
                seed=seed,
                max_model_len=self.max_position,
            )
            return [model]
        decoder_config = DecoderConfig.from_hf(config)
        self._check_fit("the model", _bytes_of(self._decoders(decoder_config, "meta")))
        if self.place is not None:
            from ostinato.runtime.parallel.models import draw_sharded_weights

            parts = self._parts(decoder_config, self.device, self.place)
            draw_sharded_weights(parts, seed)
            return parts
        models = self._decoders(decoder_config, self.device)
        draw_weights(models[0], seed)
        return models

    def from_files(self, path: Path, config: ModelConfig, *, native: bool) -> Sequence[CausalLM]:
        checkpoint = Checkpoint(path)
        if not native:
            from ostinato.runtime.models.hf import HFCausalLM

            self._check_fit(str(path), checkpoint.num_elements() * self.dtype.itemsize)
            model = HFCausalLM.from_pretrained(
                path,
                config=as_hf(config),
                device=self.device,
                dtype=self.dtype,
                max_model_len=self.max_position,
            )
            return [model]
        decoder_config = DecoderConfig.from_hf(config)
        if decoder_config.tied_head and _has_own_head(checkpoint):
            decoder_config = replace(decoder_config, tied_head=False)
        plans = self._decoders(decoder_config, "meta")
        for plan in plans:
            ignored = [_HEAD] if plan.lm_head is None else []
            checkpoint.check(plan.weight_slots(), ignored=ignored)
        self._check_fit(str(path), _bytes_of(plans))
        models = self._decoders(decoder_config, self.device)
        for decoder in models:
            slots = decoder.weight_slots()
            checkpoint.copy_into(slots, self.device, show_progress=self.show_progress)
        return models

    def _decoders(self, config: DecoderConfig, device: torch.device | str) -> Sequence[Decoder]:
        device = torch.device(device)
        if self.place is not None:
            return self._parts(config, device, self.place)
        return [Decoder(config, device=device, dtype=self.dtype, max_position=self.max_position)]

    def _parts(
        self, config: DecoderConfig, device: torch.device, place: RankPlace
    ) -> list[ShardedDecoder]:
        from ostinato.runtime.parallel.models import build_models

        return build_models(
            config, place, device=device, dtype=self.dtype, max_position=self.max_position
        )

    def _check_fit(self, what: str, needed: int) -> None:
        free = self.free_memory(self.device)
        if free is not None and needed > free:
            raise ModelLoadError(
                f"{what} needs {needed / 2**30:.2f} GiB in {self.dtype}, and {self.device} has "
                f"{free / 2**30:.2f} GiB free; free some, use a smaller dtype or a smaller model"
            )


def as_hf(config: ModelConfig) -> PretrainedConfig:
    """The config as an object of transformers."""
    return config.to_hf() if isinstance(config, StatedConfig) else config


def _bytes_of(models: Sequence[Decoder]) -> int:
    tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _has_own_head(checkpoint: Checkpoint) -> bool:
    """Whether the config ties the head to the embeddings, but the checkpoint disagrees.

    transformers believes the checkpoint, so we do.
    """
    if not {_HEAD, _EMBEDDING} <= checkpoint.tensors.keys():
        return False
    tensors = dict(checkpoint.read([_HEAD, _EMBEDDING], torch.device("cpu")))
    return not torch.equal(tensors[_HEAD], tensors[_EMBEDDING])


def _shape(name: str) -> tuple[Path | None, ModelConfig]:
    path = Path(name).expanduser()
    if name not in SHAPES and (path / "config.json").is_file():
        return path, _read_config(path)
    if name not in SHAPES and path.is_dir():
        raise ModelLoadError(f"{path} has no config.json to read the model's shape from")
    return None, shape_config(name)


def _read_config(path: Path) -> ModelConfig:
    file = path / "config.json"
    if not file.is_file():
        raise ModelLoadError(f"{path} has no config.json; a model's directory needs one")
    stated = read_stated_config(file)
    if stated is not None and obstacle(stated) is None:
        return stated
    from transformers import AutoConfig

    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # whatever transformers makes of a bad config, the file is named
        raise ModelLoadError(
            f"transformers cannot read {file}: {error} (models that need their own code, with "
            "trust_remote_code, are not run)"
        ) from error
    return config


def _read_tokenizer(path: Path) -> Any | None:
    if not any((path / file).is_file() for file in _TOKENIZER_FILES):
        return None
    try:
        if _tokenizer_class(path) in _PLAIN_TOKENIZERS:
            # Spares the import of every model's configuration, by which a class is looked up.
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(path)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # as for configs
        raise ModelLoadError(
            f"transformers cannot read the tokenizer in {path}: {error}"
        ) from error


def _tokenizer_class(path: Path) -> str | None:
    file = path / "tokenizer_config.json"
    if not file.is_file() or not (path / "tokenizer.json").is_file():
        return None
    stated = json.loads(file.read_text(encoding="utf-8"))
    return stated.get("tokenizer_class") if "auto_map" not in stated else None


def _eos_token_ids(path: Path | None, config: ModelConfig) -> frozenset[int]:
    ids: int | list[int] | None = getattr(config, "eos_token_id", None)
    file = None if path is None else path / "generation_config.json"
    if file is not None and file.is_file():
        try:
            stated = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise ModelLoadError(f"{file} is not a JSON object: {error}") from error
        ids = ids if stated is None else stated
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
