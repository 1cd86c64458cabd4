"""What `distill.py` shows in the end: do the losses go on after resuming, and what did each rank need?

The phases leave one JSON record per rank; `show` reads them all, prints two tables and draws one picture.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

# [Note: how close the resumed losses have to be] Both second halves start from the same bits, see the same
# batches and use the same number of threads. What is left is the order in which gradients and their norm are
# summed, over ranks and micro-batches there, over micro-batches alone here: the rounding of fp32, which made
# the losses differ by 3e-7 after twenty steps. A resume that forgets Adam's moments, all else right, was off
# by 1e-2. The bound lies between, with a factor of a hundred on that side.
CLOSE = 1e-4

COLORS = {
    "parameters": "#4C72B0",
    "gradients": "#DD8452",
    "optimizer": "#55A868",
    "frames": "#C44E52",
    "activations and the like": "#B8B8B8",
    "Python and libraries": "#E4E4E4",
}


@dataclass(frozen=True)
class Bytes:
    """What one process holds of the models, in bytes. Frames are gathered copies of sharded parameters."""

    parameters: int
    gradients: int
    optimizer: int
    frames: int

    @property
    def total(self) -> int:
        """The sum of the parts."""
        return sum(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True)
class Record:
    """One rank's account of a phase. `losses[i]` is of step `first_step + i`, over its own micro-batches."""

    phase: str
    rank: int
    world: int
    first_step: int
    losses: list[float]
    step_seconds: float
    nbytes: Bytes
    base_pss: int
    peak_pss: int

    def write(self, out: Path) -> None:
        """Leave the record in `out` for the report."""
        folder = out / "records"
        folder.mkdir(exist_ok=True)
        (folder / f"{self.phase}-{self.rank}.json").write_text(json.dumps(asdict(self), indent=2))

    @classmethod
    def read(cls, file: Path) -> Record:
        """Read what `write` left."""
        values = json.loads(file.read_text())
        return cls(**{**values, "nbytes": Bytes(**values["nbytes"])})


@dataclass(frozen=True)
class Results:
    """All the records of one demo."""

    train: list[Record]
    resume: Record
    plain: Record

    @classmethod
    def read(cls, out: Path) -> Results:
        """Collect the records of all phases."""
        folder = out / "records"
        train = [Record.read(folder / f"train-{rank}.json") for rank in range(len(list(folder.glob("train-*"))))]
        return cls(train, Record.read(folder / "resume-0.json"), Record.read(folder / "plain-0.json"))

    @property
    def train_losses(self) -> list[float]:
        """The loss of each global batch of the first run: the mean over its ranks' equal shares."""
        return [fmean(shares) for shares in zip(*(record.losses for record in self.train), strict=True)]

    @property
    def deviations(self) -> list[float]:
        """Relative difference of the resumed run's losses from those of the first run's second half."""
        expected = self.train_losses[self.resume.first_step :]
        return [abs(b - a) / abs(a) for a, b in zip(expected, self.resume.losses, strict=True)]


def console() -> Console:
    """The terminal; where there is none, a page wide enough for the tables."""
    plain = Console()
    return plain if plain.is_terminal else Console(width=100)


def show(console: Console, out: Path, seconds: float) -> None:
    """Print both tables, draw the picture, and stop with an error if the resumed run went elsewhere."""
    results = Results.read(out)
    console.print(losses_table(results))
    console.print(memory_table(results))
    picture = draw(results, out / "loss_and_memory.png")
    console.print(f"the picture is {picture}; all of it took {seconds:.0f} s")

    worst = max(results.deviations)
    verdict = f"largest relative difference after resuming: {worst:.1e} (bound {CLOSE:.0e})"
    if worst > CLOSE:
        raise SystemExit(f"The resumed run does not go on where the first one stood; {verdict}")
    console.print(f"[green]the losses go on where they stood[/green]; {verdict}")


def losses_table(results: Results) -> Table:
    """Both second halves side by side."""
    first = results.resume.first_step
    table = Table(title="Loss after the checkpoint", title_justify="left", box=SIMPLE)
    table.add_column("step", justify="right")
    table.add_column(f"{len(results.train)} ranks, uninterrupted", justify="right")
    table.add_column("1 rank, resumed", justify="right")
    table.add_column("relative difference", justify="right")
    pairs = zip(results.train_losses[first:], results.resume.losses, results.deviations, strict=True)
    for step, (a, b, deviation) in enumerate(pairs, start=first):
        table.add_row(str(step), f"{a:.6f}", f"{b:.6f}", f"{deviation:.1e}")
    return table


