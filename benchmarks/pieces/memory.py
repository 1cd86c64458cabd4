"""B4: what a training run holds, in runs of its own (looking at the memory slows steps down).

The proportional set size (shared memory counted in equal parts) of all ranks together, over what they held before
any model was made. *Peak* is the most seen while steps ran; *steady*, what is held between two steps. The floor is 16
bytes a parameter (fp32: parameter, gradient, two moments; bf16: the same with an fp32 master, its gradient kept in 16
bits) over all ranks, and the activations of each rank: the most that forward and backward of an unsharded model
hold at a time, parameters aside, where each gradient is dropped as soon as it is there.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.competitors.base import Job
from benchmarks.fleet import Competitor, Fleet, FleetError
from benchmarks.models import SHAPES
from benchmarks.pieces import training

__all__ = ["COMPETITORS", "Held", "activations", "cases", "measure", "table"]

_EVERY = 0.02  # seconds between two looks

# Also with gradients summed in 16 bits, as the floor has them.
_NARROW = tuple(
    replace(one, name=f"{one.name} (sums in bf16)", options={**one.options, "reduce_dtype": "bf16"})
    for one in training.COMPETITORS
    if one.name.startswith("zeropage")
)
COMPETITORS = (*_NARROW, *training.COMPETITORS)


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
    """Bytes that forward and backward of the unsharded model hold at their highest, parameters and sums aside."""
    one = replace(Job.of(job, 0, 1), accumulate=1)
    model = one.build()
    if one.precision == "bf16":
        model.bfloat16()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_drop)
    with _Live({parameter.untyped_storage().data_ptr() for parameter in model.parameters()}) as live:
        model(one.batches(0)[0]).backward()
    return live.most


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


class _Live(TorchDispatchMode):
    """Counts the bytes behind what operators return, for as long as anybody holds it. `known` are not counted."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.most = 0
        self._known, self._now = known, 0
        self._seen: WeakSet[torch.UntypedStorage] = WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        self.most = max(self.most, self._now)
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen or storage.data_ptr() in self._known:
            return
        self._seen.add(storage)
        self._now += storage.nbytes()
        weakref.finalize(storage, self._gone, storage.nbytes())

    def _gone(self, nbytes: int) -> None:
        self._now -= nbytes


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
