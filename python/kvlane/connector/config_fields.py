"""The fields of vLLM's configuration that decide what a block's bytes mean, class by class.

A field that is not left out here counts, also one that a later vLLM adds. A field at its default leaves no trace, so
engines of different versions share. The default is the one written here, so a version that changes it differs.

The names are those of three versions, 0.24, 0.32 and 0.33. A class or field that a version lacks does no harm.
docs/reference/identity-fields.md has the same as a table, made from this file.
"""

from __future__ import annotations

from kvlane.connector.digest import JsonValue

ENTERED: dict[str, str] = {
    "VllmConfig": "model_config cache_config load_config attention_config mamba_config diffusion_config kernel_config "
    "scheduler_config offload_config engram_config",
    "ModelConfig": "multimodal_config",
}
"""Fields that hold a configuration of their own, whose fields count each by itself. Other configurations are left out
as a whole: some differ from process to process, so a field that a later vLLM adds to them must not count unseen."""

COUNTED: dict[str, dict[str, JsonValue]] = {
    "VllmConfig": {"additional_config": {}},
    "ModelConfig": {
        "runner": "auto",
        "convert": "auto",
        "dtype": "auto",
        "max_model_len": None,
        "quantization": None,
        "quantization_config": None,
        "disable_sliding_window": False,
        "config_format": "auto",
        "hf_overrides": {},
        "model_class_overrides": {},
        "model_impl": "auto",
        "override_attention_dtype": None,
    },
    "MultiModalConfig": {
        "media_io_kwargs": {},
        "mm_processor_kwargs": None,
        "mm_encoder_only": False,
        "mm_encoder_attn_dtype": None,
        "mm_encoder_fp8_scale_path": None,
        "video_pruning_rate": None,
        "video_pruning_method": "evs",
        "allow_missing_mm_embeddings": False,
    },
    "CacheConfig": {
        "cache_dtype": "auto",
        "calculate_kv_scales": False,
        "kv_cache_dtype_skip_layers": [],
        "mamba_cache_dtype": "auto",
        "mamba_ssm_cache_dtype": "auto",
        "mamba_cache_mode": "none",
        "enable_mamba_shared_prefix_checkpoint": False,
        "use_replayssm": False,
        "replayssm_buffer_len": 16,
        "use_kda_recoverssm": False,
        "kv_sharing_fast_prefill": False,
        "swa_bounded_replay": True,
    },
    "LoadConfig": {"model_loader_extra_config": {}},
    "AttentionConfig": {
        "use_fp4_indexer_cache": False,
        "indexer_kv_dtype": "bf16",
        "indexer_sparse_logits": False,
        "hisparse_config": None,
        "use_non_causal": False,
        "use_prefill_query_quantization": False,
        "disable_flashinfer_q_quantization": False,
    },
    "MambaConfig": {"enable_stochastic_rounding": False, "stochastic_rounding_philox_rounds": 0},
    "DiffusionConfig": {"canvas_length": None, "max_denoising_steps": None},
    "SpeculativeConfig": {
        "method": None,
        "quantization": None,
        "kv_cache_dtype": None,
        "index_share_for_mtp_iteration": None,
        "use_heterogeneous_vocab": False,
        "parallel_drafting": False,
        "disable_eagle_block_drop": False,
    },
    "LoRAConfig": {
        "lora_dtype": "auto",
        "target_modules": None,
        "enable_tower_connector_lora": False,
        "enable_mixed_moe_lora_format": False,
        "enable_moe_shared_loras": False,
    },
}
"""Fields that count, each with the default that leaves no trace."""