def memory_table(results: Results) -> Table:
    """What each process held, and what one without zeropage holds."""
    table = Table(title="Memory of each process, MB", title_justify="left", caption_justify="left", box=SIMPLE)
    table.add_column("process", no_wrap=True)
    for column in ("params", "grads", "optim", "frames", "sum", "libs", "peak PSS", "s/step"):
        table.add_column(column, justify="right", no_wrap=True)
    for record in (*results.train, results.resume, results.plain):
        counted = (*asdict(record.nbytes).values(), record.nbytes.total)
        measured = (record.base_pss, record.peak_pss)
        megabytes = (f"{nbytes / 1e6:.0f}" for nbytes in (*counted, *measured))
        table.add_row(label(record), *megabytes, f"{record.step_seconds:.2f}")
    table.caption = (
        "Params to frames: what zeropage's engine counts, in the last row computed (2 bytes for a parameter of "
        "the teacher; 4, 4 and 8 for one of the student). Libs is the PSS before any model was made; PSS is measured."
    )
    return table


def draw(results: Results, file: Path) -> Path:
    """Losses on the left, memory on the right."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5.2), width_ratios=(3, 2))
    draw_losses(left, results)
    draw_memory(right, results)
    figure.suptitle("SmolLM2-135M distilled into a 19 M Llama with zeropage", fontsize=14)
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
    return file


def draw_losses(axes: Axes, results: Results) -> None:
    """One line for the uninterrupted run, dots for the resumed one on top of it."""
    first, losses = results.resume.first_step, results.train_losses
    steps = range(first, first + len(results.resume.losses))
    axes.plot(losses, color="#4C72B0", linewidth=2, label=f"{len(results.train)} ranks, uninterrupted")
    axes.plot(steps, results.resume.losses, "o", color="#DD8452", markersize=5, label="resumed on 1 rank")
    axes.axvline(first, color="#777777", linestyle="--", linewidth=1)
    axes.annotate(
        "checkpoint saved\nand loaded here",
        xy=(first, axes.get_ylim()[1]),
        xytext=(8, -8),
        textcoords="offset points",
        verticalalignment="top",
        color="#555555",
    )
    axes.set(xlabel="optimizer step", ylabel="loss: mean of KL and cross-entropy, nats/token")
    axes.set_title(f"the losses go on (largest relative difference {max(results.deviations):.0e})", fontsize=11)
    axes.grid(alpha=0.25)
    axes.legend(loc="lower left", frameon=False)


def draw_memory(axes: Axes, results: Results) -> None:
    """A stacked bar for each rank of the first run, and one for a rank without zeropage."""
    bars = [*results.train, results.plain]
    names = [label(record) for record in bars]
    floor = [0.0] * len(bars)
    for layer, color in COLORS.items():
        heights = [layers(record)[layer] for record in bars]
        axes.bar(names, heights, 0.6, bottom=floor, color=color, label=layer)
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    for x, record in enumerate(bars):
        held, peak = record.nbytes.total / 1e6, record.peak_pss / 1e6
        axes.text(x, held - 20, f"{held:.0f} MB", ha="center", va="top", color="white", fontweight="bold")
        axes.text(x, peak, f"{peak:.0f} MB", ha="center", va="bottom")
    axes.set_ylim(top=1.28 * max(record.peak_pss for record in bars) / 1e6)
    axes.set(ylabel="MB of a process (bar: peak PSS)")
    axes.set_title("what each process needs", fontsize=11)
    axes.legend(loc="upper left", fontsize=8, ncols=2, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def layers(record: Record) -> dict[str, float]:
    """What the peak of a process is made of, in MB; its tensors are counted, the gray parts are measured."""
    counted = {part: nbytes / 1e6 for part, nbytes in asdict(record.nbytes).items()}
    libraries = record.base_pss / 1e6
    rest = max(0.0, record.peak_pss / 1e6 - libraries - sum(counted.values()))
    return {**counted, "activations and the like": rest, "Python and libraries": libraries}


def label(record: Record) -> str:
    """A record's name in tables and under bars."""
    names = {
        "train": f"rank {record.rank} of {record.world}",
        "resume": "1 rank, resumed",
        "plain": "without zeropage",
    }
    return names[record.phase]
