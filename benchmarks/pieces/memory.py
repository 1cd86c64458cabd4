"""B4: what a training run holds, in runs of its own (looking at the memory slows steps down).

The proportional set size (shared memory counted in equal parts) of all ranks together, over what they held before
any model was made. *Peak* is the most seen while steps ran; *steady*, what is held between two steps. The floor is 16
bytes a parameter (fp32: parameter, gradient, two moments; bf16: the same with an fp32 master, its gradient kept in 16
bits) over all ranks, and the activations of each rank, measured on an unsharded model by what autograd saves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.competitors.base import Job
from benchmarks.fleet import Competitor, Fleet, FleetError
from benchmarks.models import SHAPES
from benchmarks.pieces.training import COMPETITORS

__all__ = ["Held", "activations", "cases", "measure", "table"]

_EVERY = 0.02  # seconds between two looks


@dataclass
class Held:
    """Bytes of one competitor, all ranks together, over the libraries."""

    name: str
    libraries: int = 0
    built: int = 0
    steady: list[int] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)
    problem: str = ""


def cases() -> list[dict[str, Any]]:
    return [{"model": model, "tokens": 1024, "precision": "bf16", "checkpointing": True} for model in ("350M", "1B")]


def measure(
    job: dict[str, Any], world: int, repeats: int, folder: Path, extensions: Path, names: Sequence[str] = ()
) -> list[Held]:
    """One competitor after the other, each alone and started `repeats` times. `names`: some of them only."""
    found = []
    for competitor in (c for c in COMPETITORS if not names or c.name in names):
        held = Held(competitor.name)
        for _ in range(repeats):
            try:
                _look(held, competitor, job, world, folder, extensions)
            except FleetError as error:
                held.problem = str(error)
                break
        found.append(held)
    return found


def _look(held: Held, competitor: Competitor, job: dict[str, Any], world: int, folder: Path, extensions: Path) -> None:
    fleet = Fleet(competitor, world, folder, extensions)
    try:
        held.libraries = fleet.memory()
        fleet.open(job)
        held.built = fleet.memory() - held.libraries
        fleet.run(2)
        watcher = _Watcher(fleet)
        fleet.run(2)
        held.peak.append(watcher.stop() - held.libraries)
        held.steady.append(fleet.memory() - held.libraries)
    finally:
        fleet.end()


class _Watcher:
    """The largest value seen by a thread that looks again and again."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._most, self._done = fleet, 0, False
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done:
            self._most = max(self._most, self._fleet.memory())
            time.sleep(_EVERY)

    def stop(self) -> int:
        self._done = True
        self._thread.join()
        return self._most


def activations(job: dict[str, Any]) -> int:
    """Bytes that autograd saves in one forward of the unsharded model, parameters aside."""
    one = replace(Job.of(job, 0, 1), accumulate=1)
    model = one.build()
    if one.precision == "bf16":
        model.bfloat16()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(one.batches(0)[0])
    del loss
    return sum(seen.values())


def table(job: dict[str, Any], world: int, held: Sequence[Held], saved: int) -> str:
    floor = 16 * SHAPES[job["model"]].numel + world * saved
    lines = [
        f"### B4 {job['model']} {job['precision']}, {job['tokens']} tokens",
        "",
        f"Floor: {floor / 1e9:.2f} GB, of which activations {world * saved / 1e9:.2f}. GB of {world} ranks together, "
        "over the libraries.",
        "",
        "| | libraries | built | steady | peak | peak / floor |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for one in held:
        if one.problem:
            lines.append(f"| {one.name} | {one.problem.splitlines()[-1]} | | | | |")
            continue
        peak, steady = max(one.peak), max(one.steady)
        numbers = " | ".join(f"{n / 1e9:.2f}" for n in (one.libraries, one.built, steady, peak))
        lines.append(f"| {one.name} | {numbers} | {peak / floor:.2f} |")
    return "\n".join(lines) + "\n"
