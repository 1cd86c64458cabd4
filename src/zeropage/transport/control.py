"""Meeting points in shared memory: how ranks on one host wait for each other in microseconds.

Every rank has a block of its own in one mapping and stores only into that; the others poll it. Nothing
needs an atomic read-modify-write. The rule that makes it right: a rank publishes data first, then the
counter that announces it (x86-64 keeps stores in order; the transport refuses other processors).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from pathlib import Path

from zeropage.errors import DivergenceError, PeerLostError, PeerTimeoutError
from zeropage.memory.shared import SharedBlock

__all__ = ["BLOCK", "MAX_PAYLOAD", "Control", "describe_divergence"]

BLOCK = 32 * 1024  # bytes a rank in the control mapping
_TEXT = 256  # offset of the two intents (one for each parity of the meeting), 1 KiB each
_DATA = 4096  # offset of the two payloads
_TEXT_SIZE = 1024
MAX_PAYLOAD = 8 * 1024

_SPIN_SECONDS = 300e-6  # shorter spins let two ranks fall asleep in turn
_LIVENESS_SECONDS = 0.05


class _Word(IntEnum):
    """Index of each 64-bit word in a rank's block."""

    MET = 0  # number of the last meeting this rank has come to
    DONE = 1  # number of the last write batch this rank has closed
    ENDED = 2  # backwards that this rank has ended (see Turns in transport/shared.py)
    STATE = 3
    PID = 4
    START = 5
    TEXT_LENGTHS = 6  # two words
    DATA_LENGTHS = 8  # two words
    MAPPED = 10  # number of the last meeting whose memory this rank has mapped
    LOST = 11  # one more than the first rank that this rank has lost; 0: it has lost none


class _State(IntEnum):
    RUNNING = 0
    LEFT = 1


