"""The script that checks a GPU: what it does without one, and that it sees what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"
CPU = torch.device("cpu")


@pytest.fixture
def correctness(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import gpu_correctness

    yield gpu_correctness


def _run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", str(SCRIPTS / "gpu_check.py"), *options]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = _run()
    assert done.returncode == 77
    assert done.stdout.splitlines() == ["There is no GPU that torch can use here; nothing was checked."]


@pytest.mark.slow
def test_all_of_it_on_processors(tmp_path: Path) -> None:
    done = _run("--device", "cpu", "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())["correctness"]
    assert len({(one["precision"], one["offload"], one["delay"]) for one in found}) == 3 * 2 * 2 + 2
    assert all(one["right"] for one in found)


@pytest.mark.parametrize("offload", ["none", "host"])
def test_training_is_that_of_plain_torch(correctness: ModuleType, offload: str) -> None:
    reference = correctness._plain("fp32", CPU)
    for delay in ("slow operators", correctness.BARE):
        verdict = correctness._compare(reference, "fp32", offload, delay, CPU)
        assert verdict.right, str(verdict)


def test_a_copy_that_was_not_waited_for_is_seen(correctness: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every fifth copy came too late."""
    fill, count = correctness.HostLane.fill, 0

    def late(lane: object, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> object:
        nonlocal count
        count += 1
        return fill(lane, [] if count % 5 == 0 else copies)

    monkeypatch.setattr(correctness.HostLane, "fill", late)
    verdict = correctness._compare(correctness._plain("fp32", CPU), "fp32", "host", "no delay", CPU)
    assert not verdict.right and str(verdict).startswith("WRONG  fp32, offload host")


def test_an_error_is_a_verdict(correctness: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> object:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(correctness.HostLane, "fill", broken)
    verdict = correctness._compare([1.0] * correctness.STEPS, "fp32", "host", "no delay", CPU)
    assert not verdict.right and "an illegal memory access" in str(verdict)


def test_what_does_not_fit_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import gpu_speed

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**9, 10**9))
    assert "needs" in gpu_speed._why_not("8B", "plain torch") and "GPU memory" in gpu_speed._why_not(
        "8B", "plain torch"
    )
    outcomes = [gpu_speed.Outcome("1B", "a", 2.0, 10**9, 2 * 10**9), gpu_speed.Outcome("8B", "b", problem="no room")]
    lines = gpu_speed.table(outcomes).splitlines()
    assert lines[2] == "| 1B | a | 2.00 | 1024 | 1.0 GB | 2.0 GB |"
    assert "no room" in lines[3]
