"""Competitors take turns, A B C A B C, each doing a window of repetitions at a time."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.fleet import Competitor, Fleet, FleetError, Window, end_all

__all__ = ["Case", "Outcome", "alternate", "gate", "to_end"]

_USED = 0.85  # of the memory that is available may be taken


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

    Ranks stay alive between their windows as far as memory allows; the rest start anew each time. How much is
    available is looked at before every turn: ranks grow, and other programs come.
    """
    outcomes = {c.name: Outcome(c.name, c.gated) for c in case.competitors}
    alive: dict[str, Fleet] = {}
    left_out: dict[str, str] = {}
    began = time.monotonic()
    try:
        for _ in range(repeats):
            if time.monotonic() - began > 60 * minutes:
                break
            for competitor in case.competitors:
                outcome = outcomes[competitor.name]
                if outcome.problem:
                    continue
                missing = _make_room(case, competitor, alive)
                if missing:  # for now: the next turn may find room
                    left_out[competitor.name] = missing
                    print(missing, file=sys.stderr)
                    continue
                try:
                    _one_turn(case, competitor, outcome, alive, folder, extensions)
                except FleetError as error:
                    outcome.problem = str(error)
                    alive.pop(competitor.name, None)
                    print(error, file=sys.stderr)
                if not competitor.stays and competitor.name in alive:
                    alive.pop(competitor.name).end()
    finally:
        end_all(list(alive.values()))
    for name, missing in left_out.items():
        if not outcomes[name].windows and not outcomes[name].problem:
            outcomes[name].problem = missing
    gate(case, list(outcomes.values()))
    return list(outcomes.values())


def _one_turn(
    case: Case,
    competitor: Competitor,
    outcome: Outcome,
    alive: dict[str, Fleet],
    folder: Path,
    extensions: Path,
) -> None:
    fleet = alive.get(competitor.name)
    if fleet is None:
        fleet = alive[competitor.name] = Fleet(competitor, case.world, folder, extensions)
        outcome.open_s = fleet.open(case.job)
    # the first window of new ranks also warms up what an optimizer or an allocator makes once
    window = fleet.window(case.steps, warm_up=case.warm_up + (fleet.done == 0), together=case.together)
    for done in (fleet.warm, window):
        _keep_losses(outcome, done)
    outcome.windows.append(window)
    outcome.facts = fleet.tell("facts")
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


def _make_room(case: Case, competitor: Competitor, alive: dict[str, Fleet]) -> str:
    """End ranks that stayed alive until those of `competitor` fit; what is missing if they do not."""
    if competitor.name in alive:
        return ""
    held = {name: fleet.memory() for name, fleet in alive.items()}
    wanted, available = int(case.nbytes * competitor.size), psutil.virtual_memory().available
    ending = to_end(held, wanted, available)
    end_all([alive.pop(name) for name in ending])
    available += sum(held[name] for name in ending)
    if wanted <= available:
        return ""
    return f"{competitor.name}: not run, it takes about {wanted / 1e9:.1f} GB and {available / 1e9:.1f} are available"


def to_end(held: Mapping[str, int], wanted: int, available: int) -> list[str]:
    """Which of those that hold so many bytes must end before another one takes `wanted`: the largest first."""
    ending: list[str] = []
    for name in sorted(held, key=lambda name: -held[name]):
        if wanted <= available * _USED:
            break
        ending.append(name)
        available += held[name]
    return ending
