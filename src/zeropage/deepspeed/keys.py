"""Every key of a DeepSpeed 0.19.8 configuration, and what becomes of it here.

A key takes effect, or is accepted in silence because it has no meaning here (the note says why), or would change
results in a way that cannot be had and is refused, unless its value leaves it off. A key that stands for a whole
block covers everything in the block. docs/deepspeed.md shows this table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

__all__ = ["KEYS", "Key", "Treatment", "names_in"]


class Treatment(Enum):
    """What becomes of a key."""

    HONOURED = "honoured"  # it takes effect; the note says as what
    SILENT = "no meaning here"  # accepted without a word; the note says why
    REFUSED = "refused"  # an error unless it is off; the note says what to write instead


@dataclass(frozen=True, slots=True)
class Key:
    """One key's treatment. `off` are the values of a refused key that ask for nothing."""

    treatment: Treatment
    note: str
    off: tuple[Any, ...] = (None, False, "auto")
    on_by_default: bool = False

    def is_off(self, value: Any) -> bool:
        """Whether `value` asks for nothing: one of `off`, an empty block, or a block that is not enabled."""
        if isinstance(value, Mapping):
            return not value or not value.get("enabled", self.on_by_default)
        return value in self.off


def _honoured(note: str) -> Key:
    return Key(Treatment.HONOURED, note)


def _silent(note: str) -> Key:
    return Key(Treatment.SILENT, note)


def _refused(note: str, *off: Any, on_by_default: bool = False) -> Key:
    return Key(Treatment.REFUSED, note, (None, False, "auto", *off), on_by_default)


def _refused_if_false(note: str) -> Key:
    return Key(Treatment.REFUSED, note, (None, True, "auto"))


_OWN_MESSAGES = "zeropage sizes its own messages"
_OWN_READAHEAD = "pages are read ahead along the order last seen; a wrong guess costs time only"
_NO_BUFFERS = "there are no flat buffers"
_NO_HOOKS = "there are no module hooks to tune"
_NO_TENSOR_PARALLEL = "tensor parallelism is out of scope; remove it"

