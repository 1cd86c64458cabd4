"""`Trainer(strategy="zeropage")` gives what Lightning gives by itself: to the bit where it adds in the same order.

Two ranks are compared with two ranks of DDP, whose sums of two gradients are the same sums; and with one process on
batches of twice the size, to rounding. One rank is compared with Lightning without any strategy, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.harness import run
from tests.integrations.lightning_cases import QUIET, Classifier, Distillation, Gan, Outcome, same_outcome, train

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]

TRAININGS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "automatic": (Classifier, {}),
    "accumulated": (Classifier, {"accumulate_grad_batches": 2}),
    "clipped by norm": (Classifier, {"gradient_clip_val": 0.1}),
    "clipped by value": (Classifier, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "bf16-mixed": (Classifier, {"precision": "bf16-mixed"}),
    "bf16-true": (Classifier, {"precision": "bf16-true"}),
    "16-true": (Classifier, {"precision": "16-true"}),
    "64-true": (Classifier, {"precision": "64-true"}),
    "manual, two optimizers": (Gan, {}),
    "teacher and student": (Distillation, {}),
}


def _both(build: Callable[[], Any], options: dict[str, Any]) -> tuple[Outcome, Outcome]:
    return train(build, "ddp_find_unused_parameters_true", 2, options), train(build, "zeropage", 2, options)


@pytest.mark.parametrize("what", TRAININGS)
def test_two_ranks_train_as_those_of_ddp(what: str) -> None:
    build, options = TRAININGS[what]
    # DDP adds micro-batches up before ranks; norms are summed in another order
    tolerance = 1e-6 if what in ("accumulated", "clipped by norm") else 0.0
    for expected, got in run(2, _both, build, options):
        same_outcome(expected, got, tolerance)


@pytest.mark.parametrize("what", ["automatic", "accumulated", "clipped by norm", "64-true"])
def test_two_ranks_train_as_one_process_on_the_whole_batch(what: str) -> None:
    build, options = TRAININGS[what]
    expected = train(build, "auto", 1, options)
    both = run(2, train, build, "zeropage", 2, options)
    losses = [sum(pair) / 2 for pair in zip(*(outcome.losses for outcome in both), strict=True)]
    same_outcome(expected, Outcome(losses, both[0].state), 1e-5)
    assert len(losses) == 4


@pytest.mark.parametrize("what", TRAININGS)
def test_one_rank_trains_as_lightning_alone(what: str) -> None:
    build, options = TRAININGS[what]
    expected = train(build, "auto", 1, options)
    (got,) = run(1, train, build, "zeropage", 1, options)
    same_outcome(expected, got, 1e-6 if what == "clipped by norm" else 0.0)
