"""The options of an engine, each declared once, with its help; not yet checked.

``EngineConfig`` is these options, checked and resolved.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ostinato.config.graph_config import GraphConfig
from ostinato.graphs.policy.verify import VerifyPolicy
from ostinato.offload.offload_config import OffloadConfig
from ostinato.options import option
from ostinato.parallel.layout import ParallelLayout
from ostinato.speculative.speculation import Speculation

if TYPE_CHECKING:
    import torch

    from ostinato.attention.base import AttentionBackend


@dataclass(frozen=True)
class EngineOptions:
    """What the user gives, and what follows from it on any device and for any model."""

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
        "Memory limit for graphs: bytes, '512M', '0.5GiB'. The least useful sizes are dropped "
        "until the rest fits; the log and LLM.graph_memory say which. None: no limit.",
        cli=str,
    )
    attention: str | AttentionBackend = option(
        "auto",
        "Attention backend: 'triton', 'numba', 'torch', or your own object (an "
        "ostinato.AttentionBackend); auto is the fastest one that the device has.",
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
