"""`deepspeed.initialize`: a model and a configuration in; engine, optimizer, data loader and scheduler out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeropage.construct import pagers_of
from zeropage.deepspeed import comm
from zeropage.deepspeed.accelerator import get_accelerator
from zeropage.deepspeed.engine import DeepSpeedEngine
from zeropage.deepspeed.lr_schedules import make_scheduler
from zeropage.deepspeed.optimizer import ZeROOptimizer
from zeropage.deepspeed.optimizers import make_optimizer
from zeropage.deepspeed.settings import Settings, read_settings
from zeropage.errors import ConfigError

__all__ = ["initialize"]

_ConfigLike = Mapping[str, Any] | str | Path
_Made = tuple[DeepSpeedEngine, Any, Any, Any]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: _ConfigLike | None = None,
    mesh_param: Any = None,
    config_params: _ConfigLike | None = None,
) -> _Made:
    """Shard `model` in place, and make an engine that trains it (all ranks together).

    Args:
        args: a namespace; its `deepspeed_config` is the configuration if no other is given.
        model: any module, sharded already or not, with or without an earlier engine.
        optimizer: a torch optimizer, or a function that makes one of `model_parameters`. It goes before the one
            that the configuration names. Without any the engine is for inference.
        model_parameters: what the configuration's optimizer trains: parameters, or groups; default: all, so that
            what is frozen now may be trained later.
        training_data: a dataset, for the loader that is returned.
        lr_scheduler: a scheduler, or a function that makes one of the torch optimizer.
        mpu, mesh_param: accepted where they ask for data parallelism alone.
        dist_init_required: False refuses to start a process group.
        config, config_params: a dict, a path, or base64 of JSON.

    Returns:
        Engine, optimizer, loader and scheduler; None for what there is not. (In stage 3 there is an object in the
        optimizer's place even without one, as in DeepSpeed.)

    Raises:
        ConfigError: no model or no configuration; a setting that cannot be honoured.
    """
    if model is None:
        raise ConfigError("deepspeed.initialize requires a model")
    comm.init_distributed(
        get_accelerator().communication_backend_name(),
        distributed_port=distributed_port,
        dist_init_required=dist_init_required,
        verbose=False,
    )
    _refuse_other_parallelism(mpu, mesh_param)
    settings = read_settings(_config_of(args, config, config_params), comm.get_world_size())
    if not pagers_of(model):
        _to_device(model)
    torch_optimizer = _optimizer_of(optimizer, settings, model, model_parameters)
    scheduler = _scheduler_of(lr_scheduler, settings, torch_optimizer)
    engine = DeepSpeedEngine(model, settings, torch_optimizer, scheduler, training_data, collate_fn)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _config_of(args: Any, config: _ConfigLike | None, config_params: _ConfigLike | None) -> _ConfigLike:
    given = config if config is not None else config_params
    named = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    if named is not None and given is not None:
        raise ConfigError(
            "a configuration was given to initialize() and another one in args.deepspeed_config; keep one"
        )
    found: _ConfigLike | None = named if given is None else given
    if found is None:
        raise ConfigError(
            "DeepSpeed requires --deepspeed_config to specify configuration file, or initialize(config=...)"
        )
    return found


def _refuse_other_parallelism(mpu: Any, mesh_param: Any) -> None:
    if mesh_param:
        comm.initialize_mesh_device(tuple(mesh_param), ("data_parallel", "sequence_parallel"))
    if mpu is not None and mpu.get_data_parallel_world_size() != comm.get_world_size():
        raise ConfigError(
            f"mpu has {mpu.get_data_parallel_world_size()} data-parallel ranks of {comm.get_world_size()}: only data "
            "parallelism is there; use all ranks for data"
        )


def _to_device(model: nn.Module) -> None:
    """Where this process computes; parameters on the meta device wait for a checkpoint."""
    if torch.cuda.is_available() and all(p.device.type == "cpu" for p in model.parameters()):
        model.to(get_accelerator().current_device_name())


def _optimizer_of(given: Any, settings: Settings, model: nn.Module, parameters: Any) -> torch.optim.Optimizer | None:
    # an iterator is gone after one look; an empty one is as good as none
    wanted = list(parameters) if parameters is not None else []
    wanted = wanted or list(model.parameters())
    if isinstance(given, ZeROOptimizer):  # what an earlier engine showed
        return given.optimizer
    if isinstance(given, torch.optim.Optimizer):
        return given
    if callable(given):
        return given(wanted)  # type: ignore[no-any-return]
    if given is not None:
        raise ConfigError(
            f"optimizer must be a torch optimizer or a function that makes one, not {type(given).__name__}"
        )
    return None if settings.optimizer is None else make_optimizer(settings, wanted)


def _scheduler_of(given: Any, settings: Settings, optimizer: torch.optim.Optimizer | None) -> Any:
    made_by_function = callable(given) and not isinstance(given, torch.optim.lr_scheduler.LRScheduler)
    if made_by_function:
        if optimizer is None:
            raise ConfigError("lr_scheduler is a function of the optimizer, and there is no optimizer")
        return given(optimizer)
    if given is not None or optimizer is None or settings.scheduler is None:
        return given
    return make_scheduler(settings, optimizer)
