"""Watches one phase of `distill.py`: the bar on the terminal, the speed, and the peak of memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from distill_models import LENGTH, SEQUENCES
from distill_report import Bytes, Record, console


@dataclass(frozen=True)
class Task:
    """What the user asked for, and who this process is in it."""

    out: Path
    steps: int
    num_micro_batches: int  # of a step, over all ranks; the same however many ranks share them
    transport: str
    rank: int
    world: int

    @property
    def half(self) -> int:
        """The number of steps before the checkpoint."""
        return self.steps // 2


class Meter:
    """Watches one run: the peak of its proportional memory, its speed and, on rank 0, a progress bar.

    The proportional set size (PSS) counts a page that several processes map in equal parts for each of them,
    so the sum over ranks is what the machine spends. What it is before any model is made, is what Python and the
    libraries take.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._process = psutil.Process()
        self._peak_pss = self._base_pss = self._process.memory_full_info().pss
        self._seconds: list[float] = []

    def sample(self) -> None:
        """Look at the memory now."""
        self._peak_pss = max(self._peak_pss, self._process.memory_full_info().pss)

    @contextmanager
    def progress(self, steps: int, title: str) -> Iterator[Show]:
        """A bar over `steps`; gives the function that is called after each of them."""
        columns = (TextColumn("{task.description:>9}"), BarColumn(12), MofNCompleteColumn())
        columns += (TextColumn("{task.fields[facts]}"), TimeElapsedColumn())
        with Progress(*columns, console=console(), disable=self._task.rank != 0) as bar:
            yield Show(self, bar, bar.add_task(title, total=steps, facts=""), self._task.num_micro_batches)

    def step_took(self, seconds: float) -> None:
        """Note the time of a step."""
        self._seconds.append(seconds)
        self.sample()

    def record(self, phase: str, first: int, losses: list[float], nbytes: Bytes) -> Record:
        """What the other phases shall know of this run."""
        median = sorted(self._seconds)[len(self._seconds) // 2]
        return Record(
            phase=phase,
            rank=self._task.rank,
            world=self._task.world,
            first_step=first,
            losses=losses,
            step_seconds=median,
            nbytes=nbytes,
            base_pss=self._base_pss,
            peak_pss=self._peak_pss,
        )


class Show:
    """Moves the bar of a `Meter` on by one step."""

    def __init__(self, meter: Meter, bar: Progress, row: TaskID, num_micro_batches: int) -> None:
        self._meter, self._bar, self._row = meter, bar, row
        self._tokens = num_micro_batches * SEQUENCES * LENGTH
        self._since = time.perf_counter()

    def __call__(self, loss: float, grad_norm: float) -> None:
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        self._meter.step_took(seconds)
        facts = f"loss {loss:6.3f}  {self._tokens / seconds:4.0f} tokens/s  |grad| {grad_norm:5.2f}"
        self._bar.update(self._row, advance=1, facts=facts)
