"""The ranks of one competitor, seen from the runner."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measure import others_share, processor_seconds

__all__ = ["Competitor", "Fleet", "FleetError", "Window", "end_all"]


@dataclass(frozen=True)
class Competitor:
    """A name for tables, the class that does the work, and what to make it with."""

    name: str
    work: str
    options: dict[str, Any] = field(default_factory=dict)
    libraries: tuple[str, ...] = ()
    gated: bool = True  # whether its losses must agree with the others'
    size: float = 1.0  # memory, in units of what a sharded model takes
    stays: bool = True  # whether its ranks may go on to the next window, if there is room


@dataclass(frozen=True, slots=True)
class Window:
    """One counted repeat: some repetitions without a pause. Walls are those of the slowest rank."""

    first: int  # number of the first repetition
    walls: list[float]
    processor: list[float]  # seconds, summed over ranks
    results: list[list[float | None]]  # by repetition, by rank
    others: float  # part of the processors that other programs took
    loopback: int  # bytes through the loopback device, whoever sent them


class FleetError(RuntimeError):
    """A rank failed; its traceback or the end of its log is in the message."""


class Fleet:
    """Starts the ranks, tells all of them the same, and collects what they say."""

    def __init__(self, competitor: Competitor, world: int, folder: Path, extensions: Path) -> None:
        self.competitor, self.world = competitor, world
        self.log = folder / f"{competitor.name.replace(' ', '-')}.log"
        self.done = 0
        self.warm: Window  # the repetitions before the latest window
        environment = os.environ | {
            "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
            "TORCH_EXTENSIONS_DIR": str(extensions.absolute()), "DS_ACCELERATOR": "cpu",
            "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        with self.log.open("ab") as log:
            self.ranks = [
                subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.rank", str(rank % (os.cpu_count() or 1))],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                    env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
                for rank in range(world)
            ]  # fmt: skip
        self.tell("start", libraries=list(competitor.libraries))

    def tell(self, do: str, **command: Any) -> list[dict[str, Any]]:
        """Each rank's answer."""
        for rank in self.ranks:
            assert rank.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended: `_answer` tells
                rank.stdin.write(json.dumps({"do": do} | command) + "\n")
                rank.stdin.flush()
        answers = [self._answer(rank) for rank in self.ranks]
        wrong = [answer["error"] for answer in answers if "error" in answer]
        if wrong:
            self.end()
            raise FleetError(f"{self.competitor.name}: {wrong[0]}")
        return [answer["ok"] for answer in answers]

    def _answer(self, rank: subprocess.Popen[str]) -> dict[str, Any]:
        assert rank.stdout is not None
        line = rank.stdout.readline()
        if line:
            return dict(json.loads(line))
        tail = self.log.read_text(errors="replace")[-2000:]
        self.end()
        raise FleetError(f"{tail}\n{self.competitor.name}: a rank ended without a word (above: the end of its log)")

    def open(self, job: dict[str, Any]) -> float:
        """Build what is to be timed; seconds of the slowest rank."""
        answers = self.tell("open", work=self.competitor.work, job=job, options=self.competitor.options)
        return max(float(answer["seconds"]) for answer in answers)

    def window(self, count: int, *, warm_up: int = 1, together: bool = False) -> Window:
        self.warm = self.run(warm_up, together=together)
        return self.run(count, together=together)

    def run(self, count: int, *, together: bool = False) -> Window:
        used, began, sent = processor_seconds(), time.perf_counter(), _loopback_bytes()
        answers = self.tell("window", first=self.done, count=count, together=together)
        used, wall = processor_seconds() - used, time.perf_counter() - began
        self.done += count
        processor = [sum(times) for times in zip(*(answer["processor"] for answer in answers), strict=True)]
        return Window(
            first=self.done - count,
            walls=[max(times) for times in zip(*(answer["walls"] for answer in answers), strict=True)],
            processor=processor,
            results=[list(values) for values in zip(*(answer["results"] for answer in answers), strict=True)],
            others=others_share(used, sum(answer["used"] for answer in answers), wall),
            loopback=_loopback_bytes() - sent,
        )

    def memory(self) -> int:
        """The proportional set size of all ranks, in bytes."""
        return sum(_pss(rank.pid) for rank in self.ranks)

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.wait()
            for pipe in (rank.stdin, rank.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()


def end_all(fleets: Sequence[Fleet]) -> None:
    for fleet in fleets:
        fleet.end()


def _free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _pss(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _loopback_bytes() -> int:
    with open("/proc/net/dev", encoding="ascii") as file:
        for line in file:
            name, _, numbers = line.partition(":")
            if name.strip() == "lo":
                return int(numbers.split()[8])
    return 0
