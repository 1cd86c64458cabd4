"""A DeepSpeed configuration, read once and for all: what the rest of the face goes by.

`read_settings` refuses what would change results and cannot be had (keys.py has the table), warns once of keys
that nobody knows, and translates the rest: into a `zp.Config` for the engine, and into small records for what
lives beside it (optimizer, scheduler, monitors, profiler).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from zeropage.config import Config
from zeropage.deepspeed.batch_sizes import BatchSizes
from zeropage.deepspeed.checking import check_keys
from zeropage.deepspeed.sources import load_config
from zeropage.errors import ConfigError

__all__ = [
    "FlopsProfilerSettings",
    "MonitorSettings",
    "OptimizerSettings",
    "SchedulerSettings",
    "Settings",
    "read_settings",
    "section",
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


_Named = TypeVar("_Named", OptimizerSettings, SchedulerSettings)

_DTYPES = {
    "fp32": ("fp32", "float32", "float"),
    "fp16": ("fp16", "float16", "half"),
    "bf16": ("bf16", "bfloat16"),
}


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

    managed_accumulation: bool
    """Whether micro-batches are counted; if not, every `engine.step()` applies what has accumulated."""

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
    """What takes effect in that block: `cpu_checkpointing`."""

    gather_16bit_on_save: bool
    zero_force_ds_cpu_optimizer: bool
    dataloader_drop_last: bool
    log_level: str | None
    communication_data_type: str | None
    prescale_gradients: bool


def read_settings(config: Mapping[str, Any] | str | Path, world: int) -> Settings:
    """The settings in `config` (a dict, a path, or base64 of JSON) for `world` ranks.

    Raises:
        ConfigError: see `load_config`, `check_keys` and `BatchSizes.of`; a value of the wrong kind.
    """
    raw = load_config(config)
    check_keys(raw)
    zero = _zero(raw)
    stage = _stage(zero)
    sizes = BatchSizes.of(raw, world)
    precision = _precision(raw)
    clipping = _number(raw, "gradient_clipping", 1.0)
    skip = _skips_nonfinite(raw, stage, precision)
    return Settings(
        raw=raw,
        stage=stage,
        train_batch_size=sizes.train,
        train_micro_batch_size_per_gpu=sizes.micro,
        gradient_accumulation_steps=sizes.steps,
        managed_accumulation=raw.get("managed_gradient_accumulation") is not False,
        gradient_clipping=clipping,
        precision=precision,
        config=Config.of(
            {
                "accumulate": sizes.steps,
                "skip_nonfinite": skip,
                **({"clip_grad_norm": clipping} if clipping > 0 else {}),
                **_precision_config(raw, precision),
                **_memory_config(zero, stage, precision),
            }
        ),
        autocast=_autocast(raw),
        cast_inputs=bool(section(raw, "fp16").get("auto_cast", False)),
        skip_nonfinite=skip,
        optimizer=_named(raw, "optimizer", OptimizerSettings),
        scheduler=_named(raw, "scheduler", SchedulerSettings),
        steps_per_print=_number(raw, "steps_per_print", 0.0) or math.inf,
        wall_clock_breakdown=bool(raw.get("wall_clock_breakdown", False)),
        throughput=bool(section(section(raw, "timers"), "throughput").get("enabled", True)),
        monitors=_monitors(raw),
        flops_profiler=_flops_profiler(raw),
        activation_checkpointing={
            "cpu_checkpointing": bool(section(raw, "activation_checkpointing").get("cpu_checkpointing", False))
        },
        gather_16bit_on_save=any(
            zero.get(name, False)
            for name in (
                "stage3_gather_16bit_weights_on_model_save",
                "gather_16bit_weights_on_model_save",
                "stage3_gather_fp16_weights_on_model_save",
            )
        ),
        zero_force_ds_cpu_optimizer=bool(raw.get("zero_force_ds_cpu_optimizer", True)),
        dataloader_drop_last=bool(raw.get("dataloader_drop_last", False)),
        log_level=raw.get("log_level"),
        communication_data_type=raw.get("communication_data_type"),
        prescale_gradients=bool(raw.get("prescale_gradients", False)),
    )


def section(settings: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The block under `key`, less the values that it leaves open ("auto" and null are the default, as in DeepSpeed)."""
    block = settings.get(key)
    if block is None:
        return {}
    if not isinstance(block, Mapping):
        raise ConfigError(f"config key {key!r} must be an object, got {block!r}")
    return {name: value for name, value in block.items() if value is not None and not _is_auto(value)}


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"


def _number(settings: Mapping[str, Any], key: str, default: float) -> float:
    value = settings.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value) or value < 0:
        remedy = ": only the Trainer and Accelerate put a number there. Write the number" if _is_auto(value) else ""
        raise ConfigError(f"config key {key!r} must be a number of at least 0, got {value!r}{remedy}")
    return float(value)


def _named(raw: Mapping[str, Any], key: str, record: type[_Named]) -> _Named | None:
    block = section(raw, key)
    return record(str(block["type"]), dict(block.get("params", {}))) if "type" in block else None


# -- ZeRO and memory


