"""The user's options, validated on construction, before anything is loaded.

"auto" and None mean "choose"; the methods of ``EngineConfig`` resolve them for a device. The engine
resolves what also depends on the model (its length limit, the KV cache).
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

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
from ostinato.graphs.policy.verify import VerifyPolicy
from ostinato.offload.offload_config import OffloadConfig
from ostinato.options import option, user_options
from ostinato.parallel.layout import ParallelLayout
from ostinato.quoting import shown
from ostinato.speculative.options import parse_speculation
from ostinato.speculative.speculation import Speculation

if TYPE_CHECKING:
    import torch

    from ostinato.attention.base import AttentionBackend

TASKS = ("auto", "generate", "embed", "classify")
DTYPES = ("float32", "bfloat16", "float16")
# On the CPU nothing tells how much memory may be used; on CUDA the remaining memory is used.
CPU_KV_CACHE_BYTES = 512 * 2**20


@user_options(
    name="LLM",
    example="device",
    aliases={"data_parallel": "data_parallel_size"},
    foreign=other_engines.ENGINE_OPTIONS,
)
@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine is built from, as given by the user."""

    model: str | Path | None = option(
        None,
        "Directory or hub name of a safetensors checkpoint, or the name of a shape with "
        "random_weights. None: the embedded SmolLM2-135M-Instruct.",
        cli=str,
    )
    _: KW_ONLY
    task: Literal["auto", "generate", "embed", "classify"] = option(
        "auto",
        "What the model is for: 'generate', 'embed' or 'classify' (LLM.score needs one of the last "
        "two). auto goes by the architecture in its config.json, and embeds if it is a checkpoint "
        "of sentence-transformers.",
    )
    device: str = option("auto", "'cpu', 'cuda' or 'cuda:n'; auto is CUDA if available.", cli=str)
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
        None, "Maximum requests in one step. None: 256 on CUDA, 16 on the CPU.", cli=int
    )
    max_num_batched_tokens: int | None = option(
        None, "Maximum tokens in one step. None: 8192 on CUDA, 512 on the CPU.", cli=int
    )
    max_model_len: int | None = option(
        None, "Longest sequence, prompt plus output. None: the model's own limit.", cli=int
    )
    kv_cache_memory_bytes: int | str | None = option(
        None,
        "Memory of the KV cache: bytes, '512M', '4GiB'. None: what gpu_memory_utilization leaves "
        "on CUDA, 512 MiB on the CPU.",
        cli=str,
    )
    kv_cache_tokens: int | None = option(
        None,
        "At most this many tokens in the KV cache, in whole blocks, however much memory there is: "
        "for several engines on one device. None: all that fit and max_num_seqs requests can use.",
        cli=int,
    )
    gpu_memory_utilization: float = option(
        0.9,
        "Fraction of a GPU's memory for weights, graphs and KV cache together.",
        cli=float,
    )
    graph_memory: int | str | None = option(
        None,
        "Most memory for graphs: bytes, '512M', '0.5GiB'. Sizes that are worth the least are left "
        "out of the plan until the rest fits; the log and LLM.graph_memory say which. None: no "
        "limit.",
        cli=str,
    )
    attention: str | AttentionBackend = option(
        "auto",
        "Attention backend: 'triton', 'numba', 'torch', or your own object (AttentionBackend in "
        "ostinato.attention.base); auto is the fastest one that the device has.",
        cli=str,
    )
    block_size: int = option(16, "Tokens per KV cache block.", cli=int)
    enable_prefix_caching: bool | None = option(
        None,
        "Reuse the KV cache of finished requests for prompts with the same prefix. None: on, "
        "unless the model has recurrent layers.",
        cli=bool,
    )
    long_prefill_token_threshold: int | None = option(
        None,
        "Maximum tokens of one prompt per step, so that a long prompt does not delay other "
        "requests. None: as many as fit in the step.",
        cli=int,
    )
    async_scheduling: bool | None = option(
        None,
        "Start a step before the host has read the previous step's tokens. None: on for CUDA, "
        "where the device then never waits for Python; off for the CPU, which overlaps nothing.",
        cli=bool,
    )
    random_weights: bool = option(
        False, "Seeded random weights for a named shape; no download, no tokenizer.", cli=bool
    )
    seed: int = option(0, "Seed of random weights, and of requests without a seed.")
    swiftkv_layers: int | None = option(
        None,
        "Turn a plain model into a SwiftKV model: layers after this many take their keys and "
        "values from this layer's output, and run only for tokens whose logits are needed. Faster, "
        "but a different model: quality suffers without training for it. Checkpoints trained for "
        "it set this themselves.",
        cli=int,
    )
    enable_lora: bool = option(
        False, "Make room for LoRA adapters, which load_adapter loads at any time.", cli=bool
    )
    max_loras: int = option(
        1, "Maximum adapters loaded at once, all of which one step may use.", cli=int
    )
    max_lora_rank: int = option(16, "Largest rank of an adapter.", cli=int)
    speculative: Speculation | str | None = option(
        None,
        "Speculative decoding: 'ngram' drafts the next tokens from the request's own text, "
        "'suffix' from past output too; NgramDrafts(...) and SuffixDrafts(...) set how many. "
        "Drafts save steps and do not change the output. None: no drafts.",
        cli=str,
    )
    offload: OffloadConfig | None = option(
        None,
        "OffloadConfig(group=..., offloaded=..., prefetch=...): the last layers of every group "
        "keep their weights in host memory and are copied to the device while others run, for "
        "models larger than the device's memory. None: all weights stay on the device. On the "
        "command line: group,offloaded,prefetch.",
        cli=str,
    )
    enable_sleep_mode: bool = option(
        False,
        "Let sleep() release the KV cache and the weights, at addresses that stay, and wake() "
        "bring them back.",
        cli=bool,
    )
    tune: Literal["auto", "off"] = option(
        "auto",
        "'auto': a model's first start on a GPU takes a few seconds to measure tile configs for "
        "its large GEMMs, unless they are known, and saves them for later starts. 'off': what is "
        "not known is predicted. Several ranks never measure.",
        cli=str,
    )
    verify: str = option(
        "off",
        "Compare graphs with eager runs, bit for bit: 'capture', each once at start-up with "
        "poisoned padding; 'sample:0.001', this fraction of steps in service; "
        "'capture,sample:0.001', both. A graph that differs is quarantined: its batches run "
        "eagerly, and a log line and LLM.verification name the cause.",
        cli=str,
    )
    batch_invariant: bool = option(
        False,
        "The bits of a request's logits do not depend on the batch it runs in, on padding, on how "
        "its prompt is cut into chunks, on prefix reuse or on the graph mode. For dense models of "
        "the native decoder; on CUDA, with 16-bit weights on Hopper.",
        cli=bool,
    )
    show_progress: bool = option(True, "Progress bars while capturing and generating.")
    tensor_parallel_size: int = option(1, "Number of ranks to split the weights over.", cli=int)
    ulysses_sequence_parallel_size: int = option(
        1, "Number of ranks to split a batch's tokens over (Ulysses).", cli=int
    )
    shift_parallel_threshold: int | None = option(
        None,
        "Batches of up to this many tokens split the weights over all ranks instead of the tokens. "
        "None: no batch does.",
        cli=int,
    )
    decode_context_parallel_size: int = option(
        1,
        "Number of tensor-parallel ranks that share out the tokens of the KV cache, instead of all "
        "storing the same KV heads. Divides tensor_parallel_size.",
        cli=int,
    )
    dcp_kv_cache_interleave_size: int = option(
        1, "Consecutive tokens that such a rank stores before it is the next one's turn.", cli=int
    )
    data_parallel_size: int = option(
        1,
        "Number of replicas of the model, each on its own ranks. Requests are spread over them.",
        cli=int,
    )
    data_parallel_lockstep: bool = option(
        False,
        "Replicas run the same graph in every step, and padding if they have no work. "
        "enable_expert_parallel turns it on; nothing else needs it.",
        cli=bool,
    )
    enable_expert_parallel: bool = option(
        False,
        "Spread the experts of a mixture over all ranks, whole, instead of splitting each one. "
        "Replicas then run in lockstep (data_parallel_lockstep), and exchange tokens.",
        cli=bool,
    )
    rank_timeout_s: float = option(
        30.0,
        "Seconds after which a rank that died or keeps the others waiting in a step ends all.",
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
        if self.task not in TASKS:
            raise ConfigError(f"task must be one of {', '.join(TASKS)}, got {shown(self.task)}")
        check_lora(self)
        object.__setattr__(self, "speculative", parse_speculation(self.speculative))
        check_offload(self)
        check_sleep_mode(self)
        if self.tune not in ("auto", "off"):
            raise ConfigError(f"tune must be 'auto' or 'off', got {shown(self.tune)}")
        if self.model == "":
            raise ConfigError("model is empty; give a directory, a hub model, a shape or None")
        if self.enable_expert_parallel and self.data_parallel_size != 1:
            object.__setattr__(self, "data_parallel_lockstep", True)
        check_parallel(self)
        check_verify(self)
        check_batch_invariant(self)

    @property
    def verify_policy(self) -> VerifyPolicy:
        """What ``verify`` asks for."""
        return VerifyPolicy.parse(self.verify)

    @property
    def num_lora_slots(self) -> int:
        """How many adapters can be loaded at a time."""
        return self.max_loras if self.enable_lora else 0

    @property
    def layout(self) -> ParallelLayout:
        """The ranks that one replica of the model runs on."""
        return ParallelLayout(
            sp=self.ulysses_sequence_parallel_size,
            tp=self.tensor_parallel_size,
            dcp=self.decode_context_parallel_size,
        )

    @property
    def world_size(self) -> int:
        """The number of ranks of all replicas."""
        return self.layout.world_size * self.data_parallel_size

    def torch_device(self) -> torch.device:
        """The device; raises if this machine does not have it."""
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
            raise ConfigError(f"device {self.device!r} was requested, but torch finds no CUDA GPU")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"device {self.device!r} was requested, but torch finds "
                f"{torch.cuda.device_count()} CUDA GPUs, numbered from 0"
            )
        return device

    def torch_dtype(self, device: torch.device) -> torch.dtype:
        """The dtype of the weights on ``device``."""
        import torch

        if self.dtype == "auto":
            return torch.bfloat16 if device.type == "cuda" else torch.float32
        name = str(self.dtype).removeprefix("torch.")
        if name not in DTYPES or not isinstance(self.dtype, str | torch.dtype):
            raise ConfigError(f"unknown dtype {self.dtype!r}; choose auto, {', '.join(DTYPES)}")
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
