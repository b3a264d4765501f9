"""What the user asks for, checked when it is built, before anything is loaded.

"auto" and None stand for "choose"; the methods of ``EngineConfig`` make those choices for a device.
What depends on the model as well (its length limit, the KV cache) is decided by the engine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ostinato.errors import ConfigError
from ostinato.graphs.modes import CUDAGraphMode
from ostinato.graphs.sizes import check_positive_int, default_sizes, validate_sizes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ATTENTION_BACKENDS = ("auto", "torch", "triton")
# On the CPU there is no telling how much memory may be used; on CUDA, what is left is used.
CPU_KV_CACHE_BYTES = 512 * 2**20
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    """Which graphs are captured.

    ``mode`` None is FULL_AND_PIECEWISE: full graphs for decode batches, piecewise ones, broken at
    attention, for all others. ``capture_sizes`` None: the default ladder of the device.
    ``num_warmups`` None: one run of each size before its capture on CUDA, and none on the CPU,
    which has nothing to warm up. With ``eager_fallback`` a size whose capture fails runs eagerly
    instead of stopping the start-up.
    """

    mode: CUDAGraphMode | str | None = None
    capture_sizes: Sequence[int] | None = None
    num_warmups: int | None = None
    eager_fallback: bool = False

    def __post_init__(self) -> None:
        if self.mode is not None:
            object.__setattr__(self, "mode", CUDAGraphMode.parse(self.mode))
        if self.capture_sizes is not None:
            sizes = validate_sizes(self.capture_sizes, max_num_batched_tokens=None)
            object.__setattr__(self, "capture_sizes", sizes)
        if self.num_warmups is not None and (
            type(self.num_warmups) is not int or self.num_warmups < 0
        ):
            raise ConfigError(f"num_warmups must be 0 or more, got {self.num_warmups!r}")

    def warmups_on(self, device: torch.device) -> int:
        if self.num_warmups is None:
            return 1 if device.type == "cuda" else 0
        return self.num_warmups


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything an engine is built from, as the user gave it."""

    model: str | None = None
    device: str = "auto"
    dtype: str | torch.dtype = "auto"
    graphs: GraphConfig = field(default_factory=GraphConfig)
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    kv_cache_memory: int | str | None = None
    gpu_memory_utilization: float = 0.9
    attention: str = "auto"
    block_size: int = 16
    prefix_reuse: bool = True
    prefill_chunk: int | None = None
    random_weights: bool = False
    seed: int = 0
    show_progress: bool = True

    def __post_init__(self) -> None:
        limits = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "prefill_chunk")
        for name in limits:
            if getattr(self, name) is not None:
                check_positive_int(name, getattr(self, name))
        check_positive_int("block_size", self.block_size)
        if self.attention not in ATTENTION_BACKENDS:
            known = ", ".join(ATTENTION_BACKENDS)
            raise ConfigError(f"unknown attention {self.attention!r}; choose one of {known}")
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be an integer in [0, 2**63), got {self.seed!r}")
        share = self.gpu_memory_utilization
        if not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization must be a number in (0, 1], got {share!r}")
        if self.kv_cache_memory is not None:
            object.__setattr__(self, "kv_cache_memory", parse_bytes(self.kv_cache_memory))
        if self.model is not None and not str(self.model):
            raise ConfigError("model is empty; name a directory, a hub model or a shape, or None")

    def torch_device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except (RuntimeError, TypeError):
            raise ConfigError(f"unknown device {self.device!r}; choose auto, cpu or cuda") from None
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"device must be cpu or cuda, got {self.device!r}")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"device {self.device!r} was asked for, but torch finds no CUDA GPU")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"device {self.device!r} was asked for, but torch finds "
                f"{torch.cuda.device_count()} CUDA GPUs, numbered from 0"
            )
        return device

    def torch_dtype(self, device: torch.device) -> torch.dtype:
        if self.dtype == "auto":
            return torch.bfloat16 if device.type == "cuda" else torch.float32
        dtype = DTYPES.get(self.dtype) if isinstance(self.dtype, str) else self.dtype
        if dtype is None or dtype not in DTYPES.values():
            raise ConfigError(f"unknown dtype {self.dtype!r}; choose auto, {', '.join(DTYPES)}")
        return dtype

    def batch_limits(self, device: torch.device) -> tuple[int, int]:
        """The most requests and the most tokens that one step takes."""
        default_seqs, default_tokens = (256, 8192) if device.type == "cuda" else (16, 512)
        max_num_seqs, max_tokens = self.max_num_seqs, self.max_num_batched_tokens
        # One that was not given makes room for the one that was.
        max_num_seqs = max_num_seqs or min(default_seqs, max_tokens or default_seqs)
        max_tokens = max_tokens or max(default_tokens, max_num_seqs)
        if max_tokens < max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {max_tokens} is below max_num_seqs {max_num_seqs}: a step "
                "could not take one token of every request; raise the former or lower the latter"
            )
        return max_num_seqs, max_tokens

    def capture_sizes(self, device: torch.device) -> tuple[int, ...]:
        max_num_seqs, max_tokens = self.batch_limits(device)
        if self.graphs.capture_sizes is not None:
            return validate_sizes(self.graphs.capture_sizes, max_num_batched_tokens=max_tokens)
        return default_sizes(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_tokens,
            device_type=device.type,
        )


def parse_bytes(value: int | str) -> int:
    """A number of bytes: 1073741824, "1GiB", "512M"."""
    if type(value) is int and value > 0:
        return value
    match = re.fullmatch(r"([\d.]+)\s*([kmgt]?)(i?b)?", str(value).strip().lower())
    try:
        count = int(float(match.group(1)) * _UNITS[match.group(2)]) if match else 0
    except (ValueError, OverflowError):
        count = 0
    if count <= 0:
        raise ConfigError(f"not an amount of memory: {value!r}; write 1073741824, '1GiB' or '512M'")
    return count
