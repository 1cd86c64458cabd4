"""Repeating what all ranks do together, as often as they agree to."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

__all__ = ["Timed", "repeat"]

_LEAST, _MOST = 3, 1000


@dataclass(frozen=True, slots=True)
class Timed:
    """Medians over the repeats, of the slowest rank each: seconds, and processor seconds of all its threads."""

    seconds: float
    processor: float


def repeat(work: Callable[[int], object], seconds: float, prepare: Callable[[int], object] | None = None) -> Timed:
    """Do `work` again and again for about `seconds` (collective), after once to warm up.

    `prepare` comes before each time and is not counted. Both get the number of the repeat.
    """
    found = [_once(0, work, prepare)]
    (first,) = _slowest([found[0][0]])
    for index in range(1, 1 + max(_LEAST, min(_MOST, int(seconds / max(first, 1e-6))))):
        found.append(_once(index, work, prepare))
    walls, processor = zip(*found[1:], strict=True)
    return Timed(statistics.median(_slowest(walls)), statistics.median(_slowest(processor)))


def _once(index: int, work: Callable[[int], object], prepare: Callable[[int], object] | None) -> tuple[float, float]:
    if prepare is not None:
        prepare(index)
    dist.barrier()
    used, began = time.process_time(), time.perf_counter()
    work(index)
    return time.perf_counter() - began, time.process_time() - used


def _slowest(values: list[float] | tuple[float, ...]) -> list[float]:
    """The largest of all ranks, element by element."""
    found = torch.tensor(values, dtype=torch.float64, device="cpu")
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [float(value) for value in found]
