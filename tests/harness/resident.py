"""How much memory of its own a process held at most while a piece of code ran, as the kernel counts it."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Resident", "held", "map_blocks_from", "resident"]

_SECONDS = 0.003  # between two looks
_M_MMAP_THRESHOLD = -3
_LARGE = 256 * 1024


@dataclass
class Resident:
    """Bytes: the process's proportional share of what is in memory and is no file (which the kernel can drop)."""

    before: int = 0
    peak: int = 0
    after: int = 0

    @property
    def extra(self) -> int:
        """What was needed for a while only."""
        return self.peak - max(self.before, self.after)


@contextmanager
def resident() -> Iterator[Resident]:
    """Look every few milliseconds.

    From here on the C library gives large blocks back when they are freed, so that what counts is what is held and
    not what it keeps for later.
    """
    gc.collect()
    map_blocks_from(_LARGE)
    ctypes.CDLL(None).malloc_trim(0)
    found = Resident(before=_now())
    ends = threading.Event()

    def look() -> None:
        while not ends.wait(_SECONDS):
            found.peak = max(found.peak, _now())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield found
    finally:
        ends.set()
        looking.join()
    found.peak = max(found.peak, _now())
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    found.after = _now()


def map_blocks_from(nbytes: int) -> None:
    """Let the C library give blocks of so many bytes back when they are freed, and keep smaller ones for later."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, nbytes)


def held(*kinds: str) -> int:
    """Bytes: the process's proportional share of memory of those kinds, by their names in `smaps_rollup`."""
    fields = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return 1024 * sum(int(fields[kind].split()[0]) for kind in kinds)


def _now() -> int:
    return held("Pss_Anon", "Pss_Shmem")