KEYS: Mapping[str, Key] = {
    # -- batch
    "train_batch_size": _honoured("samples of a step on all ranks"),
    "train_micro_batch_size_per_gpu": _honoured("samples of a micro-batch on one rank"),
    "gradient_accumulation_steps": _honoured("micro-batches of a step"),
    "managed_gradient_accumulation": _honoured("false: every `engine.step()` applies what has accumulated"),
    "dataloader_drop_last": _honoured("for `deepspeed_io` and `training_data`"),
    # -- what is told
    "steps_per_print": _honoured("steps from one progress line to the next; absent or infinite: none"),
    "wall_clock_breakdown": _honoured("times of forward, backward and step in the progress line"),
    "memory_breakdown": _silent("the progress line shows memory always"),
    "dump_state": _silent("a print-out of DeepSpeed's own variables"),
    "log_level": _honoured("the level of the logger `deepspeed.utils.logger`"),
    "timers.throughput.enabled": _honoured("whether the progress line tells samples per second"),
    "timers.throughput.synchronized": _silent("times are taken where the step has waited for the device anyway"),
    "comms_logger": _silent("it lists DeepSpeed's own collectives"),
    "tensorboard.enabled": _honoured("loss, learning rate and loss scale go to TensorBoard"),
    "tensorboard.output_path": _honoured("folder"),
    "tensorboard.job_name": _honoured("folder in that folder"),
    "csv_monitor.enabled": _honoured("the same as files"),
    "csv_monitor.output_path": _honoured("folder"),
    "csv_monitor.job_name": _honoured("folder in that folder"),
    "wandb.enabled": _honoured("the same to Weights & Biases"),
    "wandb.group": _honoured("group of the run"),
    "wandb.team": _honoured("entity of the run"),
    "wandb.project": _honoured("project of the run"),
    "comet": _refused("there is no Comet monitor; use tensorboard, csv_monitor or wandb"),
    "flops_profiler.enabled": _honoured("floating-point operations of one step, by torch's counter"),
    "flops_profiler.profile_step": _honoured("the step that is counted"),
    "flops_profiler.module_depth": _honoured("how deep the table goes; -1: all"),
    "flops_profiler.top_modules": _honoured("how many modules of a depth are listed first"),
    "flops_profiler.detailed": _honoured("whether every module is listed"),
    "flops_profiler.output_file": _honoured("where the table is written instead of the log"),
    "flops_profiler.recompute_fwd_factor": _silent("recomputed forwards are counted as they happen"),
    "autotuning": _refused("nothing is tuned here: zeropage has few numbers to tune; remove the block"),
    # -- precision
    "fp16.enabled": _honoured(
        "parameters in fp16, masters in fp32 of trained ones; frozen bf16 parameters and buffers stay"
    ),
    "fp16.auto_cast": _honoured("floating-point inputs of forward are cast to fp16"),
    "fp16.loss_scale": _honoured("a fixed loss scale; 0: it follows the overflows"),
    "fp16.initial_scale_power": _honoured("the first loss scale is 2 to this power"),
    "fp16.loss_scale_window": _honoured("clean steps that double the loss scale"),
    "fp16.hysteresis": _honoured("the overflow from which on each one halves it"),
    "fp16.consecutive_hysteresis": _refused("hysteresis is refilled by a clean window; remove it"),
    "fp16.min_loss_scale": _honoured("the loss scale never falls below"),
    "fp16.fp16_master_weights_and_grads": _refused("masters are fp32; remove it"),
    "bf16.enabled": _honoured(
        "parameters in bf16, masters in fp32 of trained ones; frozen fp16 parameters and buffers stay"
    ),
    "bf16.immediate_grad_update": _silent("gradients are added to their owners as they appear, always"),
    "bf16.check_grad_overflow": _honoured(
        "whether stages 0 to 2 skip a step whose gradient is not finite; 3 always does"
    ),
    "bf16.bf16_master_weights_and_grads": _refused("masters are fp32; remove it"),
    "bf16.bf16_optimizer_states": _refused("optimizer states of bf16 parameters are fp32; remove it"),
    "torch_autocast.enabled": _honoured("forward runs under `torch.autocast`"),
    "torch_autocast.dtype": _honoured("bfloat16; float16 is an error, since gradients would underflow: use fp16"),
    "torch_autocast.lower_precision_safe_modules": _silent("it chooses what travels in 16 bits; sums here are fp32"),
    "data_types.grad_accum_dtype": _honoured("the dtype that gradients are summed in; default fp32"),
    "data_types.param_dtype": _honoured("must agree with the fp16 and bf16 blocks, as in DeepSpeed"),
    "data_types.buffer_dtype": _refused("buffers are never cast; cast them in the model"),
    "data_types.keep_in_fp32_modules": _silent("it protects buffers from a cast that is never made"),
    "communication_data_type": _honoured("the dtype that gradients are summed in, unless grad_accum_dtype is given"),
    "seq_parallel_communication_data_type": _silent("there is no sequence parallelism"),
    "prescale_gradients": _silent("it guards sums in 16 bits; sums here are fp32"),
    "gradient_predivide_factor": _silent("it guards sums in 16 bits; sums here are fp32"),
    "gradient_allreduce_op": _refused(
        "gradients are averaged; multiply the loss by the number of ranks for sums", "mean"
    ),
    "gradient_clipping": _honoured("the largest global norm; default 1.0 as in DeepSpeed, 0 never clips"),
    "sparse_gradients": _silent("sparse gradients of an `nn.Embedding(sparse=True)` are handled without it"),
    "disable_allgather": _silent("it chooses between two collectives"),
    # -- optimizer and schedule
    "optimizer.type": _honoured("Adam, AdamW, Adagrad, Lion, SGD, or any other class of `torch.optim`"),
    "optimizer.params": _honoured("its arguments, with DeepSpeed's defaults and `torch_adam`, `adam_w_mode`"),
    "optimizer.legacy_fusion": _silent("it chooses an implementation"),
    "scheduler.type": _honoured("WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, or one of torch's"),
    "scheduler.params": _honoured("its arguments"),
    "zero_allow_untested_optimizer": _silent("any torch optimizer runs"),
    "zero_force_ds_cpu_optimizer": _silent("an offloaded step runs torch's own optimizer"),
    # -- ZeRO
    "zero_optimization.stage": _honoured("0, 1, 2 or 3: below 3, gathered parameters are not evicted"),
    "zero_optimization.offload_param.device": _honoured(
        "cpu, where either of the two means both; nvme, for a model on CPUs"
    ),
    "zero_optimization.offload_param.nvme_path": _honoured("the folder for nvme"),
    "zero_optimization.offload_param.buffer_count": _silent(_NO_BUFFERS),
    "zero_optimization.offload_param.buffer_size": _silent(_NO_BUFFERS),
    "zero_optimization.offload_param.max_in_cpu": _silent(
        "the system's page cache decides what of the disk stays in memory"
    ),
    "zero_optimization.offload_param.pin_memory": _silent("it tunes transfers to a device"),
    "zero_optimization.offload_optimizer.device": _honoured(
        "cpu, where either of the two means both; nvme, for a model on CPUs"
    ),
    "zero_optimization.offload_optimizer.nvme_path": _honoured("the folder for nvme"),
    "zero_optimization.offload_optimizer.buffer_count": _silent(_NO_BUFFERS),
    "zero_optimization.offload_optimizer.pin_memory": _silent("it tunes transfers to a device"),
    "zero_optimization.offload_optimizer.pipeline_read": _silent("reading and writing beside the step is always on"),
    "zero_optimization.offload_optimizer.pipeline_write": _silent("reading and writing beside the step is always on"),
    "zero_optimization.offload_optimizer.fast_init": _silent("reading and writing beside the step is always on"),
    "zero_optimization.offload_optimizer.ratio": _silent("all of the optimizer is offloaded"),
    "zero_optimization.offload_optimizer.super_offload": _silent("it chooses an implementation"),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": _silent("it tunes super_offload"),
    "zero_optimization.cpu_offload": _honoured("old name of offload_optimizer with device cpu"),
    "zero_optimization.cpu_offload_param": _honoured("old name of offload_param with device cpu"),
    "zero_optimization.cpu_offload_use_pin_memory": _silent("it tunes transfers to a device"),
    "zero_optimization.contiguous_gradients": _silent("gradients go into their owners' accumulators as they appear"),
    "zero_optimization.reduce_scatter": _silent("it chooses between two collectives"),
    "zero_optimization.reduce_bucket_size": _silent(_OWN_MESSAGES),
    "zero_optimization.use_multi_rank_bucket_allreduce": _silent(_OWN_MESSAGES),
    "zero_optimization.allgather_partitions": _silent("it chooses between two collectives"),
    "zero_optimization.allgather_bucket_size": _silent(_OWN_MESSAGES),
    "zero_optimization.overlap_comm": _silent("it tunes when messages travel"),
    "zero_optimization.compute_grad_norm": _silent("the norm costs nothing extra"),
    "zero_optimization.load_from_fp32_weights": _refused_if_false("checkpoints hold the fp32 masters; remove it"),
    "zero_optimization.elastic_checkpoint": _silent("every checkpoint loads on any number of ranks"),
    "zero_optimization.sub_group_size": _silent("each parameter is stepped by itself"),
    "zero_optimization.stage3_prefetch_bucket_size": _silent(_OWN_READAHEAD),
    "zero_optimization.stage3_param_persistence_threshold": _silent("small parameters are pages like others"),
    "zero_optimization.stage3_model_persistence_threshold": _silent("small parameters are pages like others"),
    "zero_optimization.stage3_max_live_parameters": _honoured(
        "a limit below the default budget makes it smaller; above it, the budget is kept"
    ),
    "zero_optimization.stage3_max_reuse_distance": _silent("the budget decides, by predicted use"),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _honoured("what `save_16bit_model` may gather"),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": _honoured("old name of the one above"),
    "zero_optimization.stage3_module_granularity_threshold": _silent(_NO_HOOKS),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": _silent("it chooses between two collectives"),
    "zero_optimization.stage3_allgather_sequential": _silent("it chooses between two collectives"),
    "zero_optimization.prefetch_bucket_size": _silent("inner name of stage3_prefetch_bucket_size"),
    "zero_optimization.param_persistence_threshold": _silent("inner name of stage3_param_persistence_threshold"),
    "zero_optimization.model_persistence_threshold": _silent("inner name of stage3_model_persistence_threshold"),
    "zero_optimization.max_live_parameters": _honoured("inner name of stage3_max_live_parameters"),
    "zero_optimization.max_reuse_distance": _silent("inner name of stage3_max_reuse_distance"),
    "zero_optimization.gather_16bit_weights_on_model_save": _honoured("inner name of the one with stage3_"),
    "zero_optimization.module_granularity_threshold": _silent(_NO_HOOKS),
    "zero_optimization.use_all_reduce_for_fetch_params": _silent("it chooses between two collectives"),
    "zero_optimization.allgather_sequential": _silent("it chooses between two collectives"),
    "zero_optimization.ignore_unused_parameters": _silent("parameters without a gradient are left alone, always"),
    "zero_optimization.legacy_stage1": _silent("it chooses an implementation"),
    "zero_optimization.round_robin_gradients": _silent("every parameter is cut over all ranks, so loads are equal"),
    "zero_optimization.parameter_alignment": _silent(_NO_BUFFERS),
    "zero_optimization.zero_hpz_partition_size": _silent("a second copy a host saves messages, results are the same"),
    "zero_optimization.zero_quantized_weights": _refused("weights travel exactly; remove it"),
    "zero_optimization.zero_quantized_nontrainable_weights": _refused(
        "frozen weights are kept exactly; quantise the base model itself, as for QLoRA"
    ),
    "zero_optimization.zero_quantized_gradients": _refused("gradients travel exactly; remove it"),
    "zero_optimization.zeropp_loco_param": _refused("gradients travel exactly; remove it"),
    "zero_optimization.mics_shard_size": _refused("parameters are cut over all ranks; remove it", -1),
    "zero_optimization.mics_hierarchical_params_gather": _refused("parameters are cut over all ranks; remove it"),
    "zero_optimization.memory_efficient_linear": _silent("no function of torch is replaced; no linear keeps a weight"),
    "zero_optimization.pipeline_loading_checkpoint": _silent("each rank reads its own slices"),
    "zero_optimization.override_module_apply": _silent("`module.apply` works on pages as it is"),
    "zero_optimization.log_trace_cache_warnings": _silent("there is no trace that could become invalid"),
    "zero_optimization.enable_sanity_checks": _silent("checks are always on"),
    "zero_optimization.save_muon_momentum_buffer_in_memory": _silent("Muon needs whole matrices, which nvme refuses"),
    "zero_optimization.leaf_module": _silent("ranks may use different experts; no module needs a mark"),
    "zero_optimization.zenflow": _refused("its delayed updates change results; remove the block", on_by_default=True),
    # -- memory and checkpoints
    "activation_checkpointing.partition_activations": _silent("there is no tensor parallelism to cut them over"),
    "activation_checkpointing.number_checkpoints": _silent("takes effect with contiguous memory only"),
    "activation_checkpointing.contiguous_memory_optimization": _silent("memory comes from torch's allocator"),
    "activation_checkpointing.cpu_checkpointing": _honoured(
        "`deepspeed.checkpointing.checkpoint` keeps inputs on the host"
    ),
    "activation_checkpointing.synchronize_checkpoint_boundary": _silent("it times DeepSpeed's own regions"),
    "activation_checkpointing.profile": _silent("it times DeepSpeed's own regions"),
    "checkpoint.tag_validation": _silent("ranks always agree on the tag"),
    "checkpoint.load_universal": _silent("every checkpoint loads on any number of ranks"),
    "checkpoint.use_node_local_storage": _refused("ranks write into one shared folder; save to one that all hosts see"),
    "checkpoint.parallel_write": _silent("all ranks write at the same time"),
    "checkpoint.checkpoint_serialization": _silent("the format is torch.distributed.checkpoint's"),
    "checkpoint.writer": _silent("the format is torch.distributed.checkpoint's"),
    "datastates_ckpt": _silent("it chooses a writer of checkpoints"),
    "nebula": _silent("it chooses a writer of checkpoints"),
    "aio": _silent("it tunes DeepSpeed's own library for nvme"),
    "disable_python_gc": _silent("Python's collector is left alone"),
    "compile": _silent("it tunes DeepSpeed's own compiler passes; `engine.compile` is torch.compile"),
    "graph_harvesting": _silent("it tunes CUDA graphs; removed from DeepSpeed too"),
    "vocabulary_size": _silent("DeepSpeed warns of sizes that are slow"),
    # -- other kinds of training
    "tensor_parallel.autotp_size": _refused(_NO_TENSOR_PARALLEL, 0, 1),
    "tensor_parallel": _silent("takes effect with autotp_size above 1 only, which is refused"),
    "inference.tensor_parallel.tp_size": _refused(_NO_TENSOR_PARALLEL, 0, 1),
    "inference": _silent("for DeepSpeed's inference engine"),
    "sequence_parallel_size": _refused("sequence parallelism is out of scope; remove it", 0, 1),
    "data_parallel_size": _silent("all ranks are data-parallel"),
    "expert_parallel": _refused("expert parallelism is out of scope: experts are pages, cut over all ranks"),
    "use_data_before_expert_parallelism": _silent("there is no expert parallelism"),
    "pipeline": _silent("for `PipelineModule` only, which is out of scope"),
    "hybrid_engine": _refused("`generate` runs on the model that is trained; remove the block"),
    "data_efficiency": _refused("it changes the batches; choose and order the data in the program"),
    "curriculum_learning": _refused("it changes the batches; choose and order the data in the program"),
    "progressive_layer_drop": _refused("removed from DeepSpeed too; drop layers in the model"),
    "weight_quantization": _refused("weights are kept exactly; quantise the model itself", on_by_default=True),
    "compression_training": _refused("removed from DeepSpeed too; remove the block", on_by_default=True),
    "quantize_training": _refused("removed from DeepSpeed too; remove the block"),
    "eigenvalue": _refused("removed from DeepSpeed too; remove the block"),
    "sparse_attention": _refused("removed from DeepSpeed too; use an attention of the model's own", on_by_default=True),
    "elasticity": _refused("removed from DeepSpeed too; a checkpoint loads on any number of ranks"),
    "amp": _refused("Apex is gone from DeepSpeed too; use bf16, fp16 or torch_autocast"),
    "msamp": _refused("there is no fp8 training here; use bf16"),
}


def names_in(section: str) -> Iterator[str]:
    """The names of the keys directly inside `section` ("" for the top)."""
    prefix = f"{section}." if section else ""
    seen = {path[len(prefix) :].split(".")[0] for path in KEYS if path.startswith(prefix)}
    yield from sorted(seen)
