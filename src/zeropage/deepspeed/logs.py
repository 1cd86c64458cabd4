"""DeepSpeed's logger, and messages from some ranks only."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

__all__ = ["log_dist", "logger", "print_dist", "set_log_level_from_string", "should_log"]

logger = logging.getLogger("zeropage.deepspeed")


def should_log(ranks: Sequence[int] | None) -> bool:
    """Whether this rank is one of `ranks`; -1 first means all of them, and a process by itself always is."""
    if not (dist.is_available() and dist.is_initialized()):
        return True
    ranks = list(ranks or ())
    return bool(ranks) and (ranks[0] == -1 or dist.get_rank() in ranks)


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on `ranks` only ([-1] for all)."""
    if should_log(ranks):
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else -1
        logger.log(level, "[Rank %d] %s", rank, message)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Print `message` on `ranks` only ([-1] for all)."""
    if should_log(ranks):
        print(message)


def set_log_level_from_string(log_level_str: str, custom_logger: Any = None) -> None:
    """Set the level of DeepSpeed's logger, or of another one, by name ("info", "warning", ...)."""
    levels = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
    name = log_level_str.lower()
    if name not in levels:
        raise ValueError(f"{log_level_str} is not one of the log levels {', '.join(levels)}")
    (custom_logger or logger).setLevel(levels[name])
