"""Tables and a picture of what was measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.alternate import Case, Outcome
from benchmarks.measure import ratio, summary

__all__ = ["draw", "machine", "markdown"]

_PACKAGES = ("torch", "deepspeed", "transformers", "zeropage")


def machine() -> dict[str, Any]:
    """Where and with what the numbers were made."""
    model = "unknown processor"
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "memory": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "python": platform.python_version(),
    } | {name: _version(name) for name in _PACKAGES}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def markdown(case: Case, outcomes: Sequence[Outcome]) -> str:
    """A table of medians (quartiles), and the ratio of every competitor to the first one's time."""
    first = outcomes[0]
    lines = [
        f"### {case.name}",
        "",
        f"| | {case.unit}, median (quartiles) | over {first.name}'s | processor, all ranks "
        f"| over {first.name}'s | loopback |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for outcome in outcomes:
        if outcome.problem or not outcome.windows:
            lines.append(f"| {outcome.name} | {outcome.problem.splitlines()[-1] if outcome.problem else ''} | | | | |")
            continue
        wall = summary([seconds / case.per_unit for seconds in outcome.seconds()])
        used = summary([seconds / case.per_unit for seconds in outcome.processor()])
        moved = min(window.loopback / len(window.walls) for window in outcome.windows)
        lines.append(
            f"| {outcome.name} | {wall.median:.4g} ({wall.low:.4g} - {wall.high:.4g}) | "
            f"{_compared(outcome, first, Outcome.seconds)} | {used.median:.4g} | "
            f"{_compared(outcome, first, Outcome.processor)} | {moved / 1e6:,.0f} MB |"
        )
    others = [window.others for outcome in outcomes for window in outcome.windows]
    if others:
        repeats = max(len(outcome.windows) for outcome in outcomes)
        lines += [
            "",
            f"{repeats} repeats; other programs took {statistics.median(others):.0%} of the machine (median).",
        ]
    return "\n".join(lines) + "\n"


def _compared(outcome: Outcome, first: Outcome, of: Callable[[Outcome], list[float]]) -> str:
    """How many times what the first one took, unless that cannot be told from noise."""
    if outcome is first or first.problem or not first.windows:
        return ""
    found, told = ratio(of(outcome), of(first))
    return f"{found.median:.2f} ({found.low:.2f} - {found.high:.2f})" if told else "not told apart"


def draw(results: Sequence[tuple[Case, Sequence[Outcome]]], path: Path) -> None:
    """A bar for every competitor and case, with its quartiles."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = [(case, [o for o in outcomes if o.windows and not o.problem]) for case, outcomes in results]
    drawn = [(case, outcomes) for case, outcomes in drawn if outcomes]
    if not drawn:
        return
    columns = min(4, len(drawn))
    rows = -(-len(drawn) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(3.6 * columns, 2.9 * rows), squeeze=False)
    names = list(dict.fromkeys(o.name for _, outcomes in drawn for o in outcomes))
    palette = matplotlib.colormaps["tab20"]
    for axis, (case, outcomes) in zip(axes.flat, drawn, strict=False):
        walls = [summary([seconds / case.per_unit for seconds in o.seconds()]) for o in outcomes]
        errors = [[w.median - w.low for w in walls], [w.high - w.median for w in walls]]
        colors = [palette(names.index(o.name) % palette.N) for o in outcomes]
        axis.bar([o.name for o in outcomes], [w.median for w in walls], yerr=errors, color=colors, capsize=3)
        axis.set_title(case.name, fontsize=10)
        axis.set_ylabel(case.unit)
        axis.tick_params(axis="x", labelrotation=40, labelsize=8)
        for label in axis.get_xticklabels():
            label.set_horizontalalignment("right")
    for axis in list(axes.flat)[len(drawn) :]:
        axis.set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
