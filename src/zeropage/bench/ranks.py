"""The ranks, seen from the command: started, told what to measure, heard, and ended with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import IO, Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from zeropage.errors import PeerLostError

__all__ = ["ask_ranks"]

_ADDRESS = "127.0.0.1"
_LAST_WORDS = 2000  # characters


def ask_ranks(world: int, threads: int, job: dict[str, Any]) -> dict[str, Any]:
    """Start `world` ranks, and return what they found. None of them lives when this returns.

    Raises:
        PeerLostError: a rank failed; the end of what it said is in the message.
    """
    store = TCPStore(_ADDRESS, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    with _started(world, threads) as ranks:
        for number, rank in enumerate(ranks):
            rank.tell(job | {"rank": number, "world": world, "address": _ADDRESS, "port": store.port})
        return ranks[0].answer() if ranks else {}


@contextmanager
def _started(world: int, threads: int) -> Iterator[list[_Rank]]:
    ranks: list[_Rank] = []
    try:
        for number in range(world):
            ranks.append(_Rank(number, threads, ranks))
        yield ranks
    finally:
        for rank in ranks:
            rank.end()


class _Rank:
    """One process. `fellows` are all ranks: when one fails, the others fail of it, so its words are what counts."""

    def __init__(self, number: int, threads: int, fellows: list[_Rank]) -> None:
        self.number, self.fellows = number, fellows
        self.words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `end`)
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "zeropage.bench.rank"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.words, env=environment,
        )  # fmt: skip

    def tell(self, job: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: its answer will say so
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        told = "\n".join(f"rank {rank.number}: {rank.last_words()}" for rank in self.fellows)
        raise PeerLostError(f"a rank of the benchmark ended without an answer:\n{told}")

    def last_words(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)
        self.words.seek(0)
        text = self.words.read().decode(errors="replace").strip()
        return f"exit status {self.process.poll()}; {text[-_LAST_WORDS:] or 'it said nothing'}"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.words):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
