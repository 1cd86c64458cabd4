"""What a rank will hold, told before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn, optim

from zeropage.config import Config
from zeropage.construct import ConfigLike
from zeropage.errors import ConfigError
from zeropage.gradients import sum_dtype
from zeropage.layout import Layout
from zeropage.optim import NARROW, check_optimizer, is_elementwise
from zeropage.pager import frame_budget
from zeropage.pieces import states_to_be
from zeropage.precision import keeps_exact, kept_dtype
from zeropage.reports import MemoryReport

__all__ = ["estimate_memory"]


@dataclass(slots=True)
class _Bytes:
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    largest: int = 0  # the largest page, whole, before it is cast or after


def estimate_memory(
    model: nn.Module,
    optimizer: optim.Optimizer | None = None,
    config: ConfigLike = None,
    world: int = 1,
) -> MemoryReport:
    """What `Engine.memory()` will say on each of `world` ranks once a step has been made. Nothing is allocated.

    Activations, and what torch and Python take for themselves, come on top.

    Args:
        model: plain, for example on the meta device.
        optimizer: over (some of) its parameters, not stepped yet; None for inference.
        config: as for `Engine`.
        world: the number of ranks that parameters are cut over.

    Returns:
        Bytes of the rank that holds most. `peak_frames` is the most that frames of full parameters may take: none over
        memory that all ranks share (`transport` "auto" is taken to be that).

    Raises:
        ConfigError: a wrong setting; an optimizer of other parameters, or one that is not elementwise, whose state
            cannot be told beforehand.
    """
    settings = Config.of(config)
    groups = _groups(model, optimizer)
    found = _Bytes()
    kinds: dict[tuple[int, torch.dtype], int] = {}  # bytes of state an element, by group and dtype
    for parameter in model.parameters():
        kept = kept_dtype(settings, parameter)
        length = Layout(parameter.numel(), world).length(0)
        found.parameters += length * kept.itemsize
        found.largest = max(found.largest, parameter.numel() * max(kept.itemsize, parameter.dtype.itemsize))
        if not parameter.requires_grad:
            if id(parameter) in groups and keeps_exact(settings, parameter):
                found.optimizer += length * torch.float32.itemsize
            continue
        found.gradients += length * sum_dtype(kept, settings).itemsize
        if optimizer is None or id(parameter) not in groups:
            continue
        stepped = torch.float32 if kept in NARROW else kept
        key = groups[id(parameter)], stepped
        if key not in kinds:
            kinds[key] = sum(dtype.itemsize for dtype in states_to_be(optimizer, *key).values())
        found.optimizer += length * (kinds[key] + (stepped.itemsize if kept in NARROW else 0))
    return _report(found, settings, world)


def _groups(model: nn.Module, optimizer: optim.Optimizer | None) -> dict[int, int]:
    """The number of the group of each parameter, by its id."""
    if optimizer is None:
        return {}
    check_optimizer(optimizer, model)
    if not is_elementwise(optimizer):
        raise ConfigError(
            f"what {type(optimizer).__name__} keeps of a parameter is known when it has made a step: make one on a "
            "small model and look at engine.memory()"
        )
    return {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}


def _report(found: _Bytes, config: Config, world: int) -> MemoryReport:
    on_disk = config.offload.parameters == "disk"
    frames = 0
    if (world > 1 and config.transport == "collective") or on_disk:
        frames = max(frame_budget(config, found.largest), found.largest)
    by_device = {"disk": 0, "memory": found.gradients}
    by_device["disk" if on_disk else "memory"] += found.parameters
    by_device["disk" if config.offload.optimizer == "disk" else "memory"] += found.optimizer
    return MemoryReport(
        parameters=found.parameters,
        gradients=found.gradients,
        optimizer=found.optimizer,
        frames=0,
        peak_frames=frames,
        by_device=by_device,
    )
