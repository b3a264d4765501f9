"""Checks of options, alone and together, for ``EngineConfig``: each raises ConfigError."""

from __future__ import annotations

from ostinato.config.engine_options import EngineOptions
from ostinato.errors import ConfigError
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.sizes import check_positive_int
from ostinato.graphs.policy.verify import VerifyPolicy
from ostinato.offload.offload_config import OffloadConfig
from ostinato.options import check_seed
from ostinato.quoting import shown

MAX_LORA_RANK = 256
# Larger values have no known use: start-up would take hours, or all memory.
LARGEST = {
    "max_num_seqs": 2**16,
    "max_num_batched_tokens": 2**24,
    "block_size": 2**16,
    "max_loras": 2**10,
}
LONGEST_TIMEOUT_S = 365 * 24 * 3600  # clocks overflow at some longer one
ATTENTION_BACKENDS = ("auto", "torch", "triton", "numba")


def check_limits(config: EngineOptions) -> None:
    """Numbers of requests, tokens and blocks, shares of memory, and the seed."""
    limits = (
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_model_len",
        "kv_cache_tokens",
        "long_prefill_token_threshold",
        "swiftkv_layers",
    )
    for name in limits:
        if getattr(config, name) is not None:
            check_positive_int(name, getattr(config, name))
    check_positive_int("block_size", config.block_size)
    check_positive_int("max_loras", config.max_loras)
    for name, largest in LARGEST.items():
        if (getattr(config, name) or 0) > largest:
            given = shown(getattr(config, name))
            raise ConfigError(f"{name} must be at most {largest:,}, got {given}; lower it")
    most, longest = config.kv_cache_tokens, config.max_model_len
    if most is not None and longest is not None and most < longest:
        raise ConfigError(
            f"kv_cache_tokens {most} is below max_model_len {longest}, so the longest request "
            "would not fit; raise kv_cache_tokens or lower max_model_len"
        )
    share = config.gpu_memory_utilization
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ConfigError(f"gpu_memory_utilization must be a number in (0, 1], got {shown(share)}")
    check_seed(config.seed)


def check_attention(config: EngineOptions) -> None:
    """The name of a backend, or an object that is one."""
    if isinstance(config.attention, str):
        if config.attention not in ATTENTION_BACKENDS:
            known = ", ".join(ATTENTION_BACKENDS)
            raise ConfigError(f"unknown attention {shown(config.attention)}; choose one of {known}")
        return
    needed = ("name", "support", "forward", "forward_qkv")
    missing = [each for each in needed if not hasattr(config.attention, each)]
    if missing or isinstance(config.attention, type):
        problem = f"has no {', '.join(missing)}" if missing else "is a class: pass an instance"
        raise ConfigError(
            "attention must be the name of a backend or an object whose class derives from "
            f"AttentionBackend, got {shown(config.attention)}, which {problem}"
        )


def check_lora(config: EngineOptions) -> None:
    """Adapters."""
    for name, default in (("max_loras", 1), ("max_lora_rank", 16)):
        value = getattr(config, name)
        check_positive_int(name, value)
        if not config.enable_lora and value != default:
            raise ConfigError(f"{name} is {value}, but enable_lora is off; turn it on")
    if config.max_lora_rank > MAX_LORA_RANK:
        raise ConfigError(
            f"max_lora_rank is {config.max_lora_rank}, above the limit of {MAX_LORA_RANK}; lower it"
        )
    if config.enable_lora and config.graphs.compile:
        raise ConfigError(
            f"compile={config.graphs.compile!r} does not support adapters; leave out one of "
            "compile and enable_lora"
        )


def check_offload(config: EngineOptions) -> None:
    """Weights in host memory."""
    if config.offload is None:
        return
    if not isinstance(config.offload, OffloadConfig):
        raise ConfigError(
            f"offload must be an OffloadConfig, got {shown(config.offload)}; write "
            "offload=OffloadConfig(group=4, offloaded=1, prefetch=1)"
        )
    if config.graphs.compile:
        raise ConfigError(
            f"compile={config.graphs.compile!r} does not support offload; leave out one of them"
        )
    if config.swiftkv_layers is not None:
        raise ConfigError("offload does not support SwiftKV; leave out one of them")


