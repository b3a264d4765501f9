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
    "backend": Foreign("write compile=True for inductor, compile='eager' without", ("",)),
    "use_cudagraph": Foreign("write mode='NONE' to capture nothing", (True,)),
    "full_cuda_graph": Foreign("write mode='FULL'", (False,)),
    "cudagraph_mm_encoder": Foreign("write vision_capture_sizes"),
    "compile_mm_encoder": Foreign("only the language model is compiled; " + _LEAVE_OUT, (False,)),
    "custom_ops": Foreign("kernels are chosen by shape and device; " + _LEAVE_OUT, (None,)),
    "compile_sizes": Foreign("one compilation serves all sizes; " + _LEAVE_OUT, (None,)),
    "inductor_compile_config": Foreign("set torch._inductor.config instead", (None,)),
    "inductor_passes": Foreign("set torch._inductor.config instead", (None,)),
    "pass_config": Foreign("the native decoder fuses by itself; " + _LEAVE_OUT, (None,)),
    "use_inductor_graph_partition": Foreign("models are split at attention", (False, None)),
    "cache_dir": Foreign("set TORCHINDUCTOR_CACHE_DIR", ("",)),
    "debug_dump_path": Foreign("set TORCH_COMPILE_DEBUG=1", (None, "")),
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
    "max_context_len_to_capture": Foreign(
        "graphs are captured for token counts and serve sequences of any length; write "
        "graphs=GraphConfig(max_cudagraph_capture_size=...)"
    ),
    "cuda_graph_sizes": Foreign("write graphs=GraphConfig(capture_sizes=...)", (None,)),
    "cudagraph_metrics": Foreign("graphs are always counted: LLM.report()", (False,)),
    "optimization_level": Foreign("write graphs=GraphConfig(mode=..., compile=...)", (None,)),
    "performance_mode": Foreign("write graphs=GraphConfig(mode=..., capture_sizes=...)", (None,)),
    "kernel_config": Foreign("kernels are chosen by shape; write tune", (None,)),
    "moe_backend": Foreign("kernels are chosen by shape; " + _LEAVE_OUT, ("auto",)),
    "enable_flashinfer_autotune": Foreign("write tune='auto' or tune='off'", (None,)),
    # Memory and scheduling.
    "swap_space": Foreign(
        "requests that do not fit are recomputed, not swapped out; " + _LEAVE_OUT, (0,)
    ),
    "cpu_offload_gb": Foreign("write offload=OffloadConfig(group=..., offloaded=...)", (0,)),
    "cpu_offload_params": Foreign("write offload=OffloadConfig(group=..., offloaded=...)", (None,)),
    "offload_backend": Foreign("write offload=OffloadConfig(...)", ("auto",)),
    "preemption_mode": Foreign(
        "requests that do not fit are recomputed; " + _LEAVE_OUT, (None, "recompute")
    ),
    "offload_config": Foreign("write offload=OffloadConfig(...)", (None,)),
    "offload_group_size": Foreign("write offload=OffloadConfig(group=...)", (0,)),
    "offload_num_in_group": Foreign("write offload=OffloadConfig(offloaded=...)", (0,)),
    "offload_prefetch_step": Foreign("write offload=OffloadConfig(prefetch=...)", (0,)),
    "kv_cache_dtype": Foreign("the KV cache has the model's dtype", ("auto",)),
    "calculate_kv_scales": Foreign("the KV cache has the model's dtype", (False,)),
    "mamba_cache_dtype": Foreign("recurrent states have the model's dtypes", ("auto",)),
    "mamba_ssm_cache_dtype": Foreign("recurrent states have the model's dtypes", ("auto",)),
    "mamba_block_size": Foreign("a request has one row of states; " + _LEAVE_OUT, (None,)),
    "mamba_cache_mode": Foreign("a request has one row of states; " + _LEAVE_OUT, ("none",)),
    "disable_hybrid_kv_cache_manager": Foreign(
        "all layers of a model share one block table; " + _LEAVE_OUT, (True, None)
    ),
    "kv_sharing_fast_prefill": Foreign("write swiftkv_layers, or load a SwiftKV model", (False,)),
    "use_v2_block_manager": Foreign("there is one block allocator; " + _LEAVE_OUT, (True,)),
    "num_gpu_blocks_override": Foreign("write kv_cache_tokens or kv_cache_memory_bytes", (None,)),
    "enable_chunked_prefill": Foreign(
        "prompts are always chunked; to run a prompt in one step, raise max_num_batched_tokens",
        (True, None),
    ),
    "scheduling_policy": Foreign("requests are served in order of arrival", ("fcfs",)),
    "scheduler_delay_factor": Foreign("prompts start at once; " + _LEAVE_OUT, (0,)),
    "num_scheduler_steps": Foreign("write async_scheduling=True: the host is a step behind", (1,)),
    "disable_async_output_proc": Foreign("write async_scheduling=False", (False,)),
    "disable_chunked_mm_input": Foreign(
        "prompts with images are chunked too; raise max_num_batched_tokens", (False,)
    ),
    "max_num_partial_prefills": Foreign(
        "prompts share steps freely; long_prefill_token_threshold limits each one's part", (1,)
    ),
    "max_long_partial_prefills": Foreign(
        "prompts share steps freely; long_prefill_token_threshold limits each one's part", (1,)
    ),
    "disable_sliding_window": Foreign("windows are always applied; " + _LEAVE_OUT, (False,)),
    "disable_cascade_attn": Foreign("attention never cascades; " + _LEAVE_OUT, (True, False)),
    "prefix_caching_hash_algo": Foreign("blocks are told apart by BLAKE2b; " + _LEAVE_OUT),
    "stream_interval": Foreign("stream() yields what each step adds", (1,)),
    "disable_log_stats": Foreign("nothing is logged per step", (True, False)),
    "aggregate_engine_logging": Foreign("nothing is logged per step", (False,)),
    "enable_logging_iteration_details": Foreign("nothing is logged per step", (False,)),
    "disable_log_requests": Foreign("requests are never logged", (True,)),
    "enable_log_requests": Foreign("requests are never logged", (False,)),
    "show_hidden_metrics_for_version": Foreign("there are no hidden metrics", (None,)),
    "otlp_traces_endpoint": Foreign("run ostinato serve --otlp-traces-endpoint", (None,)),
    "collect_detailed_traces": Foreign("write a report: LLM.report()", (None,)),
    "kv_cache_metrics": Foreign("run ostinato serve, and read /metrics", (False,)),
    "enable_mfu_metrics": Foreign("run ostinato bench decode", (False,)),
    "enable_layerwise_nvtx_tracing": Foreign("run ostinato bench decode --profile", (False,)),
    "profiler_config": Foreign("run ostinato bench decode --profile, or LLM.report()", (None,)),
    # Ranks.
    "enable_shift_parallel": Foreign(
        "write shift_parallel_threshold=n: batches of up to n tokens shift", (False,)
    ),
    "pipeline_parallel_size": Foreign(
        "layers are not split over ranks; write tensor_parallel_size", (1,)
    ),
    "enable_context_parallel": Foreign(
        "write decode_context_parallel_size, or ulysses_sequence_parallel_size", (False,)
    ),
    "distributed_timeout_seconds": Foreign("write rank_timeout_s", (None,)),
    "dcp_comm_backend": Foreign("the ranks' results are gathered and combined", ("ag_rs",)),
    "distributed_executor_backend": Foreign(
        "ranks are processes started by the LLM or by torchrun; " + _LEAVE_OUT,
        (None, "mp", "external_launcher"),
    ),
    "disable_custom_all_reduce": Foreign("NCCL does all reductions; " + _LEAVE_OUT, (True,)),
    "prefill_context_parallel_size": Foreign(
        "write ulysses_sequence_parallel_size to split prompts over ranks", (1,)
    ),
    "data_parallel_rank": Foreign("the LLM starts all its replicas: data_parallel_size", (None,)),
    "data_parallel_size_local": Foreign("all replicas of an LLM are on one machine", (None,)),
    "data_parallel_start_rank": Foreign("all replicas of an LLM are on one machine", (None,)),
    "data_parallel_external_lb": Foreign("run an ostinato serve per replica", (False,)),
    "data_parallel_hybrid_lb": Foreign("run an ostinato serve per machine", (False,)),
    "data_parallel_address": Foreign("all replicas of an LLM are on one machine", (None,)),
    "data_parallel_rpc_port": Foreign("all replicas of an LLM are on one machine", (None,)),
    "data_parallel_backend": Foreign("run ostinato serve --ray for replicas on Ray", ("mp",)),
    "nnodes": Foreign("start the ranks of several machines with torchrun", (1,)),
    "node_rank": Foreign("start the ranks of several machines with torchrun", (0,)),
    "master_addr": Foreign("start the ranks of several machines with torchrun", ("127.0.0.1",)),
    "master_port": Foreign("start the ranks of several machines with torchrun"),
    "enable_eplb": Foreign("experts stay on their ranks; " + _LEAVE_OUT, (False,)),
    "eplb_config": Foreign("experts stay on their ranks; " + _LEAVE_OUT, (None,)),
    "expert_placement_strategy": Foreign("ranks own experts in order", ("linear",)),
    "all2all_backend": Foreign("torch.distributed exchanges the tokens; " + _LEAVE_OUT, (None,)),
    "enable_dbo": Foreign("steps are not split in two; " + _LEAVE_OUT, (False,)),
    "ubatch_size": Foreign("steps are not split in two; " + _LEAVE_OUT, (0,)),
    "dbo_decode_token_threshold": Foreign("steps are not split in two; " + _LEAVE_OUT),
    "dbo_prefill_token_threshold": Foreign("steps are not split in two; " + _LEAVE_OUT),
    "enable_elastic_ep": Foreign("the number of ranks is fixed; " + _LEAVE_OUT, (False,)),
    "disable_nccl_for_dp_synchronization": Foreign(
        "replicas in lockstep agree by one all-reduce per step; " + _LEAVE_OUT, (None,)
    ),
    "max_parallel_loading_workers": Foreign("each rank loads its own weights", (None,)),
    "ray_workers_use_nsight": Foreign("profile with ostinato bench decode --profile", (False,)),
    "worker_cls": Foreign("there are no worker classes; build your own runner", ("auto",)),
    "worker_extension_cls": Foreign("call LLM.update_weights() and its neighbours", ("",)),
    "scheduler_cls": Foreign("the scheduler cannot be replaced", (None,)),
    "kv_transfer_config": Foreign("KV blocks stay on their engine; " + _LEAVE_OUT, (None,)),
    "kv_events_config": Foreign("KV blocks stay on their engine; " + _LEAVE_OUT, (None,)),
    "kv_offloading_size": Foreign("KV blocks stay on the device; " + _LEAVE_OUT, (None,)),
    "kv_offloading_backend": Foreign("KV blocks stay on the device; " + _LEAVE_OUT, ("native",)),
    "ec_transfer_config": Foreign("what an encoder computed stays on its device", (None,)),
    "weight_transfer_config": Foreign("call LLM.update_weights(WeightGroup(...))", (None,)),
    # Models.
    "attention_backend": Foreign("write attention='triton', 'numba' or 'torch'", (None,)),
    "attention_config": Foreign("write attention='triton', 'numba' or 'torch'", (None,)),
    "model_impl": Foreign(
        "the architecture decides: the native decoder, else transformers' modules", ("auto",)
    ),
    "served_model_name": Foreign("run ostinato serve --served-model-name", (None,)),
    "config_format": Foreign("checkpoints have a config.json", ("auto", "hf")),
    "hf_config_path": Foreign("the config.json beside the weights is read", (None,)),
    "model_loader_extra_config": Foreign("loading has no further options", (None,)),
    "safetensors_load_strategy": Foreign("files are mapped, and read once", ("lazy", None)),
    "pt_load_map_location": Foreign("only safetensors files are read", ("cpu",)),
    "rope_scaling": Foreign("edit a copy of the checkpoint's config.json", (None,)),
    "rope_theta": Foreign("edit a copy of the checkpoint's config.json", (None,)),
    "override_attention_dtype": Foreign("attention has the model's dtype", (None,)),
    "additional_config": Foreign("nothing reads it; " + _LEAVE_OUT, (None,)),
    "ignore_patterns": Foreign("only safetensors files are read", (None,)),
    "generation_config": Foreign(
        "only its eos_token_id is read; write SamplingParams(...)", ("auto",)
    ),
    "override_generation_config": Foreign("write SamplingParams(...)", (None,)),
    "logits_processors": Foreign("the sampler is part of the graph; write logit_bias", (None,)),
    "logprobs_mode": Foreign("log-probabilities are those of the raw logits", ("raw_logprobs",)),
    "max_logprobs": Foreign("each request may ask for up to 64; " + _LEAVE_OUT),
    "structured_outputs_config": Foreign("llguidance does it, without options", (None,)),
    "guided_decoding_backend": Foreign("llguidance does it, without options", ("auto", "guidance")),
    "reasoning_parser": Foreign("reasoning stays in the text", ("", None)),
    "enable_reasoning": Foreign("reasoning stays in the text", (False,)),
    "reasoning_parser_plugin": Foreign("reasoning stays in the text", ("", None)),
    "speculative_model": Foreign("write speculative=DraftModel(model=...)", (None,)),
    "ngram_prompt_lookup_max": Foreign("write speculative=NgramDrafts(max_match=...)", (None,)),
    "disable_by_batch_size": Foreign("write speculative=NgramDrafts(num_tokens={32: 4})", (None,)),
    "enable_suffix_decoding": Foreign("write speculative='suffix'", (False,)),
    "num_speculative_tokens": Foreign("write speculative=NgramDrafts(num_tokens=...)", (None,)),
    "load_format": Foreign(
        "checkpoints are safetensors; for dummy weights write random_weights=True",
        ("auto", "safetensors"),
    ),
    "quantization": Foreign("the checkpoint's config decides; " + _LEAVE_OUT, (None,)),
    "quantization_config": Foreign("the checkpoint's config decides; " + _LEAVE_OUT, (None,)),
    "allow_deprecated_quantization": Foreign("the checkpoint's config decides", (False,)),
    "speculative_config": Foreign(
        "write speculative=NgramDrafts(num_tokens=...), SuffixDrafts, DraftModel or EagleDrafts",
        (None,),
    ),
    "max_cpu_loras": Foreign("every loaded adapter is on the device; write max_loras", (None,)),
    "lora_dtype": Foreign("adapters have the model's dtype", ("auto", None)),
    "fully_sharded_loras": Foreign("adapters run on one device", (False,)),
    "default_mm_loras": Foreign("write generate(adapter=...)", (None,)),
    "enable_tower_connector_lora": Foreign("adapters change the language model only", (False,)),
    "specialize_active_lora": Foreign(
        "there are graphs for each number of active adapters; " + _LEAVE_OUT, (True,)
    ),
    "lora_extra_vocab_size": Foreign("adapters may not add tokens; " + _LEAVE_OUT, (0,)),
    "enable_prompt_adapter": Foreign("write enable_lora: adapters are LoRAs", (False,)),
    "hf_overrides": Foreign("edit a copy of the checkpoint's config.json", (None,)),
    "trust_remote_code": Foreign("code in a checkpoint is never executed", (False,)),
    "runner": Foreign("write task='embed' or task='classify'", ("auto", "generate")),
    "convert": Foreign("write task='embed' or task='classify'", ("auto", "none")),
    "override_pooler_config": Foreign("write embed(pooling=..., normalize=...)", (None,)),
    "pooler_config": Foreign("write embed(pooling=..., normalize=...)", (None,)),
    "enable_prompt_embeds": Foreign("prompts are text or token ids", (False,)),
    "allowed_local_media_path": Foreign("pass PIL images, arrays of pixels or data URLs", ("",)),
    "allowed_media_domains": Foreign("images are never downloaded", (None,)),
    "limit_mm_per_prompt": Foreign("max_model_len limits the images of a prompt", (None,)),
    "mm_processor_kwargs": Foreign("edit the checkpoint's preprocessor_config.json", (None,)),
    "mm_processor_cache_gb": Foreign("images are kept encoded for two steps' worth of tokens"),
    "mm_encoder_tp_mode": Foreign(
        "models that take images run on one device; " + _LEAVE_OUT, ("weights",)
    ),
    "mm_encoder_attn_backend": Foreign("encoders have one attention; " + _LEAVE_OUT, (None,)),
    "mm_encoder_only": Foreign("load the whole model; " + _LEAVE_OUT, (False,)),
    "enable_mm_embeds": Foreign("pass images, not what an encoder made of them", (False,)),
    "language_model_only": Foreign("the encoder is always loaded; " + _LEAVE_OUT, (False,)),
    "skip_mm_profiling": Foreign("nothing is profiled with images; " + _LEAVE_OUT, (True, False)),
    "interleave_mm_strings": Foreign("write the placeholders of images in the prompt", (False,)),
    "media_io_kwargs": Foreign("decode images yourself, and pass PIL images", (None,)),
    "video_pruning_rate": Foreign("videos are not supported; pass frames as images", (None,)),
    # Tokenizers and downloads.
    "tokenizer": Foreign("the checkpoint's tokenizer is used; put its files there", (None,)),
    "tokenizer_mode": Foreign("the checkpoint's tokenizer is used", ("auto",)),
    "tokenizer_pool_size": Foreign("prompts are read by the caller's thread", (0,)),
    "chat_template": Foreign("put it into the checkpoint's chat_template.jinja", (None,)),
    "skip_tokenizer_init": Foreign("prompts may always be token ids", (False,)),
    "revision": Foreign("download that revision, and pass its directory", (None,)),
    "tokenizer_revision": Foreign("download that revision, and pass its directory", (None,)),
    "code_revision": Foreign("code in a checkpoint is never executed", (None,)),
    "hf_token": Foreign("set HF_TOKEN, or download the model and pass its directory", (None,)),
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
    "flat_logprobs": Foreign("write logprobs; outputs have one dict per token", (False,)),
    "skip_reading_prefix_cache": Foreign(
        "call reset_prefix_cache(), or write LLM(enable_prefix_caching=False)", (None, False)
    ),
    "length_penalty": Foreign("beam search is not supported; write n", (1.0,)),
    "early_stopping": Foreign("beam search is not supported; write n", (False,)),
    "thinking_token_budget": Foreign("reasoning counts as output; write max_tokens", (None,)),
    "max_new_tokens": Foreign("write max_tokens"),
    "do_sample": Foreign("write temperature=0 for greedy output"),
    "num_beams": Foreign("beam search is not supported; write n", (1,)),
    "num_return_sequences": Foreign("write n", (1,)),
    "max_length": Foreign("write max_tokens, which counts the output alone"),
    "max_completion_tokens": Foreign("write max_tokens"),
    "stop_strings": Foreign("write stop", (None,)),
    "eos_token_id": Foreign("write stop_token_ids", (None,)),
    "pad_token_id": Foreign("prompts need no padding; " + _LEAVE_OUT, (None,)),
    "no_repeat_ngram_size": Foreign("write frequency_penalty or repetition_penalty", (0, None)),
    "repetition_detection": Foreign("write frequency_penalty or repetition_penalty", (None,)),
    "typical_p": Foreign("write top_p or min_p", (1.0,)),
    "logprob_token_ids": Foreign("write logprobs: those of the most likely tokens", (None,)),
    "response_format": Foreign(
        "write structured_outputs=StructuredOutputsParams(json=...)", (None,)
    ),
    "guided_json": Foreign("write structured_outputs=StructuredOutputsParams(json=...)", (None,)),
    "guided_regex": Foreign("write structured_outputs=StructuredOutputsParams(regex=...)", (None,)),
    "guided_choice": Foreign(
        "write structured_outputs=StructuredOutputsParams(choice=...)", (None,)
    ),
    "guided_grammar": Foreign(
        "write structured_outputs=StructuredOutputsParams(grammar=...)", (None,)
    ),
    "priority": Foreign("requests are served in order of arrival", (0,)),
    "skip_clone": Foreign("parameters cannot change, and are not copied", (True, False)),
}

