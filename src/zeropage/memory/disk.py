"""Slices of one rank in a file: where they lie, and how they are read and written.

Each rank of each job has a subfolder of its own, `zeropage-<host>-<job>-rank<r>`, with one file for all its slices.
A lock (`flock`) is held on it while the process lives. So two jobs in one folder never meet, and what a dead one
left is recognised by its free lock and removed.

[Note: two ways to a file] What is many times the memory is read and written explicitly: `read`, `write`, and
`memory.stream` with buffers of its own past the page cache (`O_DIRECT`). Everything else - an edit, a checkpoint
that is read into a slice or written from it - sees a slice as a tensor over a mapping of the file, which the kernel
may drop from memory at any time. The kernel keeps both alike as long as nobody uses both at once; whether this file
system does is tried out when the file is made, and if it does not the page cache is never gone past.
"""

from __future__ import annotations

import fcntl
import gc
import logging
import mmap
import os
import shutil
import socket
import weakref
from pathlib import Path

import torch

from zeropage.errors import OffloadError
from zeropage.memory.raw import bytes_of

__all__ = ["BLOCK", "Disk", "DiskFile", "DiskSlice", "rounded"]

BLOCK = 4096
"""Slices begin at multiples of so many bytes, and take multiples of it: what direct reads and writes ask for."""

_FILE = "slices"
_LOCK = "lock"
_log = logging.getLogger(__name__)