def _zero(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(raw.get("zero_optimization"), bool):  # the oldest form
        return {"stage": int(raw["zero_optimization"])}
    return section(raw, "zero_optimization")


def _stage(zero: Mapping[str, Any]) -> int:
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ConfigError(f"config key 'zero_optimization.stage' must be 0, 1, 2 or 3, got {stage!r}")
    return int(stage)


def _memory_config(zero: Mapping[str, Any], stage: int, precision: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    offload = _offload(zero)
    if offload:
        found["offload"] = offload
    if stage < 3:
        found["resident_bytes"] = sys.maxsize
    else:
        live = zero.get("stage3_max_live_parameters", zero.get("max_live_parameters"))
        if live is not None:
            limit = int(live) * (4 if precision == "fp32" else 2)
            if limit < 2 * Config().bucket_bytes:
                found["resident_bytes"] = limit
    return found


def _offload(zero: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for what, key, old_key in (
        ("parameters", "offload_param", "cpu_offload_param"),
        ("optimizer", "offload_optimizer", "cpu_offload"),
    ):
        block = section(zero, key)
        device = block.get("device", "cpu" if zero.get(old_key, False) else "none")
        if device not in ("none", "cpu", "nvme"):
            raise ConfigError(
                f"config key 'zero_optimization.{key}.device' must be 'none', 'cpu' or 'nvme', got {device!r}"
            )
        if device == "cpu":
            found[what] = "host"
        elif device == "nvme":
            found[what] = "disk"
            path = block.get("nvme_path")
            if path is None or path != found.get("folder", path):
                raise ConfigError(
                    f"config key 'zero_optimization.{key}.nvme_path' = {path!r}: device 'nvme' needs a folder, and "
                    "parameters and optimizer the same one"
                )
            found["folder"] = path
    return found


# -- precision


def _precision(raw: Mapping[str, Any]) -> str:
    fp16 = bool(section(raw, "fp16").get("enabled", False))
    bf16 = bool(_bf16(raw).get("enabled", False))
    if fp16 and bf16:
        raise ConfigError("config keys 'fp16' and 'bf16' are both enabled; a model trains in one of them")
    precision = "fp16" if fp16 else "bf16" if bf16 else "fp32"
    wanted = section(raw, "data_types").get("param_dtype")
    if wanted is not None and _dtype_name("data_types.param_dtype", wanted) != precision:
        raise ConfigError(
            f"config key 'data_types.param_dtype' = {wanted!r} conflicts with the fp16 and bf16 blocks, which say "
            f"{precision}; remove it or enable the block that agrees"
        )
    return precision


def _bf16(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return section(raw, "bf16" if raw.get("bf16") is not None else "bfloat16")


def _skips_nonfinite(raw: Mapping[str, Any], stage: int, precision: str) -> bool:
    """As DeepSpeed: stage 3 always skips, plain fp32 training never does, bf16 can be told not to."""
    if precision == "bf16" and stage < 3:
        return bool(_bf16(raw).get("check_grad_overflow", True))
    return stage > 0 or precision == "fp16"


def _precision_config(raw: Mapping[str, Any], precision: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if precision != "fp32":
        found["precision"] = precision
    if precision == "fp16":
        found["loss_scale"] = _loss_scale(section(raw, "fp16"))
    types = section(raw, "data_types")
    if "grad_accum_dtype" in types:
        found["reduce_dtype"] = _dtype_name("data_types.grad_accum_dtype", types["grad_accum_dtype"])
    elif raw.get("communication_data_type") is not None:
        found["reduce_dtype"] = _dtype_name("communication_data_type", raw["communication_data_type"])
    return found


def _loss_scale(fp16: Mapping[str, Any]) -> dict[str, Any]:
    static = _number(fp16, "loss_scale", 0.0)
    if static:
        return {"dynamic": False, "initial": static}
    return {
        "initial": 2.0 ** _number(fp16, "initial_scale_power", 16),
        "window": int(_number(fp16, "loss_scale_window", 1000)),
        "hysteresis": int(_number(fp16, "hysteresis", 2)),
        "min": _number(fp16, "min_loss_scale", 1),
    }


def _autocast(raw: Mapping[str, Any]) -> torch.dtype | None:
    block = section(raw, "torch_autocast")
    if not block.get("enabled", False):
        return None
    name = _dtype_name("torch_autocast.dtype", block.get("dtype", "bfloat16"))
    if name == "fp16":
        raise ConfigError(
            "config key 'torch_autocast.dtype' = 'float16' cannot be honoured: small gradients would vanish without a "
            "loss scale. Write 'bfloat16', or enable the block 'fp16' instead."
        )
    return torch.bfloat16 if name == "bf16" else None


def _dtype_name(key: str, value: object) -> str:
    for name, spellings in _DTYPES.items():
        if str(value).lower().removeprefix("torch.") in spellings:
            return name
    raise ConfigError(f"config key {key!r} must be one of {', '.join(_DTYPES)}, got {value!r}")


# -- what is told


def _monitors(raw: Mapping[str, Any]) -> MonitorSettings:
    def block(key: str) -> dict[str, Any] | None:
        found = section(raw, key)
        return {name: value for name, value in found.items() if name != "enabled"} if found.get("enabled") else None

    return MonitorSettings(tensorboard=block("tensorboard"), csv=block("csv_monitor"), wandb=block("wandb"))


def _flops_profiler(raw: Mapping[str, Any]) -> FlopsProfilerSettings | None:
    block = section(raw, "flops_profiler")
    if not block.get("enabled", False):
        return None
    known = FlopsProfilerSettings.__dataclass_fields__
    return FlopsProfilerSettings(**{name: value for name, value in block.items() if name in known})