CALL_OPTIONS = {
    "lora_request": Foreign("call load_adapter(name, path) once, and write adapter=name", (None,)),
    "prompt_token_ids": Foreign("pass lists of token ids as prompts", (None,)),
    "multi_modal_data": Foreign("write {'prompt': ..., 'images': [...]} as the prompt", (None,)),
    "priority": Foreign("requests are served in order of arrival", (None, 0)),
    "request_id": Foreign("the engine numbers requests: RequestOutput.request_id", (None,)),
    "guided_options_request": Foreign(
        "write SamplingParams(structured_outputs=StructuredOutputsParams(json=...))", (None,)
    ),
    "chat_template": Foreign("put it into the checkpoint's chat_template.jinja", (None,)),
    "chat_template_content_format": Foreign("the template decides", (None, "auto")),
    "add_generation_prompt": Foreign("conversations are always answered", (True,)),
    "continue_final_message": Foreign(
        "render the messages yourself, and call generate()", (False,)
    ),
    "tools": Foreign("chat() takes tools, and AsyncLLM with a conversation", (None,)),
    "mm_processor_kwargs": Foreign("edit the checkpoint's preprocessor_config.json", (None,)),
    "tokenization_kwargs": Foreign("tokenize the prompts yourself, and pass token ids", (None,)),
    "truncate_prompt_tokens": Foreign("write truncate=True, or cut the token ids", (None,)),
    "pooling_params": Foreign("write pooling, normalize and dimensions", (None,)),
    "pooling_task": Foreign("call embed, score or classify", (None,)),
}
