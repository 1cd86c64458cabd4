"""What `zeropage bench` is asked to measure."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zeropage.bench.expect import Model
from zeropage.config import MIB
from zeropage.errors import ConfigError, OutOfMemoryError
from zeropage.memory.host import available_bytes

__all__ = ["DTYPES", "Settings", "cores", "default_ranks"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

_MOST_RANKS = 8
_FULL_COPIES = 3  # of the largest unit: the gradient or the frame, what is on its way, and the slices
_OWN_BYTES = 400 * MIB  # of a rank: Python, the libraries, and what the other measurements take


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0))


def default_ranks() -> int:
    """One for each core, eight at most."""
    return min(_MOST_RANKS, cores())


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that can be chosen.

    Attributes:
        sizes: bytes of the units that are gathered and reduced.
        seconds: how long each figure is measured, at least (three repeats are always made).
        folder: whose disk is measured.
        disk_bytes: how much is written there, at most.

    Raises:
        ConfigError: something cannot be measured; names the option.
        OutOfMemoryError: the ranks would take more memory than is available.
    """

    ranks: int
    sizes: tuple[int, ...]
    seconds: float
    folder: Path
    disk_bytes: int
    model: Model

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ConfigError(f"--ranks {self.ranks}: at least one rank is needed")
        if not (self.seconds > 0 and math.isfinite(self.seconds)):
            raise ConfigError(f"--seconds {self.seconds:g}: a positive number of seconds is needed")
        if not self.sizes:
            raise ConfigError("--sizes: name at least one size, as in --sizes 1MiB,16MiB")
        least = 4 * self.ranks
        if min(self.sizes) < least:
            raise ConfigError(f"--sizes: {min(self.sizes)} bytes cannot be cut for {self.ranks} ranks; take {least} up")
        self._check_memory()

    def _check_memory(self) -> None:
        wanted = self.ranks * (_OWN_BYTES + _FULL_COPIES * max(self.sizes))
        available = available_bytes()
        if wanted > available:
            raise OutOfMemoryError(
                f"{self.ranks} ranks that move units of {max(self.sizes):,} bytes take about {wanted:,} bytes, and "
                f"{available:,} are available; take fewer --ranks or smaller --sizes"
            )

    @property
    def threads(self) -> int:
        """Threads of each rank: the cores are shared out."""
        return max(1, cores() // self.ranks)

    def job(self, transports: tuple[str, ...]) -> dict[str, Any]:
        """What a rank is told (JSON)."""
        return {
            "sizes": self.sizes,
            "seconds": self.seconds,
            "precision": self.model.precision,
            "tokens": self.model.tokens,
            "transports": transports,
            "threads": self.threads,
        }
