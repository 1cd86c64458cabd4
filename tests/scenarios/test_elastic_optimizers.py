"""Every optimizer goes on from a checkpoint of two ranks, on any number of them, as plain torch without a break.

All ranks have the same batch. So two ranks and one have the gradients of plain torch to the bit, and their weights
and states must be equal to the bit as well; three add up thirds, and are equal up to rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

import zeropage as zp
from tests.harness import run
from tests.operators.test_optimizers import ELEMENTWISE, WHOLE, batch, build

BEFORE, AFTER = 3, 3  # steps, until the checkpoint and from it on
OPTIMIZERS = {name: make for name, make in (ELEMENTWISE | WHOLE).items() if name != "LBFGS"}  # no engine takes it
OWN_GROUPS = ("AdamW groups", "Muon")  # they choose their parameters themselves

MakeScheduler = Callable[[optim.Optimizer], lr_scheduler.LRScheduler]


@dataclass
class Result:
    """Where a training stands: all by name."""

    weights: dict[str, Tensor]
    state: dict[str, Any]
    rates: list[float]
    scheduler: dict[str, Any]


def _optimizer(name: str, model: nn.Module) -> optim.Optimizer:
    """Two groups that do not have the order of the model; one parameter never gets a gradient."""
    parameters = list(model.parameters())
    if name in OWN_GROUPS:
        return OPTIMIZERS[name](parameters)
    return OPTIMIZERS[name]([{"params": parameters[1::2], "lr": 0.02}, {"params": parameters[::2]}])  # type: ignore


def _loss(model: nn.Module, step: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    return model(batch(step, 0).to(dtype)).float().square().mean()


def _half(optimizer: optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def _result(model: nn.Module, optimizer: optim.Optimizer, scheduler: lr_scheduler.LRScheduler) -> Result:
    named = dict(model.named_parameters())
    state = {
        f"{name}.{key}": zp.full(value) if isinstance(value, Tensor) else value
        for name, parameter in named.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    return Result({name: zp.full(p).detach() for name, p in named.items()}, state, rates, scheduler.state_dict())


def _plain(name: str, make: MakeScheduler) -> Result:
    model = build()
    optimizer = _optimizer(name, model)
    scheduler = make(optimizer)
    for step in range(BEFORE + AFTER):
        _loss(model, step).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return _result(model, optimizer, scheduler)


def _leg(folder: Path, name: str, make: MakeScheduler, *, resume: bool, **config: Any) -> Result:
    """Train from the start and save; or load into another model and go on."""
    torch.manual_seed(5)
    model = build()
    if resume:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(9.0)
    optimizer = _optimizer(name, model)
    scheduler = make(optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*not elementwise.*")
        engine = zp.Engine(model, optimizer, {"timeout_s": 60, **config}, lr_scheduler=scheduler)
        if resume:
            assert engine.load(folder).global_step == BEFORE
        for step in range(BEFORE, BEFORE + AFTER) if resume else range(BEFORE):
            engine.backward(_loss(model, step))
            engine.step()
        if not resume:
            engine.save(folder)
        found = _result(model, optimizer, scheduler)
        engine.close()
    return found


def _legs(folder: Path, cases: list[tuple[str, MakeScheduler]], resume: bool, config: dict[str, Any]) -> list[Any]:
    """The result of each case, or what went wrong: the others are of interest too."""
    found: list[Result | str] = []
    for number, (name, make) in enumerate(cases):
        try:
            found.append(_leg(folder / str(number), name, make, resume=resume, **config))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def _go_on(transport: str, world: int, cases: list[tuple[str, MakeScheduler]], folder: Path) -> None:
    """Two ranks save, `world` ranks go on; the results are those of plain torch."""
    for saved in run(2, _legs, folder, cases, False, {"transport": transport}):
        assert [told for told in saved if isinstance(told, str)] == []
    config = {"transport": "local" if world == 1 else transport}
    expected = [_plain(*case) for case in cases]
    wrong = [
        f"rank {rank}, {name}: {line}"
        for rank, found in enumerate(run(world, _legs, folder, cases, True, config))
        for (name, _), got, wanted in zip(cases, found, expected, strict=True)
        for line in _differences(got, wanted, 0.0 if world <= 2 else 1e-4)
    ]
    assert wrong == []


def _differences(found: Result | str, expected: Result, tolerance: float) -> list[str]:
    if isinstance(found, str):
        return [found]
    wrong = []
    for what, one, other in (
        ("weight", found.weights, expected.weights),
        ("state", found.state, expected.state),
    ):  # fmt: skip
        if list(one) != list(other):
            wrong.append(f"{what}s {sorted(set(one) ^ set(other))} on one side only, or another order")
        wrong += [
            f"{what} {key}: {one[key]} is not {other[key]}"
            for key in one
            if not _equal(one[key], other.get(key), tolerance)
        ]
    if found.rates != expected.rates:
        wrong.append(f"rates {found.rates} are not {expected.rates}")
    if str(found.scheduler) != str(expected.scheduler):
        wrong.append(f"scheduler {found.scheduler} is not {expected.scheduler}")
    return wrong


def _equal(one: Any, other: Any, tolerance: float) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return bool(one == other)
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if not tolerance:
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * float(other.abs().max()))


WORLDS = [1, 2, 3]
# by the process group everything takes longer, and what is special about it is the loading, not the optimizer
FEW = ["SGD nesterov", "AdamW groups", "AdamW fused", "RMSprop", "NAdam", "Adafactor", "Lion"]


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_every_optimizer_goes_on(world: int, tmp_path: Path) -> None:
    _go_on("shared", world, [(name, _half) for name in OPTIMIZERS], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_optimizers_go_on_over_messages(world: int, tmp_path: Path) -> None:
    _go_on("collective", world, [(name, _half) for name in FEW], tmp_path)


# -- schedulers


def _one_cycle(optimizer: optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.OneCycleLR(optimizer, [0.1, 0.05], total_steps=20)  # it changes momenta too


def _cyclic(optimizer: optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.CyclicLR(optimizer, 0.001, 0.01, step_size_up=2, cycle_momentum=False)


def _cosine(optimizer: optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)


def _in_sequence(optimizer: optim.Optimizer) -> lr_scheduler.LRScheduler:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[4])


def _chained(optimizer: optim.Optimizer) -> lr_scheduler.LRScheduler:
    parts = [lr_scheduler.ConstantLR(optimizer, 0.1, total_iters=4), lr_scheduler.MultiStepLR(optimizer, [2, 5])]
    return lr_scheduler.ChainedScheduler(parts)


SCHEDULERS = [_one_cycle, _cyclic, _cosine, _in_sequence, _chained]


@pytest.mark.parametrize("world", WORLDS)
def test_every_scheduler_goes_on(world: int, tmp_path: Path) -> None:
    _go_on("shared", world, [("AdamW", make) for make in SCHEDULERS], tmp_path)


# -- masters


def _uninterrupted(name: str, config: dict[str, Any]) -> Result:
    model = build()
    optimizer = _optimizer(name, model)
    scheduler = _half(optimizer)
    engine = zp.Engine(model, optimizer, config, lr_scheduler=scheduler)
    for step in range(BEFORE + AFTER):
        engine.backward(_loss(model, step))
        engine.step()
    found = _result(model, optimizer, scheduler)
    engine.close()
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_masters_go_on(world: int, tmp_path: Path) -> None:
    """bf16 weights behind which there are fp32 values: as without a break."""
    names = ["SGD nesterov", "AdamW", "Adagrad", "RAdam", "Lion"]
    cases = [(name, _half) for name in names]
    config: dict[str, Any] = {"precision": "bf16"}
    run(2, _legs, tmp_path, cases, False, config | {"transport": "shared"})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*not elementwise.*")
        expected = [_uninterrupted(name, config | {"transport": "local"}) for name in names]
    for found in run(world, _legs, tmp_path, cases, True, config | {"transport": "auto"}):
        for name, got, wanted in zip(names, found, expected, strict=True):
            assert _differences(got, wanted, 0.0 if world <= 2 else 2e-2) == [], name
