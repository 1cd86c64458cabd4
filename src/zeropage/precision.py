"""In which dtype an engine keeps a parameter, and whether it keeps what it was exactly."""

from __future__ import annotations

import torch

from zeropage.config import Config
from zeropage.gradients import DTYPES

__all__ = ["keeps_exact", "kept_dtype"]


def kept_dtype(config: Config, parameter: torch.Tensor) -> torch.dtype:
    """Trainable ones in the engine's precision, frozen ones as `cast_frozen` says, others as they are."""
    if config.precision is None or not parameter.dtype.is_floating_point:
        return parameter.dtype
    dtype = DTYPES[config.precision]
    if parameter.requires_grad:
        return dtype
    wider = parameter.dtype.itemsize > dtype.itemsize
    casts = wider if config.cast_frozen == "wide" else config.cast_frozen
    return dtype if casts else parameter.dtype


def keeps_exact(config: Config, parameter: torch.Tensor) -> bool:
    """Whether a parameter that is cast and belongs to the optimizer has its old values as its master from the start.

    Frozen ones too: they may be unfrozen later.
    """
    kept = kept_dtype(config, parameter)
    return kept not in (parameter.dtype, torch.float32) and (parameter.requires_grad or config.cast_frozen != "wide")
