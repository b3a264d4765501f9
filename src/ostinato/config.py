"""What the user asks for, checked when it is built, before anything is loaded.

"auto" and None stand for "choose"; the methods of ``EngineConfig`` make those choices for a device.
What depends on the model as well (its length limit, the KV cache) is decided by the engine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ostinato import other_engines
from ostinato.errors import ConfigError
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.sizes import check_positive_int, default_sizes, validate_sizes
from ostinato.options import option, user_options
from ostinato.parallel.layout import ParallelLayout
from ostinato.quoting import shown

if TYPE_CHECKING:
    import torch

    from ostinato.attention.base import AttentionBackend

DTYPES = ("float32", "bfloat16", "float16")
ATTENTION_BACKENDS = ("auto", "torch", "triton", "numba")
# On the CPU there is no telling how much memory may be used; on CUDA, what is left is used.
CPU_KV_CACHE_BYTES = 512 * 2**20
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


@user_options(
    example="mode",
    aliases={"cudagraph_mode": "mode", "cudagraph_capture_sizes": "capture_sizes"},
    foreign=other_engines.GRAPH_OPTIONS,
)
@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    """Which graphs are captured, and how."""

    mode: CUDAGraphMode | str | None = option(
        None,
        "Which batches run through graphs: NONE, PIECEWISE, FULL, FULL_DECODE_ONLY or "
        "FULL_AND_PIECEWISE. None is FULL_AND_PIECEWISE: full graphs for decode batches, piecewise "
        "ones, broken at attention, for all others.",
        cli=str,
    )
    capture_sizes: Sequence[int] | None = option(
        None,
        "Numbers of tokens that graphs are captured for. None: the device's default ladder.",
        cli=str,
    )
    max_cudagraph_capture_size: int | None = option(
        None, "Where the default ladder ends. Not together with capture_sizes.", cli=int
    )
    compile: bool | str = option(
        False,
        "Split the model by torch.compile instead of breaking it at run time, with code generated "
        "by inductor (True or 'inductor') or without ('eager').",
        cli=bool,
    )
    num_warmups: int | None = option(
        None,
        "Runs before a capture. None: one on CUDA, none on the CPU, which has nothing to warm up. "
        "Sizes that launch the kernels of a larger one are not warmed up again.",
    )
    eager_fallback: bool = option(
        False, "Let a size whose capture fails run eagerly instead of stopping the start-up."
    )

    def __post_init__(self) -> None:
        if self.mode is not None:
            object.__setattr__(self, "mode", CUDAGraphMode.parse(self.mode))
        if self.capture_sizes is not None:
            sizes = validate_sizes(self.capture_sizes, max_num_batched_tokens=None)
            object.__setattr__(self, "capture_sizes", sizes)
        if self.max_cudagraph_capture_size is not None:
            check_positive_int("max_cudagraph_capture_size", self.max_cudagraph_capture_size)
            if self.capture_sizes is not None:
                raise ConfigError(
                    f"max_cudagraph_capture_size {self.max_cudagraph_capture_size} is where the "
                    f"default sizes end, but capture_sizes {shown(list(self.capture_sizes))} are "
                    "not those; give one of the two"
                )
        if self.compile not in (False, True, "inductor", "eager"):
            raise ConfigError(
                f"compile must be True, False, 'inductor' or 'eager', got {self.compile!r}"
            )
        if self.num_warmups is not None and (
            type(self.num_warmups) is not int or self.num_warmups < 0
        ):
            raise ConfigError(f"num_warmups must be 0 or more, got {self.num_warmups!r}")

    @property
    def compiler(self) -> Literal["inductor", "eager"] | None:
        """What generates code, "eager" for nothing; None where nothing is traced at all."""
        if self.compile is False:
            return None
        return "eager" if self.compile == "eager" else "inductor"

    def warmups_on(self, device: torch.device) -> int:
        if self.num_warmups is None:
            return 1 if device.type == "cuda" else 0
        return self.num_warmups


@user_options(
    name="LLM",
    example="device",
    aliases={"kv_cache_memory_bytes": "kv_cache_memory"},
    foreign=other_engines.ENGINE_OPTIONS,
)
@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine is built from, as the user gave it."""

    model: str | Path | None = option(
        None,
        "Directory or hub name of a safetensors checkpoint, or a shape's name with random_weights. "
        "None: the embedded SmolLM2-135M-Instruct.",
        cli=str,
    )
    _: KW_ONLY
    device: str = option(
        "auto", "'cpu', 'cuda' or 'cuda:n'; auto is CUDA where there is one.", cli=str
    )
    dtype: str | torch.dtype = option(
        "auto",
        "float32, bfloat16 or float16; auto is bfloat16 on CUDA and float32 on the CPU.",
        cli=str,
    )
    graphs: GraphConfig = option(GraphConfig(), "Which graphs are captured, and how.")
    enforce_eager: bool = option(
        False, "Capture no graphs at all: GraphConfig(mode='NONE').", cli=bool
    )
    max_num_seqs: int | None = option(
        None, "Most requests in one step. None: 256 on CUDA, 16 on the CPU.", cli=int
    )
    max_num_batched_tokens: int | None = option(
        None, "Most tokens in one step. None: 8192 on CUDA, 512 on the CPU.", cli=int
    )
    max_model_len: int | None = option(
        None, "Longest sequence, prompt and answer. None: the model's own limit.", cli=int
    )
    kv_cache_memory: int | str | None = option(
        None,
        "Memory of the KV cache: bytes, '512M', '4GiB'. None: on CUDA what "
        "gpu_memory_utilization leaves, on the CPU 512 MiB.",
        cli=str,
    )
    gpu_memory_utilization: float = option(
        0.9,
        "Share of a GPU's memory that weights, graphs and KV cache may take together.",
        cli=float,
    )
    attention: str | AttentionBackend = option(
        "auto",
        "Attention backend: 'triton', 'numba', 'torch', or an object of your own (AttentionBackend "
        "in ostinato.attention.base); auto is the fastest that the device has.",
        cli=str,
    )
    block_size: int = option(16, "Tokens in a block of the KV cache.", cli=int)
    prefix_reuse: bool = option(
        True, "Keep the KV cache of finished requests for prompts that begin alike.", cli=bool
    )
    prefill_chunk: int | None = option(
        None,
        "Most tokens of one prompt in one step, so that a long one does not hold up the others. "
        "None: as many as the step has room for.",
        cli=int,
    )
    overlap: bool | None = option(
        None,
        "Start a step before the host has seen the tokens of the one before. None: on CUDA, where "
        "the device then never waits for Python; on the CPU there is nothing to overlap with.",
        cli=bool,
    )
    random_weights: bool = option(
        False, "Seeded random weights for a shape's name; no download and no tokenizer.", cli=bool
    )
    seed: int = option(0, "Of random weights, and of requests that bring no seed.")
    swiftkv_layers: int | None = option(
        None,
        "Make a SwiftKV model of a plain one: layers after this many take their keys and values "
        "from the output of this one, and run only for tokens whose logits are wanted. Faster, and "
        "another model: without training for it the text suffers. Checkpoints that were trained "
        "for it say so themselves.",
        cli=int,
    )
    show_progress: bool = option(True, "Progress bars while capturing and generating.")
    tensor_parallel: int = option(1, "Ranks that the weights are split over.", cli=int)
    sequence_parallel: int = option(
        1, "Ranks that the tokens of a batch are split over (Ulysses).", cli=int
    )
    shift_parallel_threshold: int | None = option(
        None,
        "Batches of up to this many tokens split the weights over all ranks instead of their "
        "tokens. None: no batch does.",
        cli=int,
    )
    rank_timeout_s: float = option(
        30.0,
        "A rank that dies, or keeps the others waiting in a step for this long, ends all.",
        cli=float,
    )

    def __post_init__(self) -> None:
        if self.model is not None:
            object.__setattr__(self, "model", str(self.model))
        graphs: object = GraphConfig() if self.graphs is None else self.graphs
        if not isinstance(graphs, GraphConfig):
            raise ConfigError(
                f"graphs must be a GraphConfig, got {shown(graphs)}; write "
                "graphs=GraphConfig(mode=..., capture_sizes=...)"
            )
        if self.enforce_eager:
            if graphs.mode not in (None, CUDAGraphMode.NONE):
                raise ConfigError(
                    f"enforce_eager turns graphs off, but graphs has mode {graphs.mode}; give one "
                    "of the two"
                )
            graphs = replace(graphs, mode=CUDAGraphMode.NONE)
        object.__setattr__(self, "graphs", graphs)
        limits = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "prefill_chunk")
        for name in (*limits, "swiftkv_layers"):
            if getattr(self, name) is not None:
                check_positive_int(name, getattr(self, name))
        check_positive_int("block_size", self.block_size)
        self._check_attention()
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be an integer in [0, 2**63), got {self.seed!r}")
        share = self.gpu_memory_utilization
        if not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization must be a number in (0, 1], got {share!r}")
        if self.kv_cache_memory is not None:
            object.__setattr__(self, "kv_cache_memory", parse_bytes(self.kv_cache_memory))
        if self.model == "":
            raise ConfigError("model is empty; name a directory, a hub model or a shape, or None")
        self._check_parallel()

    def _check_attention(self) -> None:
        if isinstance(self.attention, str):
            if self.attention not in ATTENTION_BACKENDS:
                known = ", ".join(ATTENTION_BACKENDS)
                raise ConfigError(f"unknown attention {self.attention!r}; choose one of {known}")
            return
        needed = ("name", "support", "forward", "forward_qkv")
        missing = [each for each in needed if not hasattr(self.attention, each)]
        if missing or isinstance(self.attention, type):
            problem = f"has no {', '.join(missing)}" if missing else "is a class: make one of it"
            raise ConfigError(
                "attention must be the name of a backend or an object whose class derives from "
                f"AttentionBackend, got {shown(self.attention)}, which {problem}"
            )

    def _check_parallel(self) -> None:
        check_positive_int("tensor_parallel", self.tensor_parallel)
        check_positive_int("sequence_parallel", self.sequence_parallel)
        timeout = self.rank_timeout_s
        if not isinstance(timeout, (int, float)) or not timeout > 0:
            raise ConfigError(f"rank_timeout_s must be a positive number, got {timeout!r}")
        if self.shift_parallel_threshold is not None:
            check_positive_int("shift_parallel_threshold", self.shift_parallel_threshold)
            if self.sequence_parallel == 1:
                raise ConfigError(
                    f"shift_parallel_threshold is {self.shift_parallel_threshold}, but with "
                    "sequence_parallel 1 no tokens are split that could be shifted; raise "
                    "sequence_parallel or leave the threshold out"
                )
        if self.layout.world_size == 1:
            return
        ranks = f"{self.layout.world_size} ranks"
        if not isinstance(self.attention, str):
            raise ConfigError(
                f"attention is an object, which cannot be sent to {ranks}; choose one by name"
            )
        if self.graphs.compile:
            raise ConfigError(f"compile={self.graphs.compile!r} is for one device, not for {ranks}")
        if self.graphs.eager_fallback:
            raise ConfigError(
                f"eager_fallback is for one device, not for {ranks}: a rank whose capture failed "
                "would leave the others waiting in the middle of theirs"
            )
        if ":" in self.device:
            raise ConfigError(
                f"device {self.device!r} names one device, but there are {ranks}; write "
                f"{self.device.partition(':')[0]!r}, and each rank takes the one of its number"
            )

    @property
    def layout(self) -> ParallelLayout:
        """The ranks that the model runs on."""
        return ParallelLayout(sp=self.sequence_parallel, tp=self.tensor_parallel)

    def torch_device(self) -> torch.device:
        import torch

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
        import torch

        if self.dtype == "auto":
            return torch.bfloat16 if device.type == "cuda" else torch.float32
        name = str(self.dtype).removeprefix("torch.")
        if name not in DTYPES or not isinstance(self.dtype, str | torch.dtype):
            raise ConfigError(f"unknown dtype {self.dtype!r}; choose auto, {', '.join(DTYPES)}")
        dtype: torch.dtype = getattr(torch, name)
        return dtype

    def overlaps_on(self, device: torch.device) -> bool:
        """Whether a step starts before the host has seen the tokens of the one before.

        On the CPU there is nothing to overlap with, and sequences that stop early pay a step more.
        """
        return device.type == "cuda" if self.overlap is None else self.overlap

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
            largest=self.graphs.max_cudagraph_capture_size,
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
