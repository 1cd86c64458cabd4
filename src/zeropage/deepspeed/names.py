"""Which object of zeropage each name of DeepSpeed stands for.

One entry for a module: names given one by one ("module:attribute" of zeropage or of torch), whole modules of
zeropage whose public names it shows, and names that are out of scope with the reason. What is not listed does not
exist, as in a DeepSpeed of another version.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from zeropage.deepspeed.out_of_scope import stand_in

__all__ = ["MODULES", "Names", "is_module", "look_up", "public_names", "resolve"]

_ROOT = "deepspeed"
_US = "zeropage.deepspeed"
_PIPE = "pipeline parallelism is not what it does; parameters need not fit one rank, so use the model as it is"
_MOE = "experts are ordinary modules here, cut over all ranks; use the model's own mixture-of-experts layers"
_TENSOR_PARALLEL = "tensor parallelism is out of scope; ZeRO-3 alone fits the model"
_SEQUENCE_PARALLEL = "sequence parallelism is out of scope; set sequence_parallel_size to 1"
_INFERENCE = "there are no inference kernels; call the model, or `generate`, on the engine's module"


@dataclass(frozen=True, slots=True)
class Names:
    """The names in one module of DeepSpeed."""

    names: Mapping[str, str] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    out_of_scope: Mapping[str, str] = field(default_factory=dict)


def _from(module: str, *names: str) -> dict[str, str]:
    return {name: f"{_US}.{module}:{name}" for name in names}


_OPTIMIZERS = _from(
    "optimizers", "FusedAdam", "DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion", "FusedLion"
)
_ZERO = (f"{_US}.zero",)
_NOT_IN_ZERO = {
    "TiledLinear": "a linear layer of any size is paged, a frame at a time; use nn.Linear",
    "TiledLinearReturnBias": "a linear layer of any size is paged, a frame at a time; use nn.Linear",
    "MiCS_Init": "parameters are cut over all ranks; use Init",
}
_ESTIMATES = (f"{_US}.estimates",)
_BUILDERS = (
    "CPUAdamBuilder", "CPUAdagradBuilder", "CPULionBuilder", "AsyncIOBuilder", "GDSBuilder", "FusedAdamBuilder",
    "FusedLambBuilder", "FusedLionBuilder", "UtilsBuilder", "TransformerBuilder", "InferenceBuilder",
)  # fmt: skip

MODULES: Mapping[str, Names] = {
    "deepspeed": Names(
        {
            **_from("engine", "DeepSpeedEngine"),
            # in a file of another name: a module `initialize` would hide the function in this package
            **_from("initialization", "initialize"),
            **_from("alias", "install", "uninstall", "installed"),
            **_from("optimizer", "DeepSpeedOptimizer"),
            **_from("logs", "log_dist", "logger"),
            **_from("on_device", "OnDevice"),
            **_from("accelerator", "get_accelerator"),
            **_from("accelerate_state", "init_distributed"),
            **_from("arguments", "add_config_arguments"),
            **_from("settings", "Settings", "read_settings"),
            "DeepSpeedConfig": f"{_US}.config_object:DeepSpeedConfig",
            "DeepSpeedConfigError": "zeropage.errors:ConfigError",
            "__version__": f"{_US}.alias:VERSION",
            "version": f"{_US}.alias:VERSION",
            "checkpointing": f"{_US}.checkpointing",
        },
        out_of_scope={
            "tp_model_init": _TENSOR_PARALLEL,
            "set_autotp_mode": _TENSOR_PARALLEL,
            "init_inference": _INFERENCE,
            "InferenceEngine": _INFERENCE,
            "DeepSpeedInferenceConfig": _INFERENCE,
            "DeepSpeedHybridEngine": _INFERENCE,
            "PipelineEngine": _PIPE,
            "PipelineModule": _PIPE,
        },
    ),
    "deepspeed.accelerator": Names(whole=(f"{_US}.accelerator",)),
    "deepspeed.accelerator.real_accelerator": Names(whole=(f"{_US}.accelerator",)),
    "deepspeed.accelerator.abstract_accelerator": Names({"DeepSpeedAccelerator": f"{_US}.accelerator:Accelerator"}),
    "deepspeed.checkpoint": Names(),
    "deepspeed.checkpoint.utils": Names(_from("saving", "clone_tensors_for_torch_save")),
    "deepspeed.checkpointing": Names(whole=(f"{_US}.checkpointing",)),
    "deepspeed.comm": Names(_from("accelerate_state", "init_distributed", "is_initialized"), (f"{_US}.comm",)),
    "deepspeed.comm.comm": Names(_from("accelerate_state", "init_distributed", "is_initialized"), (f"{_US}.comm",)),
    "deepspeed.constants": Names({"TORCH_DISTRIBUTED_DEFAULT_PORT": f"{_US}.launcher_names:DEFAULT_PORT"}),
    "deepspeed.env_report": Names(whole=(f"{_US}.env_report",)),
    "deepspeed.git_version_info": Names(whole=(f"{_US}.git_version_info",)),
    "deepspeed.inference": Names(out_of_scope={"InferenceEngine": _INFERENCE}),
    "deepspeed.launcher": Names(),
    "deepspeed.launcher.runner": Names(
        {"DEEPSPEED_ENVIRONMENT_NAME": f"{_US}.launcher_names:ENVIRONMENT_FILE", "main": f"{_US}.launcher_names:main"}
    ),
    "deepspeed.module_inject": Names(out_of_scope={"replace_transformer_layer": _INFERENCE}),
    "deepspeed.moe": Names(),
    "deepspeed.moe.layer": Names(out_of_scope={"MoE": _MOE}),
    "deepspeed.moe.utils": Names(
        out_of_scope={
            "is_moe_param": _MOE,
            "split_params_into_different_moe_groups_for_optimizer": _MOE,
        }
    ),
    "deepspeed.monitor": Names(),
    "deepspeed.monitor.monitor": Names(_from("monitor", "MonitorMaster")),
    "deepspeed.ops": Names({"__compatible_ops__": f"{_US}.op_builder:COMPATIBLE_OPS"}),
    "deepspeed.ops.adagrad": Names(_from("optimizers", "DeepSpeedCPUAdagrad")),
    "deepspeed.ops.adam": Names(_from("optimizers", "FusedAdam", "DeepSpeedCPUAdam")),
    "deepspeed.ops.adam.cpu_adam": Names(_from("optimizers", "DeepSpeedCPUAdam")),
    "deepspeed.ops.adam.fused_adam": Names(_from("optimizers", "FusedAdam")),
    "deepspeed.ops.aio": Names(_from("op_builder", "AsyncIOBuilder")),
    "deepspeed.ops.lamb": Names(out_of_scope={"FusedLamb": "torch has no LAMB; use AdamW"}),
    "deepspeed.ops.lion": Names(_from("optimizers", "DeepSpeedCPULion", "FusedLion")),
    "deepspeed.ops.op_builder": Names(_from("op_builder", *_BUILDERS)),
    "deepspeed.ops.transformer": Names(
        out_of_scope={"DeepSpeedTransformerLayer": _INFERENCE, "DeepSpeedTransformerConfig": _INFERENCE}
    ),
    "deepspeed.pipe": Names(out_of_scope=dict.fromkeys(("PipelineModule", "LayerSpec", "TiedLayerSpec"), _PIPE)),
    "deepspeed.profiling": Names(),
    "deepspeed.profiling.flops_profiler": Names(_from("flops", "FlopsProfiler")),
    "deepspeed.profiling.flops_profiler.profiler": Names(_from("flops", "FlopsProfiler")),
    "deepspeed.runtime": Names(),
    "deepspeed.runtime.activation_checkpointing": Names(),
    "deepspeed.runtime.activation_checkpointing.checkpointing": Names(whole=(f"{_US}.checkpointing",)),
    "deepspeed.runtime.base_optimizer": Names(_from("optimizer", "DeepSpeedOptimizer", "ZeROOptimizer")),
    "deepspeed.runtime.config": Names(
        {
            "DeepSpeedConfig": f"{_US}.config_object:DeepSpeedConfig",
            "DeepSpeedConfigError": "zeropage.errors:ConfigError",
        }
    ),
    "deepspeed.runtime.dataloader": Names(_from("loaders", "RepeatingLoader")),
    "deepspeed.runtime.engine": Names(_from("engine", "DeepSpeedEngine")),
    "deepspeed.runtime.fp16": Names(),
    "deepspeed.runtime.fp16.fused_optimizer": Names({"FP16_Optimizer": f"{_US}.optimizer:DeepSpeedOptimizer"}),
    "deepspeed.runtime.fp16.unfused_optimizer": Names({"FP16_UnfusedOptimizer": f"{_US}.optimizer:DeepSpeedOptimizer"}),
    "deepspeed.runtime.lr_schedules": Names(whole=(f"{_US}.lr_schedules",)),
    "deepspeed.runtime.pipe": Names(),
    "deepspeed.runtime.pipe.engine": Names(out_of_scope={"PipelineEngine": _PIPE}),
    "deepspeed.runtime.pipe.module": Names(out_of_scope={"PipelineModule": _PIPE, "LayerSpec": _PIPE}),
    "deepspeed.runtime.sequence_parallel": Names(),
    "deepspeed.runtime.sequence_parallel.ulysses_sp": Names(
        out_of_scope=dict.fromkeys(
            ("UlyssesSPAttentionHF", "UlyssesSPDataLoaderAdapter", "TiledMLP"), _SEQUENCE_PARALLEL
        )
    ),
    "deepspeed.runtime.swap_tensor": Names({"MIN_SWAPPABLE_BYTES": f"{_US}.launcher_names:MIN_SWAPPABLE_BYTES"}),
    "deepspeed.runtime.utils": Names(_from("runtime_utils", "move_to_device", "see_memory_usage")),
    "deepspeed.runtime.zero": Names(whole=_ZERO, out_of_scope=_NOT_IN_ZERO),
    "deepspeed.runtime.zero.config": Names(_from("runtime_utils", "ZeroStageEnum")),
    "deepspeed.runtime.zero.offload_config": Names(
        _from("offload_states", "OffloadDeviceEnum", "OffloadStateTypeEnum")
    ),
    "deepspeed.runtime.zero.parameter_offload": Names(_from("parameter_offload", "DeepSpeedZeRoOffload")),
    "deepspeed.runtime.zero.partition_parameters": Names(
        {"_orig_torch_arange": "torch:arange"}, (f"{_US}.partition_parameters",)
    ),
    "deepspeed.runtime.zero.stage3": Names(
        {
            **_from("optimizer", "DeepSpeedZeroOptimizer_Stage3"),
            **_from("generation", "unwrap_model_for_generation"),
        },
        _ESTIMATES,
    ),
    "deepspeed.runtime.zero.stage_1_and_2": Names(_from("optimizer", "DeepSpeedZeroOptimizer"), _ESTIMATES),
    "deepspeed.sequence": Names(),
    "deepspeed.sequence.layer": Names(out_of_scope={"DistributedAttention": _SEQUENCE_PARALLEL}),
    "deepspeed.utils": Names(whole=(f"{_US}.utils",)),
    "deepspeed.utils.groups": Names(
        whole=(f"{_US}.groups",),
        out_of_scope=dict.fromkeys(
            (
                "_get_sequence_parallel_group",
                "_get_sequence_parallel_rank",
                "_get_sequence_parallel_world_size",
                "_get_expert_parallel_group",
            ),
            _SEQUENCE_PARALLEL,
        ),
    ),
    "deepspeed.utils.init_on_device": Names(_from("on_device", "OnDevice")),
    "deepspeed.utils.logging": Names(whole=(f"{_US}.logs",)),
    "deepspeed.utils.tensor_fragment": Names(whole=(f"{_US}.fragments",)),
    "deepspeed.utils.torch": Names(_from("runtime_utils", "required_torch_version")),
    "deepspeed.utils.z3_leaf_module": Names(whole=(f"{_US}.leaf_modules",)),
    "deepspeed.utils.zero_to_fp32": Names(whole=(f"{_US}.zero_to_fp32",)),
    "deepspeed.zero": Names(whole=_ZERO, out_of_scope=_NOT_IN_ZERO),
}


def is_module(name: str) -> bool:
    """Whether DeepSpeed has a module of that name which programs import."""
    return name in MODULES


def look_up(module: str, name: str, namespace: Callable[[str], ModuleType]) -> Any:
    """What `module.name` is: an object of zeropage, a module below, or a stand-in for what is out of scope.

    Args:
        namespace: gives the module of that full name.

    Raises:
        AttributeError: there is no such name.
    """
    table = MODULES[module]
    if name in table.names:
        return resolve(table.names[name])
    if name in table.out_of_scope:
        return stand_in(f"{module}.{name}", table.out_of_scope[name])
    for whole in table.whole:
        found = vars(importlib.import_module(whole))
        if name in found.get("__all__", ()):
            return found[name]
    if f"{module}.{name}" in MODULES:
        return namespace(f"{module}.{name}")
    raise AttributeError(f"module {module!r} has no attribute {name!r} (zeropage provides what programs use of it)")


def public_names(module: str) -> list[str]:
    """All names in `module`."""
    table = MODULES[module]
    whole = [name for path in table.whole for name in vars(importlib.import_module(path)).get("__all__", ())]
    below = [path.rpartition(".")[2] for path in MODULES if path.rpartition(".")[0] == module]
    return sorted({*table.names, *table.out_of_scope, *whole, *below})


def resolve(target: str) -> Any:
    """The object that "module:attribute" names, or the module."""
    module, _, attribute = target.partition(":")
    found: ModuleType = importlib.import_module(module)
    return vars(found)[attribute] if attribute else found
