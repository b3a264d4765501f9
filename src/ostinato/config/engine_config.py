"""The user's options, validated on construction, before anything is loaded.

"auto" and None mean "choose"; the methods of ``EngineConfig`` resolve them for a device. The engine
resolves what also depends on the model (its length limit, the KV cache). The options, with their
help, are in ``engine_options``, and what is checked is in ``checks``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ostinato import other_engines
from ostinato.config.checks import (
    check_attention,
    check_batch_invariant,
    check_limits,
    check_lora,
    check_offload,
    check_parallel,
    check_sleep_mode,
    check_verify,
)
from ostinato.config.engine_options import EngineOptions
from ostinato.config.graph_config import GraphConfig
from ostinato.config.memory_size import parse_bytes
from ostinato.errors import ConfigError
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.sizes import (
    default_mixed_sizes,
    default_sizes,
    default_vision_sizes,
    validate_sizes,
)
from ostinato.options import check_flags, user_options
from ostinato.quoting import shown
from ostinato.speculative.options import parse_speculation
from ostinato.speculative.speculation import Speculation

if TYPE_CHECKING:
    import torch

TASKS = ("auto", "generate", "embed", "classify")
DTYPES = ("float32", "bfloat16", "float16")
# On the CPU nothing tells how much memory may be used; on CUDA the remaining memory is used.
CPU_KV_CACHE_BYTES = 512 * 2**20


@user_options(
    name="LLM",
    example="device",
    aliases={
        "data_parallel": "data_parallel_size",
        "cp_kv_cache_interleave_size": "dcp_kv_cache_interleave_size",
    },
    foreign=other_engines.ENGINE_OPTIONS,
)
@dataclass(frozen=True)
class EngineConfig(EngineOptions):
    """Everything an engine is built from, as given by the user."""

    def __post_init__(self) -> None:
        check_flags(self)
        if self.model is not None:
            object.__setattr__(self, "model", str(self.model))
        object.__setattr__(self, "device", _device_name(self.device))
        graphs: object = GraphConfig() if self.graphs is None else self.graphs
        if not isinstance(graphs, GraphConfig):
            raise ConfigError(
                f"graphs must be a GraphConfig, got {shown(graphs)}; write "
                "graphs=GraphConfig(mode=..., capture_sizes=...)"
            )
        if self.enforce_eager:
            if graphs.mode not in (None, CUDAGraphMode.NONE):
                raise ConfigError(
                    f"enforce_eager turns graphs off, but graphs has mode {graphs.mode}; give only "
                    "one of the two"
                )
            graphs = replace(graphs, mode=CUDAGraphMode.NONE)
        object.__setattr__(self, "graphs", graphs)
        check_limits(self)
        check_attention(self)
        if self.kv_cache_memory_bytes is not None:
            object.__setattr__(
                self, "kv_cache_memory_bytes", parse_bytes(self.kv_cache_memory_bytes)
            )
        if self.graph_memory is not None:
            object.__setattr__(self, "graph_memory", parse_bytes(self.graph_memory))
        if not isinstance(self.task, str) or self.task not in TASKS:
            raise ConfigError(f"task must be one of {', '.join(TASKS)}, got {shown(self.task)}")
        check_lora(self)
        object.__setattr__(self, "speculative", parse_speculation(self.speculative))
        check_offload(self)
        check_sleep_mode(self)
        if not isinstance(self.tune, str) or self.tune not in ("auto", "off"):
            raise ConfigError(f"tune must be 'auto' or 'off', got {shown(self.tune)}")
        if self.model == "":
            raise ConfigError("model is empty; give a directory, a hub model, a shape or None")
        if self.enable_expert_parallel and self.data_parallel_size != 1:
            object.__setattr__(self, "data_parallel_lockstep", True)
        check_parallel(self)
        check_verify(self)
        check_batch_invariant(self)

    def torch_device(self) -> torch.device:
        """The device; raises if this machine does not have it."""
        import torch

        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except (RuntimeError, TypeError):
            raise ConfigError(
                f"unknown device {shown(self.device)}; choose auto, cpu or cuda"
            ) from None
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"device must be cpu or cuda, got {shown(self.device)}")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                f"device {self.device!r} was requested, but torch finds no CUDA GPU; use 'cpu', or "
                "a CUDA build of torch on a machine with a driver"
            )
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"device {self.device!r} was requested, but torch finds "
                f"{torch.cuda.device_count()} CUDA GPUs, numbered from 0"
            )
        return device

    def torch_dtype(self, device: torch.device) -> torch.dtype:
        """The dtype of the weights on ``device``."""
        import torch

        named = isinstance(self.dtype, str | torch.dtype)
        if named and self.dtype == "auto":
            return torch.bfloat16 if device.type == "cuda" else torch.float32
        name = str(self.dtype).removeprefix("torch.") if named else ""
        if name not in DTYPES:
            known = ", ".join(("auto", *DTYPES))
            raise ConfigError(f"unknown dtype {shown(self.dtype)}; choose {known}")
        dtype: torch.dtype = getattr(torch, name)
        return dtype

    def schedules_ahead_on(self, device: torch.device) -> bool:
        """Whether a step starts before the host has read the previous step's tokens.

        On the CPU there is nothing to overlap, and sequences that stop early cost one extra step.
        """
        return device.type == "cuda" if self.async_scheduling is None else self.async_scheduling

    def batch_limits(self, device: torch.device) -> tuple[int, int]:
        """The maximum number of requests and of tokens in one step."""
        default_seqs, default_tokens = (256, 8192) if device.type == "cuda" else (16, 512)
        max_num_seqs, max_tokens = self.max_num_seqs, self.max_num_batched_tokens
        # A limit that was not given adapts to the one that was.
        max_num_seqs = max_num_seqs or min(default_seqs, max_tokens or default_seqs)
        max_tokens = max_tokens or max(default_tokens, max_num_seqs)
        if max_tokens < max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {max_tokens} is below max_num_seqs {max_num_seqs}, so a "
                "step could not take one token of every request; raise max_num_batched_tokens or "
                "lower max_num_seqs"
            )
        return max_num_seqs, max_tokens

    def num_drafts(self, device: torch.device) -> tuple[int, ...]:
        """Drafts per request in a decode step, by its number of requests; empty: none."""
        if self.speculative is None:
            return ()
        assert isinstance(self.speculative, Speculation), "parsed on construction"
        return self.speculative.num_drafts(self.batch_limits(device)[0])

    def decode_query_lens(self, device: torch.device) -> dict[int, int]:
        """Tokens per request in decode steps, and most requests of steps with that number.

        One token is always among them, for any number of requests.
        """
        max_num_seqs, max_tokens = self.batch_limits(device)
        longest = {1: max_num_seqs}
        for num_reqs, count in enumerate(self.num_drafts(device)):
            if num_reqs and count:
                longest[1 + count] = num_reqs
        most = max(longest)
        if most > max_tokens:
            raise ConfigError(
                f"speculative has {most - 1} drafts per request, but a step computes at most "
                f"max_num_batched_tokens={max_tokens} tokens; lower num_tokens or raise the limit"
            )
        return longest

    def capture_sizes(self, device: torch.device) -> tuple[int, ...]:
        """Numbers of tokens to capture graphs for on ``device``."""
        max_num_seqs, max_tokens = self.batch_limits(device)
        if self.graphs.capture_sizes is not None:
            return validate_sizes(self.graphs.capture_sizes, max_num_batched_tokens=max_tokens)
        query_lens = self.decode_query_lens(device)
        sizes = default_sizes(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_tokens,
            decode_query_len=max(query_lens),
            largest=self.graphs.max_cudagraph_capture_size,
            device_type=device.type,
        )
        # The largest batch with drafts needs no padding, which might not fit.
        largest = (min(most, max_tokens // n) * n for n, most in query_lens.items() if n > 1)
        return tuple(sorted({*sizes, *(size for size in largest if size <= sizes[-1])}))

    def vision_capture_sizes(self, device: torch.device) -> tuple[int, ...]:
        """Numbers of patches to capture the vision encoder for."""
        if self.graphs.mode is CUDAGraphMode.NONE:
            return ()
        if self.graphs.vision_capture_sizes is not None:
            return tuple(self.graphs.vision_capture_sizes)
        return default_vision_sizes(device.type)

    def mixed_capture_sizes(self, device: torch.device, sp: int = 1) -> tuple[int, ...] | None:
        """Sizes for mixed batches; None: the same as for decode batches.

        By default, only FULL_AND_FULL has sizes of its own for them. Each is one rank's share of a
        batch that is split over ``sp`` ranks. ``capture_sizes`` alone are for all batches.
        """
        graphs = self.graphs
        _, max_tokens = self.batch_limits(device)
        if graphs.mixed_capture_sizes is not None:
            sizes = graphs.mixed_capture_sizes
            return validate_sizes(sizes, max_num_batched_tokens=max(1, max_tokens // sp))
        chosen = graphs.capture_sizes or graphs.max_cudagraph_capture_size
        if chosen is not None or device.type == "cpu":
            return None
        return default_mixed_sizes(max(1, max_tokens // sp))


def _device_name(device: object) -> str:
    if isinstance(device, str):
        return device
    import torch

    if isinstance(device, torch.device):
        return str(device)
    raise ConfigError(f"unknown device {shown(device)}; choose auto, cpu or cuda")
