"""The disk under a folder: writing in order until it is kept, and reading in order.

The file has no name: it is removed from the folder as soon as it is open, so that whatever ends this program leaves
nothing behind. Reads and writes go past the page cache (`O_DIRECT`) where the file system allows it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from zeropage.config import MIB
from zeropage.errors import OffloadError
from zeropage.memory.disk import BLOCK, rounded

__all__ = ["DiskRates", "measure_disk"]

_PIECE = 8 * MIB
_MOST_SECONDS = 3.0  # for each direction: a slow disk is known by then


@dataclass(frozen=True, slots=True)
class DiskRates:
    """Bytes a second. `direct`: past the page cache; otherwise the kernel was asked to forget what was written."""

    folder: str
    nbytes: int
    direct: bool
    write: float
    read: float


def measure_disk(folder: Path, nbytes: int) -> DiskRates:
    """Write up to `nbytes` into `folder`, durably, and read them back.

    Raises:
        OffloadError: the folder is none, cannot be written, or has no room (names it and the bytes).
    """
    nbytes = rounded(nbytes)
    try:
        available = os.statvfs(folder)
    except OSError as error:
        raise OffloadError(f"--folder {folder}: {error.strerror or error}; name a folder that is there") from error
    free = available.f_bavail * available.f_frsize
    if nbytes > free:
        raise OffloadError(
            f"--folder {folder}: {nbytes:,} bytes are to be written and {free:,} are free; make room, or take a "
            "smaller --disk-size"
        )
    try:
        with _nameless(folder) as (file, direct):
            return _measure(folder, file, direct, nbytes)
    except OSError as error:
        raise OffloadError(
            f"--folder {folder}: {nbytes:,} bytes cannot be written and read there: {error.strerror or error}"
        ) from error


@contextmanager
def _nameless(folder: Path) -> Iterator[tuple[int, bool]]:
    """A new file in `folder` without a name, and whether it is opened past the page cache."""
    file, path = tempfile.mkstemp(prefix="zeropage-bench-", dir=folder)
    direct = -1
    try:
        with suppress(OSError):
            direct = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        os.unlink(path)
        yield (file, False) if direct < 0 else (direct, True)
    finally:
        for opened in (file, direct):
            if opened >= 0:
                os.close(opened)


def _measure(folder: Path, file: int, direct: bool, nbytes: int) -> DiskRates:
    with mmap.mmap(-1, min(_PIECE, nbytes)) as buffer:  # begins at a page of memory, as direct access asks for
        buffer[:] = os.urandom(BLOCK) * (len(buffer) // BLOCK)
        began = time.perf_counter()
        written = _pieces(lambda piece, place: os.pwritev(file, [piece], place), buffer, nbytes, began)
        os.fsync(file)
        middle = time.perf_counter()
        if not direct:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        began_too = time.perf_counter()
        read = _pieces(lambda piece, place: os.preadv(file, [piece], place), buffer, written, began_too)
        end = time.perf_counter()
    return DiskRates(str(folder), written, direct, written / (middle - began), read / (end - began_too))


def _pieces(move: Callable[[memoryview, int], int], buffer: mmap.mmap, nbytes: int, began: float) -> int:
    """Move `nbytes` in pieces, until too much time has passed; how many were moved."""
    place = 0
    with memoryview(buffer) as whole:
        while place < nbytes and time.perf_counter() - began < _MOST_SECONDS:
            with whole[: min(len(whole), nbytes - place)] as piece:
                place += move(piece, place)
    return place