def rounded(nbytes: int) -> int:
    """The bytes of whole blocks that hold `nbytes`."""
    return -(-nbytes // BLOCK) * BLOCK


class DiskFile:
    """A file of slices, of this rank or (to be read only) of another one on this host."""

    def __init__(self, path: Path, *, writable: bool) -> None:
        self.path = path
        flags = (os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY) | os.O_CLOEXEC
        self.plain = os.open(path, flags, 0o600)
        self.direct = self.plain
        self._opened = [self.plain]
        weakref.finalize(self, _close, self._opened)
        if writable:
            self._try_direct(flags)

    def _try_direct(self, flags: int) -> None:
        """Go past the page cache if that works here, and if mappings notice."""
        try:
            descriptor = os.open(self.path, flags | os.O_DIRECT)
        except OSError:
            return
        self._opened.append(descriptor)
        buffer = mmap.mmap(-1, BLOCK)
        try:
            os.ftruncate(self.plain, BLOCK)
            with mmap.mmap(self.plain, BLOCK) as seen:
                for byte in (1, 2):
                    seen[:] = bytes([byte]) * BLOCK
                    os.preadv(descriptor, [buffer], 0)
                    same = buffer[:] == seen[:]
                    buffer[:] = bytes([byte + 8]) * BLOCK
                    os.pwritev(descriptor, [buffer], 0)
                    if not same or buffer[:] != seen[:]:
                        return
        except OSError:  # no direct writes here, or no room: the first slice will say that
            return
        finally:
            os.ftruncate(self.plain, 0)
        self.direct = descriptor

    def read(self, into: memoryview, offset: int, *, direct: bool = False) -> None:
        """Fill `into` from byte `offset` on.

        Raises:
            OffloadError: it cannot be read, or ends too early; names path and bytes.
        """
        descriptor, left = self.direct if direct else self.plain, into
        try:
            while left:
                count = os.preadv(descriptor, [left], offset)
                if count == 0:
                    raise OffloadError(f"{self.path} ends at byte {offset:,}, where {len(left):,} more were to be read")
                left, offset = left[count:], offset + count
        except OSError as error:
            if isinstance(error, OffloadError):
                raise
            raise OffloadError(
                f"{self.path}: {len(left):,} bytes at byte {offset:,} cannot be read: {error.strerror or error}"
            ) from error

    def write(self, data: memoryview, offset: int, *, direct: bool = False) -> None:
        """Write `data` from byte `offset` on.

        Raises:
            OffloadError: it cannot be written; names path and bytes.
        """
        descriptor, left = self.direct if direct else self.plain, data
        try:
            while left:
                count = os.pwritev(descriptor, [left], offset)
                left, offset = left[count:], offset + count
        except OSError as error:
            raise OffloadError(
                f"{self.path}: {len(left):,} bytes at byte {offset:,} cannot be written: {error.strerror or error}"
            ) from error


class DiskSlice:
    """`numel` elements of a file from byte `offset` on."""

    __slots__ = ("__weakref__", "dtype", "file", "numel", "offset", "owner")

    def __init__(self, file: DiskFile, offset: int, numel: int, dtype: torch.dtype, owner: object = None) -> None:
        self.file = file
        self.offset = offset
        self.numel = numel
        self.dtype = dtype
        self.owner = owner  # lives as long as the slice

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def mapped(self) -> torch.Tensor:
        """The slice as a tensor (1-D) over a mapping of the file: what is written to it is in the file."""
        with torch.inference_mode(False):
            if not self.numel:
                return torch.empty(0, dtype=self.dtype, device="cpu")
            seen = _Mapping(self.file.plain, rounded(self.nbytes), offset=self.offset)
            seen.madvise(mmap.MADV_SEQUENTIAL)
            seen.held = self
            return torch.frombuffer(seen, dtype=self.dtype, count=self.numel)

    def read(self, into: torch.Tensor) -> None:
        """Fill `into` (1-D, contiguous, on the host) with the values."""
        if self.numel:
            self.file.read(bytes_of(into), self.offset)

    def write(self, values: torch.Tensor) -> None:
        """Take `values` (1-D, `numel` elements of any dtype)."""
        if self.numel:
            self.file.write(bytes_of(values.detach().to("cpu", self.dtype).contiguous()), self.offset)


class _Mapping(mmap.mmap):
    """A mapping of a slice, whose place is not given away as long as a tensor lies over it."""

    held: DiskSlice


class Disk:
    """This rank's file and the room in it.

    Args:
        folder: where subfolders are made; it is made too.
        job: what the ranks of this job call it, and no other job.
        buffer_bytes: memory for reading ahead and writing behind (`memory.stream`).

    Raises:
        OffloadError: the folder cannot be written.
    """

    def __init__(self, folder: Path, job: str, rank: int, buffer_bytes: int) -> None:
        self.job = job
        self.buffer_bytes = buffer_bytes
        self._folder = folder
        self._free: dict[int, list[int]] = {}  # by length: where room was given back
        self._end = 0
        self._peers: dict[int, DiskFile] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _remove_stale(folder)
            place = _place(folder, job, rank)
            place.mkdir()
            lock = os.open(place / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            weakref.finalize(self, _remove, place, lock, os.getpid())
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.write(lock, b"1")  # from now on it is taken for left behind when the lock is free
            self.file = DiskFile(place / _FILE, writable=True)
        except OSError as error:
            raise OffloadError(
                f"offload.folder {error.filename or folder} cannot be written: {error.strerror or error}"
            ) from error

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def nbytes(self) -> int:
        """Bytes that the file takes."""
        return self._end

    @property
    def available(self) -> int:
        """Bytes that are free on its disk."""
        about = os.statvfs(self.path.parent)
        return about.f_bavail * about.f_frsize

    def allocate(self, numel: int, dtype: torch.dtype, what: str) -> DiskSlice:
        """Room for a slice, whose values are undefined. It is taken on the disk now, and given back with the slice.

        Raises:
            OffloadError: the disk is full; names the file and the bytes.
        """
        nbytes = rounded(numel * dtype.itemsize)
        try:
            offset = self._find(nbytes)
        except OSError:
            gc.collect()  # slices that only cycles hold
            try:
                offset = self._find(nbytes)
            except OSError as error:
                raise OffloadError(
                    f"{self.path}: {error.strerror or error}: {nbytes:,} bytes for {what} are needed beside the "
                    f"{self._end:,} that the file has, and {self.available:,} are free. Nothing was "
                    "changed: make room and go on, or set offload.folder to another disk."
                ) from error
        found = DiskSlice(self.file, offset, numel, dtype, owner=self)
        if nbytes:
            weakref.finalize(found, _give_back, self._free, nbytes, offset)
        return found

    def _find(self, nbytes: int) -> int:
        free = self._free.get(nbytes)
        if free:
            return free.pop()
        offset = self._end
        if nbytes:
            try:
                os.posix_fallocate(self.file.plain, offset, nbytes)
            except OSError:
                os.ftruncate(self.file.plain, offset)
                raise
            self._end += nbytes
        return offset

    def of_peer(self, rank: int) -> DiskFile:
        """The file of another rank on this host, to be read."""
        if rank not in self._peers:
            self._peers[rank] = DiskFile(_place(self._folder, self.job, rank) / _FILE, writable=False)
        return self._peers[rank]


def _place(folder: Path, job: str, rank: int) -> Path:
    return folder / f"zeropage-{socket.gethostname()}-{job}-rank{rank}"


def _remove_stale(folder: Path) -> None:
    """Remove what processes of this host left that died before they could."""
    for place in sorted(folder.glob(f"zeropage-{socket.gethostname()}-*-rank*")):
        try:
            lock = os.open(place / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # its process lives
            continue
        else:
            if os.fstat(lock).st_size:  # else it is being made at this moment
                nbytes = sum(file.stat().st_size for file in place.iterdir())
                shutil.rmtree(place, ignore_errors=True)
                _log.warning("%s was left by a program that died; its %s bytes are removed", place, f"{nbytes:,}")
        finally:
            os.close(lock)


def _remove(place: Path, lock: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has the same object
        shutil.rmtree(place, ignore_errors=True)
        os.close(lock)


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _give_back(free: dict[int, list[int]], nbytes: int, offset: int) -> None:
    free.setdefault(nbytes, []).append(offset)
