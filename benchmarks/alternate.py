"""Competitors take turns, A B C A B C, each doing a window of repetitions at a time."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.fleet import Competitor, Fleet, FleetError, Window, end_all

__all__ = ["Case", "Outcome", "alternate", "gate"]


@dataclass(frozen=True)
class Case:
    """One row of measurements: the same job for several competitors."""

    name: str
    competitors: Sequence[Competitor]
    job: dict[str, Any]
    world: int = 2
    steps: int = 3  # of a window
    warm_up: int = 1  # repetitions before each window, which are not counted
    together: bool = False
    tolerance: float | None = None  # how far losses may be apart, relative; None: there is no loss
    nbytes: int = 0  # about what a sharded competitor holds, all ranks together
    per_unit: float = 1.0  # walls are divided by this
    unit: str = "s"


@dataclass
class Outcome:
    """All that was seen of one competitor in one case."""

    name: str
    gated: bool
    windows: list[Window] = field(default_factory=list)
    losses: dict[int, list[float]] = field(default_factory=dict)  # by step, by rank
    facts: list[dict[str, Any]] = field(default_factory=list)
    open_s: float = 0.0
    problem: str = ""

    def seconds(self) -> list[float]:
        """Of one repetition, for each window: the window's median."""
        return [sorted(window.walls)[len(window.walls) // 2] for window in self.windows]

    def processor(self) -> list[float]:
        """Processor seconds of one repetition, all ranks together, for each window."""
        return [sum(window.processor) / len(window.processor) for window in self.windows]

    def raw(self) -> dict[str, Any]:
        return asdict(self)


def alternate(case: Case, repeats: int, folder: Path, extensions: Path, minutes: float = float("inf")) -> list[Outcome]:
    """Run the case; begin no new round after so many minutes.

    Ranks stay alive between their windows as far as memory allows; the rest start anew each time.
    """
    outcomes = {c.name: Outcome(c.name, c.gated) for c in case.competitors}
    alive: dict[str, Fleet] = {}
    staying, began = _those_that_fit(case), time.monotonic()
    try:
        for _ in range(repeats):
            if time.monotonic() - began > 60 * minutes:
                break
            for competitor in case.competitors:
                outcome = outcomes[competitor.name]
                if outcome.problem:
                    continue
                try:
                    _one_turn(case, competitor, outcome, alive, folder, extensions, stays=competitor.name in staying)
                except FleetError as error:
                    outcome.problem = str(error)
                    alive.pop(competitor.name, None)
                    print(error, file=sys.stderr)
    finally:
        end_all(list(alive.values()))
    gate(case, list(outcomes.values()))
    return list(outcomes.values())


def _one_turn(
    case: Case,
    competitor: Competitor,
    outcome: Outcome,
    alive: dict[str, Fleet],
    folder: Path,
    extensions: Path,
    *,
    stays: bool,
) -> None:
    fleet = alive.pop(competitor.name, None)
    if fleet is None:
        fleet = Fleet(competitor, case.world, folder, extensions)
        outcome.open_s = fleet.open(case.job)
    if stays:
        alive[competitor.name] = fleet
    try:
        # the first window of new ranks also warms up what an optimizer or an allocator makes once
        window = fleet.window(case.steps, warm_up=case.warm_up + (fleet.done == 0), together=case.together)
        for done in (fleet.warm, window):
            _keep_losses(outcome, done)
        outcome.windows.append(window)
        outcome.facts = fleet.tell("facts")
    finally:
        if not stays:
            fleet.end()
    others = f"{window.others:4.0%} of the machine to others"
    print(
        f"{time.strftime('%H:%M:%S')}  {case.name:28} {competitor.name:22} {outcome.seconds()[-1]:9.4f} s  "
        f"processor {outcome.processor()[-1]:9.4f} s  {others}",
        file=sys.stderr, flush=True,
    )  # fmt: skip


def _keep_losses(outcome: Outcome, window: Window) -> None:
    for step, values in enumerate(window.results, window.first):
        if all(value is not None for value in values):
            outcome.losses[step] = [float(value) for value in values if value is not None]


def gate(case: Case, outcomes: list[Outcome]) -> None:
    """A competitor whose losses are not those of the others has computed something else: its speed does not count.

    Sets `problem`. What is right is what most agree on; of two that differ, neither counts.
    """
    if case.tolerance is None:
        return
    judged = [outcome for outcome in outcomes if outcome.gated and not outcome.problem]
    steps = sorted(set.intersection(*(set(outcome.losses) for outcome in judged))) if judged else []
    if not steps and len(judged) > 1:
        for outcome in judged:
            outcome.problem = "not counted: no step's loss was seen of all competitors"
    for step in steps:
        for rank in range(case.world):
            values = sorted(outcome.losses[step][rank] for outcome in judged)
            middle = values[len(values) // 2]
            for outcome in judged:
                wrong = values if len(values) == 2 else [outcome.losses[step][rank]]
                off = max(abs(value - middle) for value in wrong) / abs(middle)
                if not off <= case.tolerance and not outcome.problem:
                    outcome.problem = (
                        f"not counted: its loss of step {step} on rank {rank} is {outcome.losses[step][rank]!r}, that "
                        f"of most is {middle!r} (further apart than {case.tolerance:g})"
                    )


def _those_that_fit(case: Case) -> set[str]:
    """Names of the competitors that may stay alive together, the smallest first."""
    room = psutil.virtual_memory().available * 0.85
    sizes = {c.name: case.nbytes * c.size for c in case.competitors}
    if sum(sizes.values()) <= room:
        return set(sizes)
    staying: set[str] = set()
    left = room - max(sizes.values())  # for the one that comes and goes
    for name in sorted(sizes, key=lambda name: sizes[name]):
        if sizes[name] <= left:
            staying.add(name)
            left -= sizes[name]
    return staying
