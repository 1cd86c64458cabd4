"""Medians, spreads, and ratios that are given only where they can be told from noise."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Summary", "others_share", "pin", "processor_seconds", "ratio", "summary"]


@dataclass(frozen=True, slots=True)
class Summary:
    """The median, the quartiles, and how many values there were."""

    median: float
    low: float
    high: float
    count: int

    @property
    def spread(self) -> float:
        return self.high - self.low


def summary(values: Sequence[float]) -> Summary:
    if len(values) < 2:
        return Summary(values[0], values[0], values[0], len(values))
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Summary(statistics.median(values), low, high, len(values))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[Summary, bool]:
    """`ours / theirs`, repeat by repeat (they alternated), and whether it can be told from 1.

    It cannot if its quartiles are further apart than its median is from 1.
    """
    found = summary([a / b for a, b in zip(ours, theirs, strict=False)])
    return found, found.count > 1 and found.spread < abs(found.median - 1)


def pin(core: int) -> None:
    """Keep this process and the threads that it will start on one core."""
    os.sched_setaffinity(0, {core})


def processor_seconds() -> float:
    """What all processes of the machine have used since it started."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _, _, irq, soft, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def others_share(all_used: float, ours: float, wall: float) -> float:
    """The part of the machine's processors that went to other programs."""
    return max(0.0, all_used - ours) / (wall * (os.cpu_count() or 1))