STATE_SPACE = "Counts for models with state-space layers; vLLM resolves it for others too."
WHEN: dict[str, str] = {
    "ModelConfig.max_model_len": "LongRoPE: whether it is above the length that the model was first trained for. Llama "
    "4: whether attention temperatures are tuned, which it decides at 32768 unless the generation configuration does. "
    "Kinds of RoPE that kvlane does not know: its value. Plain RoPE: nothing.",
    "ModelConfig.hf_overrides": "Its value; where it is or holds a function, the configuration that came of it.",
    "CacheConfig.cache_dtype": "Latent attention: the format in the KV cache group counts instead, which layers may "
    "have chosen themselves. Else its value, with `fp8` for an `auto` that a checkpoint made one.",
    "CacheConfig.calculate_kv_scales": "The scales come from the engine's first batch: it shares with no other engine.",
    "CacheConfig.mamba_cache_dtype": STATE_SPACE,
    "CacheConfig.mamba_ssm_cache_dtype": STATE_SPACE,
    "CacheConfig.mamba_cache_mode": STATE_SPACE,
    "AttentionConfig.indexer_kv_dtype": "Counts for models with an indexer; versions differ in its default.",
    "LoadConfig.model_loader_extra_config": "Counts where a plugin or a streamer loads the weights.",
}
"""When a field counts that does not always do; `config_identity.CONDITIONS` has the functions."""

COUNTED_WHOLE = frozenset(
    {"QuantizationConfigArgs", "QuantSpec", "QuantKey", "ScaleDesc", "ScalarType", "HiSparseConfig"}
)
"""Classes of values: where one stands in a field that counts, all of it does."""

CONTENT = "What the files hold counts, not their name, place or version."
WEIGHTS = "How weights are read and kept changes nothing of what they are."
PARALLEL = "How blocks are cut over ranks and hosts is told by the layout, not by the namespace."
EXPERTS = "Where experts are placed changes nothing of what they compute."
SCHEDULING = "Which tokens are computed when changes nothing of what is computed for them."
SPEED = "How fast it is computed; the results differ by rounding at most."
MEMORY = "How much memory there is, and where it lies."
OUTPUT = "What happens after the blocks are computed: sampling and answers."
TEXT = "Block hashes are of token ids, so it does not matter how text becomes tokens."
WATCHING = "What is logged, measured or watched."
NAMES = "Names, addresses and rights of the server."
SET_BY_VLLM = "vLLM derives it from fields and files that count."
HASHED = "It is in the block's hash."
GROUP = "It is in the KV cache group, which counts."
OTHERS = "It concerns other transfers than kvlane's."

