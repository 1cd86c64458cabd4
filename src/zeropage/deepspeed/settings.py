"""A DeepSpeed configuration, read once and for all: what the rest of the face goes by.

`read_settings` refuses what would change results and cannot be had (keys.py has the table), warns once of keys
that nobody knows, and translates the rest: into a `zp.Config` for the engine, and into small records for what
lives beside it (optimizer, scheduler, monitors, profiler).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zeropage.config import Config
from zeropage.deepspeed.batch_sizes import BatchSizes
from zeropage.deepspeed.sources import load_config
from zeropage.errors import ConfigError

__all__ = [
    "FlopsProfilerSettings",
    "MonitorSettings",
    "OptimizerSettings",
    "SchedulerSettings",
    "Settings",
    "read_settings",
]


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """The optimizer block: a name and the arguments for it."""

    type: str
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """The scheduler block: a name and the arguments for it."""

    type: str
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MonitorSettings:
    """The monitors that are enabled; each with its block, None where it is not."""

    tensorboard: dict[str, Any] | None = None
    csv: dict[str, Any] | None = None
    wandb: dict[str, Any] | None = None

    @property
    def enabled(self) -> bool:
        return any(block is not None for block in (self.tensorboard, self.csv, self.wandb))


@dataclass(frozen=True, slots=True)
class FlopsProfilerSettings:
    """When floating-point operations are counted, and how the table looks."""

    profile_step: int = 1
    module_depth: int = -1
    top_modules: int = 1
    detailed: bool = True
    output_file: str | None = None
    recompute_fwd_factor: float = 0.0


@dataclass(frozen=True)
class Settings:
    """Everything that a DeepSpeed configuration says, with its defaults filled in."""

    raw: dict[str, Any]
    """The configuration as given, as a dict; what `engine.config` shows."""

    stage: int
    """The ZeRO stage asked for, 0 to 3. Below 3, gathered parameters are not evicted."""

    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int

    gradient_clipping: float
    """The largest global norm; 0 never clips. DeepSpeed's default is 1."""

    precision: str
    """"fp32", "fp16" or "bf16": what trainable parameters are cast to ("fp32" leaves each its own dtype)."""

    config: Config
    """The same for `zp.Engine`."""

    autocast: torch.dtype | None
    """The dtype that forward runs under `torch.autocast` with, if any."""

    cast_inputs: bool
    """Whether floating-point inputs of forward are cast to the precision (`fp16.auto_cast`)."""

    skip_nonfinite: bool
    """Whether a step with a gradient that is not finite is skipped."""

    optimizer: OptimizerSettings | None
    scheduler: SchedulerSettings | None

    steps_per_print: float
    """Every how many steps progress is told; infinite for never."""

    wall_clock_breakdown: bool
    throughput: bool
    """Whether progress tells samples per second (`timers.throughput.enabled`)."""

    monitors: MonitorSettings
    flops_profiler: FlopsProfilerSettings | None
    activation_checkpointing: dict[str, Any]
    gather_16bit_on_save: bool
    zero_force_ds_cpu_optimizer: bool
    dataloader_drop_last: bool
    log_level: str | None
    communication_data_type: str | None
    prescale_gradients: bool
    gradient_predivide_factor: float


def read_settings(config: Mapping[str, Any] | str | Path, world: int) -> Settings:
    """The settings in `config` (a dict, a path, or base64 of JSON) for `world` ranks.

    Raises:
        ConfigError: see `load_config` and `BatchSizes.of`; a value of the wrong kind; a key that would change results
            and cannot be honoured.
    """
    raw = load_config(config)
    zero = _section(raw, "zero_optimization")
    sizes = BatchSizes.of(raw, world)
    precision = _precision(raw)
    clipping = float(raw.get("gradient_clipping", 1.0) or 0.0)
    stage = int(zero.get("stage", 0))
    return Settings(
        raw=raw,
        stage=stage,
        train_batch_size=sizes.train,
        train_micro_batch_size_per_gpu=sizes.micro,
        gradient_accumulation_steps=sizes.steps,
        gradient_clipping=clipping,
        precision=precision,
        config=_translate(raw, zero, stage, precision, clipping, sizes.steps),
        autocast=_autocast(raw),
        cast_inputs=bool(_section(raw, "fp16").get("auto_cast", False)),
        skip_nonfinite=stage == 3 or precision != "fp32",
        optimizer=_optimizer(raw),
        scheduler=_scheduler(raw),
        steps_per_print=float(raw.get("steps_per_print") or float("inf")),
        wall_clock_breakdown=bool(raw.get("wall_clock_breakdown", False)),
        throughput=bool(_section(_section(raw, "timers"), "throughput").get("enabled", True)),
        monitors=_monitors(raw),
        flops_profiler=_flops_profiler(raw),
        activation_checkpointing=dict(_section(raw, "activation_checkpointing")),
        gather_16bit_on_save=bool(
            zero.get("stage3_gather_16bit_weights_on_model_save")
            or zero.get("gather_16bit_weights_on_model_save")
            or zero.get("stage3_gather_fp16_weights_on_model_save")
        ),
        zero_force_ds_cpu_optimizer=bool(raw.get("zero_force_ds_cpu_optimizer", True)),
        dataloader_drop_last=bool(raw.get("dataloader_drop_last", False)),
        log_level=raw.get("log_level"),
        communication_data_type=raw.get("communication_data_type"),
        prescale_gradients=bool(raw.get("prescale_gradients", False)),
        gradient_predivide_factor=float(raw.get("gradient_predivide_factor", 1.0)),
    )


