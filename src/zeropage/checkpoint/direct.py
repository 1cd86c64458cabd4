"""A file written in order at the rate of the disk, with little use of the processor.

Bytes are collected in two buffers: one is filled while a thread writes the other, past the page cache where the file
system allows it (`O_DIRECT`). Whoever needs the source of the bytes back can ask for haste: what is left then goes
through the page cache, which takes it faster than the disk does.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from zlib_ng import zlib_ng

__all__ = ["DirectFile"]

_BUFFER = 8 << 20  # bytes
_BLOCK = 4096  # lengths and places of direct writes are multiples of it


class DirectFile:
    """Creates `path` at the first write; `before_write` is called before every one and may raise.

    Attributes:
        nbytes: bytes written so far.
        crc32: their checksum, complete once `finish` is called.
    """

    def __init__(self, path: Path, before_write: Callable[[], None]) -> None:
        self._path = path
        self._before_write = before_write
        self._descriptor = -1
        self._haste = threading.Event()
        self._free: queue.SimpleQueue[np.ndarray[Any, Any]] = queue.SimpleQueue()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._buffer: np.ndarray[Any, Any] | None = None
        self._filled = 0
        self._problem: OSError | None = None
        self.nbytes = self.crc32 = 0
        for _ in range(2):
            self._free.put(np.frombuffer(mmap.mmap(-1, _BUFFER), dtype=np.uint8))  # begins at a page of memory
        self._thread = threading.Thread(target=self._work, name=f"zeropage writes {path.name}")
        self._thread.start()

    def write(self, data: Any, /) -> int:
        """Take the bytes of `data`, which may change afterwards.

        Raises:
            OSError: an earlier write failed.
        """
        self._before_write()
        source = np.frombuffer(data, dtype=np.uint8)
        place = 0
        while place < len(source):
            if self._buffer is None:
                self._buffer, self._filled = self._free.get(), 0
                self._raise()
            count = min(len(source) - place, _BUFFER - self._filled)
            np.copyto(self._buffer[self._filled : self._filled + count], source[place : place + count])
            place += count
            self._filled += count
            if self._filled == _BUFFER:
                self._send()
        return len(source)

    def hasten(self) -> None:
        """Let go of the source of the bytes as soon as possible (from any thread)."""
        self._haste.set()

    def finish(self) -> None:
        """Bring everything to the disk.

        Raises:
            OSError: something could not be written.
        """
        self._send()
        done = threading.Event()
        self._jobs.put(self._sync)
        self._jobs.put(done.set)
        done.wait()
        self._raise()

    def close(self) -> None:
        """End the thread. What was not finished may not be in the file."""
        self._jobs.put(None)
        self._thread.join()

    def _raise(self) -> None:
        if self._problem is not None:
            raise self._problem

    def _send(self) -> None:
        if self._buffer is None:
            return
        buffer, count = self._buffer, self._filled
        self._buffer = None
        self._jobs.put(lambda: self._put(buffer, count))
        self.crc32 = zlib_ng.crc32(buffer[:count], self.crc32)
        self.nbytes += count

    # -- in the thread

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def _put(self, buffer: np.ndarray[Any, Any], count: int) -> None:
        try:
            if self._problem is None:
                self._write(buffer[:count].data)
        except OSError as error:
            self._problem = error
        finally:
            self._free.put(buffer)

    def _write(self, data: memoryview) -> None:
        if self._descriptor < 0:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            self._past_cache(True)
        if self._haste.is_set() or len(data) % _BLOCK:
            self._past_cache(False)
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._past_cache(False):
                    raise

    def _sync(self) -> None:
        try:
            if self._problem is None and self._descriptor >= 0:
                os.fsync(self._descriptor)
        except OSError as error:
            self._problem = error

    def _past_cache(self, wanted: bool) -> bool:
        """Whether this has changed anything; a file system without direct writes refuses."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        changed = flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, changed)
        except OSError:
            return False
        return changed != flags