class Control:
    """The control mapping of one group of ranks, seen from one of them."""

    def __init__(self, block: SharedBlock, rank: int, world: int, timeout_s: float) -> None:
        self.rank, self.world, self.timeout_s = rank, world, timeout_s
        self._buffer = block.buffer
        self._words = [(ctypes.c_uint64 * 16).from_buffer(self._buffer, r * BLOCK) for r in range(world)]
        self._mine = self._words[rank]
        self._others = [r for r in range(world) if r != rank]
        self._spin = _SPIN_SECONDS if world <= len(os.sched_getaffinity(0)) else 0.0
        self._batch = 0
        self._doing = ""
        self._mine[_Word.START] = _start_time(os.getpid())
        self._mine[_Word.PID] = os.getpid()

    @property
    def met(self) -> int:
        return int(self._mine[_Word.MET])

    def meet(self, intent: str, payload: bytes) -> list[bytes]:
        """See `Transport.meet`.

        [Note: two parities] A quick rank may come to meeting n+1 while a slow one still reads the intents of
        meeting n, but not to n+2. So texts and payloads have two places, used in turn.
        """
        number = self.met + 1
        self._publish(number % 2, intent, payload)
        self._mine[_Word.MET] = number
        self._doing = intent
        for peer in self._others:
            self.wait(partial(self._has_reached, peer, _Word.MET, number), peer)
        self._doing = ""
        intents = [self._text(peer, number % 2) for peer in range(self.world)]
        if any(other != intents[0] for other in intents):
            raise DivergenceError(describe_divergence(intents))
        return [self._payload(peer, number % 2) for peer in range(self.world)]

    def open_writes(self, intent: str, payload: bytes) -> list[bytes]:
        payloads = self.meet(intent, payload)
        self._batch = self.met
        return payloads

    def close_writes(self) -> None:
        self._mine[_Word.DONE] = self._batch

    def settle(self) -> None:
        batch = self._batch
        for peer in self._others:
            if self._words[peer][_Word.DONE] < batch:
                self.wait(partial(self._has_reached, peer, _Word.DONE, batch), peer)

    def _has_reached(self, peer: int, word: _Word, number: int) -> bool:
        return bool(self._words[peer][word] >= number)

    def publish_ended(self, number: int) -> None:
        self._mine[_Word.ENDED] = number

    def publish_mapped(self) -> None:
        self._mine[_Word.MAPPED] = self.met

    def await_mapped(self) -> None:
        """Before the first rank leaves: what it handed over last can be opened only while it holds it."""
        for peer in self._others:
            with contextlib.suppress(PeerLostError):
                self.wait(partial(self._has_reached, peer, _Word.MAPPED, self.met), peer)

    def ended(self, peer: int) -> int:
        return int(self._words[peer][_Word.ENDED])

    def arrived(self, peer: int) -> int:
        return int(self._words[peer][_Word.MET])

    def leave(self) -> None:
        if self._mine[_Word.PID] == os.getpid():  # not from a forked child, which shares the mapping
            self._mine[_Word.STATE] = _State.LEFT

    def wait(self, ready: Callable[[], bool], peer: int) -> None:
        """Spin, then sleep, until `ready()`; errors name `peer` and what both were doing."""
        if ready():
            return
        began = time.perf_counter()
        pause = 20e-6
        while not ready():
            waited = time.perf_counter() - began
            if waited < self._spin:
                continue
            time.sleep(pause)
            pause = min(pause * 1.5, 1e-3)
            if waited > _LIVENESS_SECONDS:
                self._check_peer(peer, ready)
            if waited > self.timeout_s and not ready():
                raise self._lost(PeerTimeoutError, peer, f"rank {peer} did not come within {self.timeout_s:g} s")

    def _check_peer(self, peer: int, ready: Callable[[], bool]) -> None:
        words = self._words[peer]
        if words[_Word.STATE] == _State.LEFT and not ready():
            raise self._lost(PeerLostError, peer, f"rank {peer} has left")
        pid = int(words[_Word.PID])
        if pid and _start_time(pid) != words[_Word.START] and not ready():
            raise self._lost(PeerLostError, peer, f"rank {peer} (process {pid}) died")

    def _lost(self, kind: type[PeerLostError], peer: int, what: str) -> PeerLostError:
        """The error, which names the rank that was lost first; those that lose this rank next learn it from here."""
        first = int(self._words[peer][_Word.LOST]) - 1
        if first >= 0:
            what, peer = f"{what}, having lost rank {first}", first
        self._mine[_Word.LOST] = self._mine[_Word.LOST] or peer + 1
        return kind(f"{what}: {self._where(peer)}; {self._here()}")

    def _where(self, peer: int) -> str:
        met = self.arrived(peer)
        return f"it last met the others for {self._text(peer, met % 2)!r}" if met else "it never met the others"

    def _here(self) -> str:
        return f"rank {self.rank} waits in {self._doing or 'a read'!r}"

    def _publish(self, parity: int, intent: str, payload: bytes) -> None:
        if len(payload) > MAX_PAYLOAD:
            raise ValueError(f"{len(payload)} bytes do not fit into a meeting (at most {MAX_PAYLOAD})")
        text = intent.encode()[:_TEXT_SIZE]
        self._store(_TEXT + parity * _TEXT_SIZE, text)
        self._store(_DATA + parity * MAX_PAYLOAD, payload)
        self._mine[_Word.TEXT_LENGTHS + parity] = len(text)
        self._mine[_Word.DATA_LENGTHS + parity] = len(payload)

    def _store(self, offset: int, data: bytes) -> None:
        start = self.rank * BLOCK + offset
        self._buffer[start : start + len(data)] = data

    def _text(self, peer: int, parity: int) -> str:
        start = peer * BLOCK + _TEXT + parity * _TEXT_SIZE
        length = int(self._words[peer][_Word.TEXT_LENGTHS + parity])
        return bytes(self._buffer[start : start + length]).decode(errors="replace")

    def _payload(self, peer: int, parity: int) -> bytes:
        start = peer * BLOCK + _DATA + parity * MAX_PAYLOAD
        length = int(self._words[peer][_Word.DATA_LENGTHS + parity])
        return bytes(self._buffer[start : start + length])


def describe_divergence(intents: list[str]) -> str:
    told = "; ".join(f"rank {rank}: {intent}" for rank, intent in enumerate(intents))
    return (
        f"the ranks are not doing the same thing ({told}). Parameters are written, stepped, saved and closed "
        "by all ranks together: make every rank run this line, or none."
    )


def _start_time(pid: int) -> int:
    """When the process started, in clock ticks since boot; 0 for one that is gone or a zombie."""
    try:
        status = (Path("/proc") / str(pid) / "stat").read_text()
    except OSError:
        return 0
    fields = status[status.rindex(")") + 2 :].split()
    return 0 if fields[0] in "ZX" else int(fields[19])
