"""Small functions that programs take from `deepspeed.runtime` and `deepspeed.utils`."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch

from zeropage.deepspeed.accelerator import get_accelerator
from zeropage.deepspeed.logs import logger

__all__ = [
    "ZeroStageEnum",
    "move_to_device",
    "required_torch_version",
    "see_memory_usage",
]


class ZeroStageEnum(IntEnum):
    """The stages by DeepSpeed's names."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


def move_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Tensors on `device`, anywhere in lists, tuples and dicts; `criterion_func` chooses among them."""
    if isinstance(item, torch.Tensor):
        return item.to(device) if criterion_func is None or criterion_func(item) else item
    if isinstance(item, dict):
        return {name: move_to_device(value, device, criterion_func) for name, value in item.items()}
    if isinstance(item, (list, tuple)):
        moved = [move_to_device(value, device, criterion_func) for value in item]
        return moved if isinstance(item, list) else tuple(moved)
    return item


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the memory of this process's device; only with `force`, as in DeepSpeed."""
    if force:
        device = get_accelerator()
        logger.info(
            "%s: allocated %.2f GB, most ever %.2f GB",
            message,
            device.memory_allocated() / 1e9,
            device.max_memory_allocated() / 1e9,
        )


def required_torch_version(min_version: float | None = None, max_version: float | None = None) -> bool:
    """Whether torch is at least, or at most, of that version (2.1 is 2.1)."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    have = (major, minor)
    if min_version is not None and have < _parts(min_version):
        return False
    return max_version is None or have <= _parts(max_version)


def _parts(version: float) -> tuple[int, int]:
    major, _, minor = str(version).partition(".")
    return int(major), int(minor or 0)
