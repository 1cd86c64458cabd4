"""A checkpoint of any number of ranks loads on any other, into plain torch too, and training goes on the same way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load

import zeropage as zp
from tests.harness import run
from tests.harness.models import LM, next_token

STEPS = 3  # in each leg


def _tokens(step: int) -> Tensor:
    """The same on all ranks, so that every number of ranks has the same gradient."""
    return torch.randint(0, 17, (4, 6), generator=torch.Generator().manual_seed(step))


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups of different settings; the last parameter is in none."""
    *rest, _ = model.parameters()
    return torch.optim.AdamW(
        [{"params": rest[::2], "lr": 1e-2}, {"params": rest[1::2], "lr": 3e-3, "weight_decay": 0.1}], amsgrad=True
    )


def _build(seed: int, precision: str | None) -> tuple[nn.Module, torch.optim.Optimizer, Any, dict[str, Any]]:
    torch.manual_seed(seed)
    model = LM(tied=True)
    optimizer = _optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    config: dict[str, Any] = {} if precision is None else {"precision": precision}
    return model, optimizer, scheduler, config


def _leg(transport: str, folder: str, first: int, precision: str | None) -> tuple[list[float], dict[str, Tensor], int]:
    """Load what is there, train `STEPS` steps from `first` on, save: losses, weights, saved client state."""
    world = torch.distributed.get_world_size()
    model, optimizer, scheduler, config = _build(first, precision)
    config |= {"transport": "local" if world == 1 else transport}
    engine = zp.Engine(model, optimizer, config, lr_scheduler=scheduler)
    before = 0
    if first:
        found = engine.load(folder)
        before = found.client_state["world"]
        assert found.global_step == engine.global_step == first
    losses = []
    for step in range(first, first + STEPS):
        loss = next_token(engine, _tokens(step))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    engine.save(folder, client_state={"world": world})
    weights = {name: zp.full(p) for name, p in model.named_parameters()}
    engine.close()
    return losses, weights, before


def _uninterrupted(legs: int, precision: str | None) -> tuple[list[float], dict[str, Tensor]]:
    model, optimizer, scheduler, config = _build(0, precision)
    engine = zp.Engine(model, optimizer, config, lr_scheduler=scheduler)
    losses = []
    for step in range(legs * STEPS):
        loss = next_token(engine, _tokens(step))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses, {name: zp.full(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("transport", "precision"),
    [
        ("shared", None),
        ("collective", "bf16"),
        pytest.param("shared", "bf16", marks=pytest.mark.slow),
        pytest.param("collective", None, marks=pytest.mark.slow),
    ],
)
def test_two_then_three_then_one_then_two(transport: str, precision: str | None, tmp_path: Path) -> None:
    worlds = [2, 3, 1, 2]
    losses: list[float] = []
    for index, world in enumerate(worlds):
        ranks = run(world, _leg, transport, str(tmp_path), index * STEPS, precision)
        assert all(before == (worlds[index - 1] if index else 0) for _, _, before in ranks)
        assert all(rank[0] == ranks[0][0] for rank in ranks)
        losses += ranks[0][0]
    expected, weights = _uninterrupted(len(worlds), precision)
    assert losses == pytest.approx(expected, rel=1e-5 if precision is None else 1e-2)
    for name, value in ranks[0][1].items():
        torch.testing.assert_close(value, weights[name], rtol=1e-4 if precision is None else 2e-2, atol=1e-5)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # torch says that it works alone
def test_plain_torch_reads_it(tmp_path: Path) -> None:
    (_, weights, _), _ = run(2, _leg, "shared", str(tmp_path), 0, None)
    state = {f"model.{name}": torch.zeros_like(value) for name, value in weights.items()}
    load(state, checkpoint_id=tmp_path / f"step{STEPS}", no_dist=True)
    for name, value in weights.items():
        assert torch.equal(state[f"model.{name}"], value)


def _loads_badly(folder: str) -> list[str]:
    """What is said about checkpoints that do not fit; nothing has changed afterwards."""
    model, optimizer, scheduler, _ = _build(7, None)
    engine = zp.Engine(model, optimizer, {"transport": "shared"}, lr_scheduler=scheduler)
    before = {name: zp.full(p) for name, p in model.named_parameters()}
    told = []
    torch.manual_seed(0)
    other = nn.Sequential(nn.Linear(3, 3))
    wide = zp.Engine(other, None, {"transport": "shared"})
    merged = LM(tied=True)
    one_group = zp.Engine(merged, torch.optim.AdamW(merged.parameters()), {"transport": "shared"})
    for tried, arguments in ((engine, (folder + "/nowhere",)), (engine, (folder, "step99")), (wide, (folder,)),
                             (one_group, (folder,))):  # fmt: skip
        with pytest.raises(zp.errors.CheckpointError) as raised:
            tried.load(*arguments)
        told.append(str(raised.value))
    assert all(torch.equal(zp.full(p), before[name]) for name, p in model.named_parameters())
    for closing in (engine, wide, one_group):
        closing.close()
    return told


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    run(2, _leg, "shared", str(tmp_path), 0, None)
    for nowhere, tag, missing, groups in run(2, _loads_badly, str(tmp_path)):
        assert "nowhere" in nowhere
        assert "step99" in tag
        assert "0.weight is missing" in missing
        assert "2 optimizer groups, this engine has 1" in groups
