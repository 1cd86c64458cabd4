"""Two models and two engines in one loop with two Accelerators; and ranks with different numbers of batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate")

from tests.integrations.launching import launch, started

pytestmark = pytest.mark.slow


def _build(seed: int, wide: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, wide), nn.Tanh(), nn.Linear(wide, 5))


def _plain() -> tuple[list[list[list[float]]], dict[str, nn.Module]]:
    """The losses by rank, and both models, trained on the batches of two ranks at once."""
    maker, judge = _build(0, 17), _build(1, 9)
    makes = torch.optim.SGD(maker.parameters(), lr=0.1)
    judges = torch.optim.SGD(judge.parameters(), lr=0.1)
    batches = torch.randn(24, 5, generator=torch.Generator().manual_seed(1)).split(3)
    told: list[list[list[float]]] = [[], []]
    for turn in range(4):
        pair = batches[2 * turn : 2 * turn + 2]
        verdicts = [judge(maker(batch).detach()).square().mean() for batch in pair]
        (sum(verdicts) / 2).backward()
        nn.utils.clip_grad_norm_(judge.parameters(), 0.1)
        judges.step()
        judges.zero_grad()
        losses = [judge(maker(x)).square().mean() + (maker(x) - x).square().mean() for x in pair]
        (sum(losses) / 2).backward()
        makes.step()
        makes.zero_grad()
        # The judge's own gradients of the maker's loss are not its engine's to drop; they count in its next step.
        for rank in range(2):
            told[rank].append([verdicts[rank].item(), losses[rank].item()])
    return told, {"maker": maker, "judge": judge}


def test_each_engine_steps_its_own_model(tmp_path: Path) -> None:
    told = launch("two_engines.py", tmp_path, "even").told
    losses, models = _plain()
    for rank, seen in enumerate(told):
        for got, wanted in zip(seen["losses"], losses[rank], strict=True):
            assert got == pytest.approx(wanted, rel=1e-5)
        assert len(seen["evaluated"]) == (3 if rank == 0 else 1)
    states: dict[str, dict[str, Any]] = torch.load(tmp_path / "states.pt")
    for name, model in models.items():
        for key, value in model.state_dict().items():
            assert torch.allclose(states[name][key], value, atol=1e-6), f"{name}.{key}"


@pytest.mark.slow
def test_uneven_batches_are_an_error_on_all_ranks(tmp_path: Path) -> None:
    done = started("two_engines.py", tmp_path, "uneven", timeout=120)
    assert done.returncode != 0
    for rank in range(2):
        lines = [line for line in done.stderr.splitlines() if f"[rank{rank}]" in line and "DivergenceError:" in line]
        assert len(lines) == 1 and "step 7" in lines[0], done.stderr
