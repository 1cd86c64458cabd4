"""The engine's questions for its configuration: `engine.zero_reduce_bucket_size()` and about a hundred like it.

A table: for each name the place in the configuration and DeepSpeed's default. They tell what was configured; what
zeropage makes of it is in the documentation of each key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["ConfigGetters"]

_ZERO = "zero_optimization"
_ANSWERS: dict[str, tuple[str, Any]] = {
    # the optimizer's and the scheduler's blocks
    "optimizer_params": ("optimizer.params", None),
    "optimizer_legacy_fusion": ("optimizer.legacy_fusion", False),
    "scheduler_name": ("scheduler.type", None),
    "scheduler_params": ("scheduler.params", None),
    # precision
    "fp16_enabled": ("fp16.enabled", False),
    "fp16_auto_cast": ("fp16.auto_cast", False),
    "fp16_master_weights_and_gradients": ("fp16.fp16_master_weights_and_grads", False),
    "loss_scale": ("fp16.loss_scale", 0),
    "bfloat16_enabled": ("bf16.enabled", False),
    "bf16_master_weights_and_gradients": ("bf16.bf16_master_weights_and_grads", False),
    "bf16_optimizer_states": ("bf16.bf16_optimizer_states", False),
    "torch_autocast_enabled": ("torch_autocast.enabled", False),
    "torch_autocast_lower_precision_safe_modules": ("torch_autocast.lower_precision_safe_modules", None),
    # ZeRO
    "zero_allow_untested_optimizer": ("zero_allow_untested_optimizer", False),
    "zero_force_ds_cpu_optimizer": ("zero_force_ds_cpu_optimizer", True),
    "zero_reduce_scatter": (f"{_ZERO}.reduce_scatter", True),
    "zero_overlap_comm": (f"{_ZERO}.overlap_comm", None),
    "zero_offload_optimizer": (f"{_ZERO}.offload_optimizer", None),
    "zero_offload_param": (f"{_ZERO}.offload_param", None),
    "zero_partial_offload": (f"{_ZERO}.offload_optimizer.ratio", 1.0),
    "zero_sub_group_size": (f"{_ZERO}.sub_group_size", 1_000_000_000),
    "zero_reduce_bucket_size": (f"{_ZERO}.reduce_bucket_size", 500_000_000),
    "zero_allgather_bucket_size": (f"{_ZERO}.allgather_bucket_size", 500_000_000),
    "zero_allgather_partitions": (f"{_ZERO}.allgather_partitions", True),
    "zero_contiguous_gradients": (f"{_ZERO}.contiguous_gradients", True),
    "zero_load_from_fp32_weights": (f"{_ZERO}.load_from_fp32_weights", True),
    "zero_elastic_checkpoint": (f"{_ZERO}.elastic_checkpoint", False),
    "zero_max_live_parameters": (f"{_ZERO}.stage3_max_live_parameters", 1_000_000_000),
    "zero_max_reuse_distance": (f"{_ZERO}.stage3_max_reuse_distance", 1_000_000_000),
    "zero_prefetch_bucket_size": (f"{_ZERO}.stage3_prefetch_bucket_size", 50_000_000),
    "zero_module_granularity_threshold": (f"{_ZERO}.stage3_module_granularity_threshold", 0),
    "zero_param_persistence_threshold": (f"{_ZERO}.stage3_param_persistence_threshold", 100_000),
    "zero_model_persistence_threshold": (f"{_ZERO}.stage3_model_persistence_threshold", 2**63 - 1),
    "zero_legacy_stage1": (f"{_ZERO}.legacy_stage1", False),
    "zero_ignore_unused_parameters": (f"{_ZERO}.ignore_unused_parameters", True),
    "zero_round_robin_gradients": (f"{_ZERO}.round_robin_gradients", False),
    "zero_hpz_partition_size": (f"{_ZERO}.zero_hpz_partition_size", 1),
    "zero_quantized_weights": (f"{_ZERO}.zero_quantized_weights", False),
    "zero_quantized_nontrainable_weights": (f"{_ZERO}.zero_quantized_nontrainable_weights", False),
    "zero_quantized_gradients": (f"{_ZERO}.zero_quantized_gradients", False),
    "zero_log_trace_cache_warnings": (f"{_ZERO}.log_trace_cache_warnings", False),
    "zero_allgather_sequential": (f"{_ZERO}.stage3_allgather_sequential", False),
    "is_sanity_checks_enabled": (f"{_ZERO}.enable_sanity_checks", False),
    "zenflow_config": (f"{_ZERO}.zenflow", None),
    # gradients
    "gradient_predivide_factor": ("gradient_predivide_factor", 1.0),
    # checkpoints
    "use_node_local_storage": ("checkpoint.use_node_local_storage", False),
    "load_universal_checkpoint": ("checkpoint.load_universal", False),
    # what is told
    "steps_per_print": ("steps_per_print", None),
    "wall_clock_breakdown": ("wall_clock_breakdown", False),
    "memory_breakdown": ("memory_breakdown", False),
    "dump_state": ("dump_state", False),
    "log_level": ("log_level", None),
    "flops_profiler_enabled": ("flops_profiler.enabled", False),
    "flops_profiler_recompute_fwd_factor": ("flops_profiler.recompute_fwd_factor", 0.0),
    "flops_profiler_profile_step": ("flops_profiler.profile_step", 1),
    "flops_profiler_module_depth": ("flops_profiler.module_depth", -1),
    "flops_profiler_top_modules": ("flops_profiler.top_modules", 1),
    "flops_profiler_detailed": ("flops_profiler.detailed", True),
    "flops_profiler_output_file": ("flops_profiler.output_file", None),
    # what is not there
    "autotp_size": ("tensor_parallel.autotp_size", 0),
    "autotuning_enabled": ("autotuning.enabled", False),
    "data_efficiency_enabled": ("data_efficiency.enabled", False),
    "data_efficiency_config": ("data_efficiency", {}),
    "data_sampling_enabled": ("data_efficiency.data_sampling.enabled", False),
    "data_sampling_config": ("data_efficiency.data_sampling", {}),
    "curriculum_learning_enabled": ("data_efficiency.data_sampling.curriculum_learning.enabled", False),
    "random_ltd_enabled": ("data_efficiency.data_routing.random_ltd.enabled", False),
    "aio_config": ("aio", {}),
    "dataloader_drop_last": ("dataloader_drop_last", False),
}


def look_up(config: Mapping[str, Any], path: str, default: Any) -> Any:
    """The value under a dotted path; `default` where it, or a block on the way, is missing or null."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return default if value is None or value == "auto" else value


def _getter(name: str, path: str, default: Any) -> Callable[[Any], Any]:
    def get(self: Any) -> Any:
        return look_up(self.config, path, default)

    get.__name__ = name
    get.__doc__ = f"The configuration's `{path}`; default {default!r}."
    return get


ConfigGetters: type[Any] = type(
    "ConfigGetters", (), {name: _getter(name, path, default) for name, (path, default) in _ANSWERS.items()}
)
"""A mixin with all of them, for a class that has `config`."""
