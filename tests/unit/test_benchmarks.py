"""The benchmarks tell no ratio that noise could have made, and count no speed whose losses are not the others'."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import PIECES
from benchmarks.alternate import Case, Outcome, gate, to_end
from benchmarks.fleet import Window
from benchmarks.measure import ratio, summary
from benchmarks.models import SHAPES
from benchmarks.pieces import memory
from benchmarks.report import markdown


def _outcome(name: str, walls: list[float], losses: dict[int, list[float]] | None = None) -> Outcome:
    windows = [Window(first=0, walls=[w], processor=[w], results=[[None]], others=0.0, loopback=0) for w in walls]
    return Outcome(name, gated=True, windows=windows, losses=losses or {})


def test_quartiles() -> None:
    found = summary([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (found.low, found.median, found.high, found.count) == (2.0, 3.0, 4.0, 5)


def test_a_ratio_is_taken_repeat_by_repeat() -> None:
    """A slow minute that met both sides does not count."""
    found, told = ratio([2.0, 20.0, 4.0], [1.0, 10.0, 2.0])
    assert told and found.median == 2.0 and found.spread == 0.0


@pytest.mark.parametrize("theirs", [[1.0, 1.1, 0.9, 1.0, 1.05], [0.5, 2.0, 1.5, 0.7, 1.3]])
def test_a_ratio_that_noise_could_have_made_is_not_told(theirs: list[float]) -> None:
    _, told = ratio(theirs, [1.0] * 5)
    assert not told
    case = Case("case", [], {})
    text = markdown(case, [_outcome("ours", [1.0] * 5), _outcome("theirs", theirs)])
    assert "not told apart" in text


def test_one_repeat_tells_nothing() -> None:
    assert not ratio([3.0], [1.0])[1]


def test_a_speed_whose_losses_differ_is_not_counted() -> None:
    good = {3: [2.0, 2.5]}
    outcomes = [_outcome("a", [1.0], good), _outcome("b", [1.0], good), _outcome("c", [0.1], {3: [2.0, 2.6]})]
    gate(Case("case", [], {}, tolerance=1e-5), outcomes)
    assert [outcome.problem[:11] for outcome in outcomes] == ["", "", "not counted"]
    assert "0.1" not in markdown(Case("case", [], {}), outcomes).splitlines()[-3]


def test_competitors_without_a_step_in_common_are_not_counted() -> None:
    outcomes = [_outcome("a", [1.0], {1: [2.0, 2.0]}), _outcome("b", [1.0], {2: [2.0, 2.0]})]
    gate(Case("case", [], {}, tolerance=1e-5), outcomes)
    assert all("no step's loss" in outcome.problem for outcome in outcomes)


def test_of_two_that_differ_neither_counts() -> None:
    outcomes = [_outcome("a", [1.0], {3: [2.0]}), _outcome("b", [1.0], {3: [2.1]})]
    gate(Case("case", [], {}, world=1, tolerance=1e-5), outcomes)
    assert all("not counted" in outcome.problem for outcome in outcomes)


def test_the_largest_end_until_another_one_fits() -> None:
    held = {"a": 1 << 30, "b": 6 << 30, "c": 3 << 30}
    assert to_end(held, wanted=4 << 30, available=5 << 30) == []
    assert to_end(held, wanted=4 << 30, available=4 << 30) == ["b"]  # not all that is free
    assert to_end(held, wanted=10 << 30, available=4 << 30) == ["b", "c"]
    assert to_end(held, wanted=90 << 30, available=4 << 30) == ["b", "c", "a"]


def test_every_competitor_can_be_named_on_the_command_line() -> None:
    names = {c.name for piece in PIECES.values() for case in piece(Path("x")) for c in case.competitors}
    names |= {c.name for c in memory.COMPETITORS}
    assert names and not [name for name in names if "," in name]


def test_the_floor_has_what_an_unsharded_model_holds_at_once() -> None:
    job = {"model": "test", "tokens": 64, "precision": "fp32"}
    kept, recomputed = (memory.activations({**job, "checkpointing": flag}) for flag in (False, True))
    logits = 64 * SHAPES["test"].vocabulary * 4
    assert 2 * logits <= recomputed < kept < 16 * logits