def check_sleep_mode(config: EngineOptions) -> None:
    """Memory that sleep() releases."""
    if config.enable_sleep_mode and config.offload is not None:
        raise ConfigError(
            "enable_sleep_mode does not support offload, which keeps weights in host memory "
            "already; leave out one of them"
        )


def check_verify(config: EngineOptions) -> None:
    """Comparisons with eager, and what cannot be compared."""
    if not VerifyPolicy.parse(config.verify):
        return
    given = f"verify={config.verify!r}"
    if config.graphs.mode is CUDAGraphMode.NONE:
        raise ConfigError(f"{given} compares graphs, but the graph mode is NONE; leave one out")
    if config.graphs.compile:
        raise ConfigError(
            f"{given} does not support compile={config.graphs.compile!r}: an eager run of a "
            "compiled model runs other kernels; leave one of them out"
        )
    if config.data_parallel_size > 1:
        raise ConfigError(
            f"{given} supports one replica, not data_parallel_size={config.data_parallel_size}; "
            "leave one of them out"
        )
    if config.decode_context_parallel_size > 1:
        raise ConfigError(
            f"{given} does not support decode_context_parallel_size="
            f"{config.decode_context_parallel_size}; leave one of them out"
        )


def check_batch_invariant(config: EngineOptions) -> None:
    """What a batch-invariant engine has no kernels for."""
    if not config.batch_invariant:
        return
    if config.attention != "auto":
        raise ConfigError(
            f"batch_invariant has its own attention, not {shown(config.attention)}; leave "
            "attention out"
        )
    others = {
        f"compile={config.graphs.compile!r}": bool(config.graphs.compile),
        "enable_lora": config.enable_lora,
        "speculative": config.speculative is not None,
        "swiftkv_layers": config.swiftkv_layers is not None,
        "enable_expert_parallel": config.enable_expert_parallel,
        "ulysses_sequence_parallel_size": config.ulysses_sequence_parallel_size > 1,
        "decode_context_parallel_size": config.decode_context_parallel_size > 1,
    }
    for name, is_on in others.items():
        if is_on:
            raise ConfigError(
                f"batch_invariant does not support {name}, whose kernels depend on the batch; "
                "leave one of them out"
            )


def check_parallel(config: EngineOptions) -> None:
    """Several ranks, and what does not work on them."""
    check_positive_int("tensor_parallel_size", config.tensor_parallel_size)
    check_positive_int("ulysses_sequence_parallel_size", config.ulysses_sequence_parallel_size)
    check_positive_int("data_parallel_size", config.data_parallel_size)
    timeout = config.rank_timeout_s
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise ConfigError(f"rank_timeout_s must be a positive number, got {shown(timeout)}")
    if timeout > LONGEST_TIMEOUT_S:
        raise ConfigError(
            f"rank_timeout_s must be at most {LONGEST_TIMEOUT_S:,} (a year), got {shown(timeout)}"
        )
    if config.shift_parallel_threshold is not None:
        check_positive_int("shift_parallel_threshold", config.shift_parallel_threshold)
        if config.ulysses_sequence_parallel_size == 1:
            raise ConfigError(
                f"shift_parallel_threshold is {config.shift_parallel_threshold}, but "
                "ulysses_sequence_parallel_size is 1, so no tokens are split; raise it or omit "
                "the threshold"
            )
        if config.graph_memory is not None:
            raise ConfigError(
                f"graph_memory {config.graph_memory:,} does not work with "
                "shift_parallel_threshold, where two models have graphs; leave one of them out, or "
                "give capture_sizes"
            )
    if config.data_parallel_lockstep:
        _check_lockstep(config)
    if config.enable_expert_parallel:
        _check_expert_parallel(config)
    _check_context_parallel(config)
    if config.world_size > 1:
        _check_several_ranks(config, f"{config.world_size} ranks")


