"""What it costs to touch a resident parameter: the same operators on plain and on paged parameters.

    python benchmarks/touch.py [--rounds 41] [--repeats 300]

Both kinds run in turn in the same process, so that noise of the machine meets both; medians over the rounds
are shown, in microseconds of processor time a call. "gradients" times `torch.autograd.grad`: forward and
backward, nothing accumulated. "training" times `backward()`, which also gives each gradient to its owner.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import zeropage as zp

LIMITS = {
    ("linear, no bias", "gradients"): 10.0,
    ("linear", "gradients"): 10.0,
    ("linear, 3-D input", "gradients"): 18.0,
}
"""The most that a call may cost more than the plain one, in microseconds, on a machine as quick as REFERENCE."""

REFERENCE = 16.4
"""Microseconds that plain "linear, no bias" takes in the mode "gradients" where the limits were set."""


@dataclass(frozen=True)
class Case:
    """An operator on the parameters of a model, and the input that it gets."""

    name: str
    build: Callable[[], nn.Module]
    call: Callable[[nn.Module, Tensor], Tensor]
    inputs: Callable[[], Tensor]


CASES = [
    Case("linear, no bias", lambda: nn.Linear(16, 16, bias=False), lambda m, x: m(x), lambda: torch.randn(4, 16)),
    Case("linear", lambda: nn.Linear(16, 16), lambda m, x: m(x), lambda: torch.randn(4, 16)),
    Case(
        "linear, 3-D input", lambda: nn.Linear(16, 16, bias=False), lambda m, x: m(x),
        lambda: torch.randn(2, 4, 16, requires_grad=True),
    ),
    Case("embedding", lambda: nn.Embedding(32, 16), lambda m, x: m(x), lambda: torch.randint(0, 32, (8,))),
    Case("layer_norm", lambda: nn.LayerNorm(16), lambda m, x: m(x), lambda: torch.randn(4, 16)),
    Case("rms_norm", lambda: nn.RMSNorm(16), lambda m, x: m(x), lambda: torch.randn(4, 16)),
    Case("mul", lambda: nn.LayerNorm(16), lambda m, x: x * m.weight, lambda: torch.randn(4, 16)),
    Case(
        "conv1d", lambda: nn.Conv1d(4, 4, 3), lambda m, x: F.conv1d(x, m.weight, m.bias), lambda: torch.randn(2, 4, 8)
    ),
]  # fmt: skip


def forward(case: Case, model: nn.Module) -> Callable[[], object]:
    x = case.inputs()
    return lambda: case.call(model, x)


def inference(case: Case, model: nn.Module) -> Callable[[], object]:
    x = case.inputs().detach()

    def run() -> None:
        with torch.inference_mode():
            case.call(model, x)

    return run


def gradients(case: Case, model: nn.Module) -> Callable[[], object]:
    x = case.inputs()
    cotangent = torch.ones_like(case.call(model, x))
    wanted = [p for p in model.parameters()][: 1 if case.name == "mul" else None] + [x] * x.requires_grad
    return lambda: torch.autograd.grad(case.call(model, x), wanted, cotangent)


def training(case: Case, model: nn.Module) -> Callable[[], object]:
    x = case.inputs().detach()
    cotangent = torch.ones_like(case.call(model, x))
    return lambda: case.call(model, x).backward(cotangent)


MODES = (forward, gradients, training, inference)


def measure(runs: Sequence[Callable[[], object]], rounds: int, repeats: int) -> list[float]:
    """Medians over the rounds, in microseconds of processor time a call (other programs do not count)."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for side, run in zip(times, runs, strict=True):
            start = time.process_time()
            for _ in range(repeats):
                run()
            side.append((time.process_time() - start) / repeats * 1e6)
    return [statistics.median(side) for side in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    yardstick = gradients(CASES[0], CASES[0].build())
    table = Table(
        "operator", "mode", "plain", "paged", "more", "limit here", title="microseconds a call, page resident"
    )
    for column in table.columns[2:]:
        column.justify = "right"
    for case in [case for case in CASES if options.only in case.name]:
        for mode in MODES:
            plain, paged = case.build(), zp.shard(case.build())
            runs = mode(case, plain), mode(case, paged), yardstick
            ours, theirs, unit = measure(runs, options.rounds, options.repeats)
            limit = LIMITS.get((case.name, mode.__name__), math.inf) * max(1.0, unit / REFERENCE)
            shown = "" if limit == math.inf else f"{limit:.0f} {'ok' if theirs - ours <= limit else 'MISSED'}"
            table.add_row(case.name, mode.__name__, f"{ours:.1f}", f"{theirs:.1f}", f"{theirs - ours:+.1f}", shown)
        table.add_section()
    Console().print(table)
    Console().print("Limits are scaled by what a plain Linear takes here and now (see REFERENCE).")


if __name__ == "__main__":
    main()
