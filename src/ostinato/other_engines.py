"""Options of vLLM and ArcticInference that differ or do not exist here, and what to write."""

from __future__ import annotations

from ostinato.options import Foreign

_LEAVE_OUT = "omit it"

GRAPH_OPTIONS = {
    "cudagraph_num_of_warmups": Foreign("write num_warmups"),
    "cudagraph_copy_inputs": Foreign("inputs are static buffers that the runner fills", (False,)),
    "cudagraph_specialize_lora": Foreign(
        "batches without adapters have graphs of their own", (True,)
    ),
    "use_inductor": Foreign("write compile=True for inductor, compile='eager' without"),
    "splitting_ops": Foreign("models are split at attention", (None,)),
    "level": Foreign("write compile=True to compile the model", (0, None)),
}

ENGINE_OPTIONS = {
    # Graphs.
    "compilation_config": Foreign("write graphs=GraphConfig(mode=..., capture_sizes=...)", (None,)),
    "cudagraph_mode": Foreign("write graphs=GraphConfig(mode=...)", (None,)),
    "cudagraph_capture_sizes": Foreign("write graphs=GraphConfig(capture_sizes=...)", (None,)),
    "max_cudagraph_capture_size": Foreign(
        "write graphs=GraphConfig(max_cudagraph_capture_size=...)", (None,)
    ),
    "max_seq_len_to_capture": Foreign(
        "graphs are captured for token counts and serve sequences of any length; write "
        "graphs=GraphConfig(max_cudagraph_capture_size=...)"
    ),
    "cuda_graph_sizes": Foreign("write graphs=GraphConfig(capture_sizes=...)", (None,)),
    # Memory and scheduling.
    "swap_space": Foreign(
        "requests that do not fit are recomputed, not swapped out; " + _LEAVE_OUT, (0,)
    ),
    "cpu_offload_gb": Foreign("write offload=OffloadConfig(group=..., offloaded=...)", (0,)),
    "offload_config": Foreign("write offload=OffloadConfig(...)", (None,)),
    "offload_group_size": Foreign("write offload=OffloadConfig(group=...)", (0,)),
    "offload_num_in_group": Foreign("write offload=OffloadConfig(offloaded=...)", (0,)),
    "offload_prefetch_step": Foreign("write offload=OffloadConfig(prefetch=...)", (0,)),
    "kv_cache_dtype": Foreign("the KV cache has the model's dtype", ("auto",)),
    "num_gpu_blocks_override": Foreign("write kv_cache_tokens or kv_cache_memory_bytes", (None,)),
    "enable_chunked_prefill": Foreign(
        "prompts are always chunked; to run a prompt in one step, raise max_num_batched_tokens",
        (True, None),
    ),
    "scheduling_policy": Foreign("requests are served in order of arrival", ("fcfs",)),
    "disable_log_stats": Foreign("nothing is logged per step", (True, False)),
    # Ranks.
    "enable_shift_parallel": Foreign(
        "write shift_parallel_threshold=n: batches of up to n tokens shift", (False,)
    ),
    "pipeline_parallel_size": Foreign(
        "layers are not split over ranks; write tensor_parallel_size", (1,)
    ),
    "distributed_executor_backend": Foreign(
        "ranks are processes started by the LLM or by torchrun; " + _LEAVE_OUT,
        (None, "mp", "external_launcher"),
    ),
    "disable_custom_all_reduce": Foreign("NCCL does all reductions; " + _LEAVE_OUT, (True,)),
    # Models.
    "attention_backend": Foreign("write attention='triton', 'numba' or 'torch'", (None,)),
    "load_format": Foreign(
        "checkpoints are safetensors; for dummy weights write random_weights=True",
        ("auto", "safetensors"),
    ),
    "quantization": Foreign("the checkpoint's config decides; " + _LEAVE_OUT, (None,)),
    "speculative_config": Foreign(
        "write speculative='ngram' or 'suffix', or NgramDrafts(num_tokens=...)", (None,)
    ),
    "max_cpu_loras": Foreign("every loaded adapter is on the device; write max_loras", (None,)),
    "lora_dtype": Foreign("adapters have the model's dtype", ("auto", None)),
    "fully_sharded_loras": Foreign("adapters run on one device", (False,)),
    "hf_overrides": Foreign("edit a copy of the checkpoint's config.json", (None,)),
    "trust_remote_code": Foreign("code in a checkpoint is never executed", (False,)),
    "runner": Foreign("write task='embed' or task='classify'", ("auto", "generate")),
    "convert": Foreign("write task='embed' or task='classify'", ("auto", "none")),
    "override_pooler_config": Foreign("write embed(pooling=..., normalize=...)", (None,)),
    "limit_mm_per_prompt": Foreign("max_model_len limits the images of a prompt", (None,)),
    "mm_processor_kwargs": Foreign("edit the checkpoint's preprocessor_config.json", (None,)),
    # Tokenizers and downloads.
    "tokenizer": Foreign("the checkpoint's tokenizer is used; put its files there", (None,)),
    "tokenizer_mode": Foreign("the checkpoint's tokenizer is used", ("auto",)),
    "skip_tokenizer_init": Foreign("prompts may always be token ids", (False,)),
    "revision": Foreign("download that revision, and pass its directory", (None,)),
    "tokenizer_revision": Foreign("download that revision, and pass its directory", (None,)),
    "download_dir": Foreign("download the model, and pass its directory", (None,)),
    "use_tqdm_on_load": Foreign("write show_progress", (True, False)),
}

SAMPLING_OPTIONS = {
    "best_of": Foreign("write n, and choose among the completions by their logprobs", (None, 1)),
    "use_beam_search": Foreign("beam search is not supported; write n", (False,)),
    "prompt_logprobs": Foreign("write logprobs; it covers sampled tokens only", (None,)),
    "detokenize": Foreign("token ids are always returned with the text", (True,)),
    "bad_words": Foreign("write logit_bias={token_id: -100}", (None,)),
    "allowed_token_ids": Foreign("write logit_bias for up to 300 tokens", (None,)),
    "guided_decoding": Foreign(
        "write structured_outputs=StructuredOutputsParams(json=...)", (None,)
    ),
    "logits_processors": Foreign("the sampler is part of the graph; write logit_bias", (None,)),
    "spaces_between_special_tokens": Foreign("the tokenizer decides", (True,)),
    "truncate_prompt_tokens": Foreign("truncate the prompt's token ids yourself", (None,)),
    "output_kind": Foreign("generate() returns whole outputs, stream() what each step adds"),
    "extra_args": Foreign("nothing reads them", (None,)),
}