def _check_several_ranks(config: EngineOptions, ranks: str) -> None:
    if not isinstance(config.attention, str):
        raise ConfigError(
            f"attention is an object, which cannot be sent to {ranks}; choose a backend by name"
        )
    drafts = config.speculative
    if config.layout.world_size > 1 and drafts is not None:
        assert not isinstance(drafts, str), "parsed on construction"
        if not drafts.same_on_all_ranks:
            raise ConfigError(
                f"{type(drafts).__name__} supports one rank per replica, not "
                f"{config.layout.world_size}: ranks that share a model must have the same drafts; "
                "leave out tensor_parallel_size and ulysses_sequence_parallel_size, or draft by "
                "'ngram' or 'suffix'"
            )
    if config.graphs.compile:
        raise ConfigError(
            f"compile={config.graphs.compile!r} supports one device, not {ranks}; leave it out"
        )
    if config.offload is not None:
        raise ConfigError(
            f"offload supports one device, not {ranks}; leave it out if the weights fit on "
            "these, or raise tensor_parallel_size"
        )
    if config.enable_lora and config.layout.world_size > 1:
        raise ConfigError(
            f"enable_lora supports one rank per replica, not {config.layout.world_size}; leave "
            "out tensor_parallel_size and ulysses_sequence_parallel_size"
        )
    if config.graphs.eager_fallback:
        raise ConfigError(
            f"eager_fallback supports one device, not {ranks}: a rank whose capture failed "
            "would leave the others waiting in the middle of theirs; leave it off"
        )
    if ":" in config.device:
        raise ConfigError(
            f"device {config.device!r} names one device, but there are {ranks}; write "
            f"{config.device.partition(':')[0]!r}, and each rank takes the device of its number"
        )


def _check_lockstep(config: EngineOptions) -> None:
    if config.data_parallel_size == 1:
        raise ConfigError(
            "data_parallel_lockstep is on, but data_parallel_size is 1; raise it, or leave "
            "lockstep off"
        )
    if config.shift_parallel_threshold is not None:
        raise ConfigError(
            f"shift_parallel_threshold {config.shift_parallel_threshold} does not work with "
            "data_parallel_lockstep: replicas would run different models; leave one of them out"
        )
    if config.graphs.lazy_capture:
        raise ConfigError(
            "lazy_capture does not work with data_parallel_lockstep, whose replicas agree on a "
            "graph by a plan that is captured; leave one of them out"
        )


def _check_expert_parallel(config: EngineOptions) -> None:
    if config.world_size == 1:
        raise ConfigError(
            "enable_expert_parallel spreads experts over ranks, but there is only one; raise "
            "data_parallel_size or tensor_parallel_size, or leave it out"
        )
    if config.ulysses_sequence_parallel_size > 1:
        raise ConfigError(
            f"ulysses_sequence_parallel_size {config.ulysses_sequence_parallel_size} does not work "
            "with enable_expert_parallel; leave one of them out: without the second, each expert "
            "is split over tensor_parallel_size ranks"
        )


def _check_context_parallel(config: EngineOptions) -> None:
    dcp, turn = config.decode_context_parallel_size, config.dcp_kv_cache_interleave_size
    check_positive_int("decode_context_parallel_size", dcp)
    check_positive_int("dcp_kv_cache_interleave_size", turn)
    if config.block_size % turn:
        raise ConfigError(
            f"dcp_kv_cache_interleave_size {turn} does not divide block_size {config.block_size}; "
            "choose a divisor of it"
        )
    if dcp == 1:
        return
    if config.tensor_parallel_size % dcp:
        raise ConfigError(
            f"decode_context_parallel_size {dcp} must divide tensor_parallel_size, which is "
            f"{config.tensor_parallel_size}; choose a divisor of it"
        )
    if config.ulysses_sequence_parallel_size > 1:
        raise ConfigError(
            f"decode_context_parallel_size {dcp} does not work with "
            f"ulysses_sequence_parallel_size {config.ulysses_sequence_parallel_size}; leave one of "
            "them out"
        )
    if config.attention not in ("auto", "torch"):
        raise ConfigError(
            f"attention {config.attention!r} does not work with decode_context_parallel_size "
            f"{dcp}, which has its own; leave it out"
        )
    if config.swiftkv_layers is not None:
        raise ConfigError(
            f"swiftkv_layers does not work with decode_context_parallel_size {dcp}; leave one "
            "of them out"
        )