LEFT_OUT: dict[str, list[tuple[str, str]]] = {
    "VllmConfig": [
        (PARALLEL, "parallel_config"),
        (SPEED, "device_config compilation_config optimization_level performance_mode"),
        (OUTPUT, "structured_outputs_config reasoning_config aux_output_config watermark_config"),
        (WATCHING, "observability_config logging_config profiler_config watchdog_config"),
        (NAMES, "instance_id shutdown_timeout"),
        (SET_BY_VLLM, "quant_config"),
        (
            OTHERS,
            "kv_transfer_config kv_events_config ec_transfer_config ec_manager_config weight_transfer_config",
        ),
        (
            "It is mixed into the hashes of requests with an adapter; other requests do not depend on it.",
            "lora_config",
        ),
        (
            "It counts for the groups that may hold the drafter's layers; the model's own do not depend on it.",
            "speculative_config",
        ),
    ],
    "ModelConfig": [
        (CONTENT, "model model_weights revision hf_config_path"),
        ("The configuration files and what overrides them count.", "hf_config hf_text_config"),
        (
            "The code files beside the model count where it is set, and so does their revision.",
            "trust_remote_code code_revision",
        ),
        ("Only dummy weights depend on it, and there it counts.", "seed"),
        (SET_BY_VLLM, "is_submodel_config word_embeddings_untied_by_checkpoint"),
        (TEXT, "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init renderer_num_workers"),
        ("Only a drafter's longest request.", "spec_target_max_model_len"),
        (SPEED, "enforce_eager disable_cascade_attn"),
        (
            OUTPUT,
            "return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay "
            "enable_return_routed_experts logits_processors io_processor_plugin pooler_config",
        ),
        (
            "Only Llama 4 takes something of it that counts, and there it does.",
            "generation_config override_generation_config",
        ),
        (HASHED, "enable_prompt_embeds"),
        (
            NAMES,
            "served_model_name hf_token allowed_local_media_path allowed_media_domains "
            "allow_deprecated_quantization",
        ),
        (
            MEMORY,
            "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph "
            "enable_nccl_comm_suspend enable_cumem_allocator",
        ),
    ],
    "MultiModalConfig": [
        ("It says which inputs are accepted.", "language_model_only limit_per_prompt enable_mm_embeds"),
        (HASHED, "mm_hasher_algorithm"),
        (TEXT, "interleave_mm_strings"),
        (
            SPEED,
            "mm_device_do_normalize mm_encoder_tp_mode mm_encoder_attn_backend "
            "skip_mm_profiling mm_tensor_ipc",
        ),
        (
            MEMORY,
            "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_ipc_gpu_memory_gb",
        ),
        (
            "It is of scales that are written, not of those that are used.",
            "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin",
        ),
    ],
    "CacheConfig": [
        (
            GROUP,
            "block_size user_specified_block_size sliding_window mamba_block_size user_specified_mamba_block_size "
            "effective_attention_block_size _block_size_resolved",
        ),
        (
            "The layout tells how a block's bytes lie.",
            "kv_cache_layout mamba_page_size_padded skip_page_size_padded",
        ),
        (HASHED, "prefix_match_unit hash_block_size cache_hit_alignment_tokens"),
        ("It counts together with the seed that vLLM starts hashes with.", "prefix_caching_hash_algo"),
        (
            MEMORY,
            "gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks kv_cache_size_tokens "
            "kv_cache_max_concurrency kv_cache_memory_bytes kv_offloading_size kv_offloading_backend "
            "simple_cpu_offload_num_blocks",
        ),
        ("It is of the engine's own prefix cache.", "enable_prefix_caching prefix_cache_retention_interval"),
        (SET_BY_VLLM, "is_attention_free"),
    ],
    "LoadConfig": [
        (CONTENT, "load_format download_dir ignore_patterns"),
        (
            WEIGHTS,
            "safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size device "
            "use_tqdm_on_load pt_load_map_location",
        ),
    ],
    "AttentionConfig": [
        (
            SPEED,
            "backend minimax_m3_msa_decode_backend backend_per_kind use_prefill_decode_attention flash_attn_version "
            "flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph "
            "use_trtllm_attention "
            "mla_prefill_backend sparse_mla_force_mqa sparse_mla_prefill_workspace_factor flex_attn_block_m "
            "flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size trtllm_ragged_backend "
            "indexer_tp_shard_min_rows minimax_m3_indexer_cp",
        ),
    ],
    "MambaConfig": [(SPEED, "backend ssu_algorithm")],
    "SpeculativeConfig": [
        (CONTENT, "model revision code_revision draft_load_config"),
        ("It counts as the drafter's model.", "draft_model_config"),
        ("It is the engine's own, seen from the drafter.", "target_model_config target_parallel_config"),
        (PARALLEL, "draft_tensor_parallel_size tensor_parallel_size draft_parallel_config"),
        (
            SPEED,
            "enforce_eager moe_backend attention_backend disable_padded_drafter_batch use_local_argmax_reduction",
        ),
        (
            "How many tokens are guessed, and which guesses are kept: what is rejected is computed again.",
            "num_speculative_tokens num_speculative_tokens_per_batch_size max_model_len prompt_lookup_max "
            "prompt_lookup_min "
            "suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor "
            "suffix_decoding_min_token_prob rejection_sample_method synthetic_acceptance_rates "
            "synthetic_acceptance_length enable_adaptive_verification draft_sample_method dspark_draft_topk "
            "disable_lookahead_block_hashes draft_lm_head_quantization xpress_topc fly_window_size "
            "fly_entropy_threshold fly_entropy_top_k",
        ),
    ],
    "LoRAConfig": [
        (MEMORY, "max_lora_rank max_loras max_cpu_loras"),
        (SPEED, "fully_sharded_loras specialize_active_lora"),
        ("Requests name the adapter that they use.", "default_mm_loras"),
        (OUTPUT, "max_lora_cls_labels"),
    ],
    "AuxOutputConfig": [
        (
            OUTPUT,
            "enable_return_routed_experts max_bytes",
        ),
    ],
    "BaseDummyOptions": [
        (
            MEMORY,
            "count",
        ),
    ],
    "CompilationConfig": [
        (
            SPEED,
            "mode debug_dump_path cache_dir compile_cache_save_format backend custom_ops ir_enable_torch_wrap "
            "splitting_ops compile_mm_encoder cudagraph_mm_encoder encoder_cudagraph_token_budgets "
            "encoder_cudagraph_max_vision_items_per_batch encoder_cudagraph_max_frames_per_batch "
            "compile_sizes compile_ranges_endpoints inductor_compile_config inductor_passes cudagraph_mode "
            "cudagraph_num_of_warmups cudagraph_capture_sizes cudagraph_copy_inputs cudagraph_specialize_lora "
            "use_inductor_graph_partition pass_config max_cudagraph_capture_size dynamic_shapes_config "
            "local_cache_dir fast_moe_cold_start enabled_custom_ops disabled_custom_ops traced_files "
            "compilation_time encoder_compilation_time static_forward_context static_all_moe_layers "
            "cudagraph_decoder_replay decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold",
        ),
    ],
    "DeviceConfig": [
        (
            SPEED,
            "device device_type",
        ),
    ],
    "DynamicShapesConfig": [
        (
            SPEED,
            "type evaluate_guards assume_32_bit_indexing",
        ),
    ],
    "ECTransferConfig": [
        (
            OTHERS,
            "ec_connector engine_id ec_buffer_device ec_buffer_size ec_role ec_rank ec_parallel_size ec_ip "
            "ec_port ec_connector_extra_config ec_connector_module_path mm_encoder_output_widths",
        ),
    ],
    "EPLBConfig": [
        (
            EXPERTS,
            "window_size step_interval num_redundant_experts log_balancedness log_balancedness_interval "
            "use_async policy communicator enable_migration_batching",
        ),
    ],
    "EncoderCacheManagerConfig": [
        (
            OTHERS,
            "encoder_cache_manager_cls manager_config",
        ),
    ],
    "EngramConfig": [
        (
            MEMORY,
            "cpu_offload embedding_across_dp dp_shared_memory use_thp",
        ),
    ],
    "FaultToleranceConfig": [
        (
            WATCHING,
            "engine_recovery_timeout_sec",
        ),
    ],
    "IrOpPriorityConfig": [
        (
            SPEED,
            "rms_norm fused_add_rms_norm gelu_and_mul_sparse",
        ),
    ],
    "KVEventsConfig": [
        (
            OTHERS,
            "enable_kv_cache_events publisher endpoint replay_endpoint buffer_steps hwm max_queue_size topic",
        ),
    ],
    "KVTransferConfig": [
        (
            OTHERS,
            "kv_connector engine_id kv_buffer_device kv_buffer_size kv_role kv_rank kv_parallel_size kv_ip "
            "kv_port kv_connector_extra_config kv_connector_module_path enable_permute_local_kv "
            "kv_load_failure_policy",
        ),
    ],
    "KernelConfig": [
        (
            SPEED,
            "ir_op_priority enable_flashinfer_autotune moe_backend linear_backend "
            "enable_rocm_segmented_attn_autotune enable_cutedsl_warmup enable_jit_warmup "
            "sparse_indexer_topk_backend linear_backend_per_quant monokernel",
        ),
    ],
    "LoggingConfig": [
        (
            WATCHING,
            "log_level formatter configure_logging pylogging_config_file",
        ),
    ],
    "ObservabilityConfig": [
        (
            WATCHING,
            "show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces kv_cache_metrics "
            "kv_cache_metrics_sample cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics "
            "enable_mm_processor_stats enable_logging_iteration_details jit_monitor_verbose "
            "per_request_spec_decode_metrics custom_histogram_buckets jit_monitor_mode",
        ),
    ],
    "OffloadConfig": [
        (
            MEMORY,
            "offload_backend uva prefetch",
        ),
    ],
    "ParallelConfig": [
        (
            PARALLEL,
            "pipeline_parallel_size tensor_parallel_size prefill_context_parallel_size data_parallel_size "
            "data_parallel_size_local data_parallel_rank data_parallel_rank_local data_parallel_master_ip "
            "data_parallel_rpc_port data_parallel_master_port data_parallel_backend data_parallel_external_lb "
            "data_parallel_hybrid_lb max_parallel_loading_workers disable_custom_all_reduce enable_dbo "
            "ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold "
            "disable_nccl_for_dp_synchronization ray_workers_use_nsight ray_runtime_env placement_group "
            "distributed_executor_backend worker_cls sd_worker_cls worker_extension_cls master_addr "
            "master_port node_rank nnodes numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids "
            "distributed_timeout_seconds cpu_distributed_timeout_seconds world_size rank "
            "_data_parallel_master_port_list _coord_store_port decode_context_parallel_size "
            "dcp_kv_cache_interleave_size dcp_comm_backend cp_kv_cache_interleave_size data_parallel_index "
            "_api_process_count _api_process_rank dp_sync_interval enable_hc_sp enable_batch_sharded_sampling "
            "enable_shm_tensor_arena dcp_q_replicate _allow_auto_resolve_cp_interleave_size "
            "enable_fault_tolerance fault_tolerance_config",
        ),
        (
            EXPERTS,
            "is_moe_model enable_expert_parallel enable_ep_weight_filter enable_eplb eplb_config "
            "expert_placement_strategy all2all_backend enable_elastic_ep elastic_ep_max_dp_size",
        ),
    ],
    "PassConfig": [
        (
            SPEED,
            "fuse_norm_quant fuse_act_quant fuse_attn_quant eliminate_noops enable_sp fuse_gemm_comms "
            "fuse_allreduce_rms enable_qk_norm_rope_fusion fuse_rope_kvcache_cat_mla fuse_act_padding "
            "fuse_mla_dual_rms_norm fuse_rope_kvcache rope_kvcache_fusion_max_token_num "
            "fi_allreduce_fusion_max_size_mb sp_min_token_num fuse_qk_norm_rope_kvcache",
        ),
    ],
    "PoolerConfig": [
        (
            OUTPUT,
            "task pooling_type seq_pooling_type tok_pooling_type use_activation dimensions "
            "enable_chunked_processing max_embed_len logit_mean logit_sigma step_tag_id returned_token_ids "
            "enable_flash_late_interaction",
        ),
    ],
    "PrefetchOffloadConfig": [
        (
            MEMORY,
            "offload_group_size offload_num_in_group offload_prefetch_step offload_params",
        ),
    ],
    "ProfilerConfig": [
        (
            WATCHING,
            "profiler torch_profiler_dir torch_profiler_with_stack torch_profiler_with_flops "
            "torch_profiler_use_gzip torch_profiler_dump_cuda_time_total torch_profiler_record_shapes "
            "torch_profiler_with_memory ignore_frontend delay_iterations max_iterations warmup_iterations "
            "active_iterations wait_iterations torch_profiler_activities proton_profiler_dir proton_context "
            "proton_data proton_backend proton_mode proton_hook proton_output_format proton_graph_attribution "
            "capture_torch_profiler detailed_trace_annotation",
        ),
    ],
    "ReasoningConfig": [
        (
            OUTPUT,
            "reasoning_parser reasoning_start_str reasoning_end_str _reasoning_start_token_ids "
            "_reasoning_end_token_ids _enabled _natural_reasoning_end_token_ids",
        ),
    ],
    "SchedulerConfig": [
        (
            SCHEDULING,
            "runner_type max_num_batched_tokens max_num_scheduled_tokens max_num_seqs "
            "max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold "
            "enable_chunked_prefill is_multimodal_model max_num_encoder_input_tokens encoder_cache_size "
            "policy disable_chunked_mm_input scheduler_cls disable_hybrid_kv_cache_manager "
            "scheduler_reserve_full_isl watermark prefill_schedule_interval async_scheduling stream_interval "
            "max_num_active_seqs long_prefill_token_threshold_adaptive max_num_queued_reqs "
            "max_num_queued_tokens",
        ),
    ],
    "StructuredOutputsConfig": [
        (
            OUTPUT,
            "backend disable_any_whitespace disable_additional_properties reasoning_parser "
            "reasoning_parser_plugin enable_in_reasoning",
        ),
    ],
    "UVAOffloadConfig": [
        (
            MEMORY,
            "cpu_offload_gb cpu_offload_params",
        ),
    ],
    "WatchdogConfig": [
        (
            WATCHING,
            "timeout check_interval dump_dir",
        ),
    ],
    "WatermarkConfig": [
        (
            OUTPUT,
            "key algorithm alpha context_width deduplicate_contexts deduplicate_contexts_max_history prf "
            "allow_target_only_watermarking",
        ),
    ],
    "WeightTransferConfig": [
        (
            OTHERS,
            "backend",
        ),
    ],
}
"""Fields that do not count, each with the reason."""