def _section(settings: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The block under `key`, without the values that are left to it ("auto" means the default, as in DeepSpeed)."""
    block = settings.get(key)
    if block is None:
        return {}
    if not isinstance(block, Mapping):
        raise ConfigError(f"config key {key!r} must be an object, got {block!r}")
    return {name: value for name, value in block.items() if value != "auto"}


def _precision(raw: Mapping[str, Any]) -> str:
    fp16 = bool(_section(raw, "fp16").get("enabled", False))
    bf16 = bool(_section(raw, "bf16" if raw.get("bf16") is not None else "bfloat16").get("enabled", False))
    if fp16 and bf16:
        raise ConfigError("config keys 'fp16' and 'bf16' are both enabled; a model trains in one of them")
    return "fp16" if fp16 else "bf16" if bf16 else "fp32"


def _translate(
    raw: Mapping[str, Any], zero: Mapping[str, Any], stage: int, precision: str, clipping: float, steps: int
) -> Config:
    settings: dict[str, Any] = {"accumulate": steps}
    if precision != "fp32":
        settings["precision"] = precision
    if clipping > 0:
        settings["clip_grad_norm"] = clipping
    if precision == "fp16":
        settings["loss_scale"] = _loss_scale(_section(raw, "fp16"))
    if stage < 3:
        settings["resident_bytes"] = sys.maxsize
    offload = {
        mine: "host"
        for mine, theirs in (("parameters", "offload_param"), ("optimizer", "offload_optimizer"))
        if _section(zero, theirs).get("device", "none") == "cpu"
    }
    if offload:
        settings["offload"] = offload
    dtype = _section(raw, "data_types").get("grad_accum_dtype") or raw.get("communication_data_type")
    if dtype is not None:
        settings["reduce_dtype"] = dtype
    return Config.of(settings)


def _loss_scale(fp16: Mapping[str, Any]) -> dict[str, Any]:
    static = float(fp16.get("loss_scale", 0))
    if static:
        return {"dynamic": False, "initial": static}
    return {
        "initial": 2.0 ** fp16.get("initial_scale_power", 16),
        "window": int(fp16.get("loss_scale_window", 1000)),
        "hysteresis": int(fp16.get("hysteresis", 2)),
        "min": float(fp16.get("min_loss_scale", 1)),
    }


def _autocast(raw: Mapping[str, Any]) -> torch.dtype | None:
    block = _section(raw, "torch_autocast")
    return torch.bfloat16 if block.get("enabled", False) else None


def _optimizer(raw: Mapping[str, Any]) -> OptimizerSettings | None:
    block = raw.get("optimizer") or {}
    return OptimizerSettings(block["type"], dict(block.get("params") or {})) if block.get("type") else None


def _scheduler(raw: Mapping[str, Any]) -> SchedulerSettings | None:
    block = raw.get("scheduler") or {}
    return SchedulerSettings(block["type"], dict(block.get("params") or {})) if block.get("type") else None


def _monitors(raw: Mapping[str, Any]) -> MonitorSettings:
    blocks = {
        name: _section(raw, key)
        for name, key in (("tensorboard", "tensorboard"), ("csv", "csv_monitor"), ("wandb", "wandb"))
    }
    return MonitorSettings(**{name: dict(block) for name, block in blocks.items() if block.get("enabled", False)})


def _flops_profiler(raw: Mapping[str, Any]) -> FlopsProfilerSettings | None:
    block = dict(_section(raw, "flops_profiler"))
    return FlopsProfilerSettings(**block) if block.pop("enabled", False) else None
