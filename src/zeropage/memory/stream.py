"""Streaming through slices on disk: one window is worked on while the next are read and the last ones written.

A *window* is what is in one buffer at a time: parts of several slices, in the order in which they stand in the file,
so that parts that stand side by side are read and written in one go. The number of buffers is fixed, and with it the
memory: two threads take turns with the caller. Both are in system calls nearly all the time, which release the
interpreter lock.
"""

from __future__ import annotations

import mmap
import queue
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch

from zeropage.memory.disk import DiskFile, DiskSlice, rounded

__all__ = ["BUFFERS", "Span", "Window", "stream"]

BUFFERS = 8
"""One is read, one worked on, one written; the others lie ready, so that nobody waits for who is slow just now. Many
small ones also begin and end sooner than a few large ones: the first read and the last write are for themselves."""


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Elements `low` to `high` of a slice; `low` is at a block's beginning. `reads`: its values are wanted."""

    slice: DiskSlice
    low: int
    high: int
    reads: bool
    writes: bool

    @property
    def start(self) -> int:
        """The place in the file."""
        return self.slice.offset + self.low * self.slice.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes in the buffer: whole blocks."""
        return rounded((self.high - self.low) * self.slice.dtype.itemsize)


class Window:
    """Spans and their places in a buffer."""

    __slots__ = ("_places", "nbytes", "spans")

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = sorted(spans, key=lambda span: (str(span.slice.file.path), span.start))
        self._places: dict[Span, int] = {}
        self.nbytes = 0
        for span in self.spans:
            self._places[span] = self.nbytes
            self.nbytes += span.nbytes

    def values(self, buffer: memoryview, span: Span) -> torch.Tensor:
        """What `span` has in the buffer (1-D)."""
        count = span.high - span.low
        with torch.inference_mode(False):
            if not count:
                return torch.empty(0, dtype=span.slice.dtype, device="cpu")
            return torch.frombuffer(buffer, dtype=span.slice.dtype, count=count, offset=self._places[span])

    def read(self, buffer: memoryview) -> None:
        for run in self._runs([span for span in self.spans if span.reads]):
            run.file.read(buffer[run.place : run.place + run.nbytes], run.start, direct=True)

    def write(self, buffer: memoryview) -> None:
        for run in self._runs([span for span in self.spans if span.writes]):
            run.file.write(buffer[run.place : run.place + run.nbytes], run.start, direct=True)

    def _runs(self, spans: Sequence[Span]) -> list[_Run]:
        """What is moved in one go: spans that are neighbours in the file and in the buffer."""
        found: list[_Run] = []
        for span in spans:
            run = _Run(span.slice.file, self._places[span], span.start, span.nbytes)
            if found and found[-1].is_followed_by(run):
                found[-1].nbytes += run.nbytes
            elif run.nbytes:
                found.append(run)
        return found


@dataclass(slots=True, eq=False)
class _Run:
    """Bytes that stand side by side in a file (from `start`) and in a buffer (from `place`)."""

    file: DiskFile
    place: int
    start: int
    nbytes: int

    def is_followed_by(self, other: _Run) -> bool:
        beside = self.place + self.nbytes == other.place and self.start + self.nbytes == other.start
        return beside and self.file is other.file


def stream(windows: Sequence[Window]) -> Generator[tuple[Window, memoryview], None, None]:
    """Each window with the buffer that holds what it reads; what is in it when the next one is asked for is written.

    When the iteration ends, everything has been written. It must be closed if it is left early: what was not asked for
    is not read, and what was given last is not written.

    Raises:
        OffloadError: something could not be read or written.
    """
    room = max((window.nbytes for window in windows), default=0)
    if not room:
        yield from ((window, memoryview(b"")) for window in windows)
        return
    pipe = _Pipe(windows, room)
    try:
        for window in windows:
            buffer = pipe.next()
            yield window, buffer
            pipe.give(window, buffer)
    finally:
        pipe.close()
    pipe.check()


class _Pipe:
    """The buffers of one pass and the two threads that fill and empty them."""

    def __init__(self, windows: Sequence[Window], room: int) -> None:
        self._free: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._filled: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Window, memoryview] | None] = queue.SimpleQueue()
        self._problem: Exception | None = None
        for _ in range(min(BUFFERS, len(windows))):
            self._free.put(memoryview(mmap.mmap(-1, room)))  # begins at a page of memory
        self._threads = [
            threading.Thread(target=self._read, args=(windows,), name="zeropage reads ahead"),
            threading.Thread(target=self._write, name="zeropage writes behind"),
        ]
        for thread in self._threads:
            thread.start()

    def next(self) -> memoryview:
        buffer = self._filled.get()
        self.check()
        assert buffer is not None
        return buffer

    def give(self, window: Window, buffer: memoryview) -> None:
        self._done.put((window, buffer))

    def close(self) -> None:
        """Write what was given, and end the threads."""
        self._free.put(None)
        self._done.put(None)
        for thread in self._threads:
            thread.join()

    def check(self) -> None:
        if self._problem is not None:
            raise self._problem

    # -- in the threads

    def _read(self, windows: Sequence[Window]) -> None:
        for window in windows:
            buffer = self._free.get()
            if buffer is None:
                return
            try:
                if self._problem is None:
                    window.read(buffer)
            except Exception as error:
                self._problem = error
            self._filled.put(buffer)

    def _write(self) -> None:
        while (job := self._done.get()) is not None:
            window, buffer = job
            try:
                if self._problem is None:
                    window.write(buffer)
            except Exception as error:
                self._problem = error
            self._free.put(buffer)
