"""fp16: an overflow on one rank makes all ranks skip, halves the scale once, and names parameter and rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropage as zp
from tests.harness import run
from tests.harness.models import build_mlp, mlp_batch
from tests.scenarios.beside import everywhere, plain_copy, same

OVERFLOWS = (2, 3, 4)
# before each step: two clean steps double the scale, every overflow halves it
SCALES = [256.0, 256.0, 512.0, 256.0, 128.0, 64.0, 64.0, 128.0]
LR = 0.125


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x.half()).float().square().mean()


def _engine(transport: str, **scale: object) -> zp.Engine:
    model = plain_copy(build_mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    config = {"transport": transport, "precision": "fp16", "loss_scale": scale}
    return zp.Engine(model, optimizer, config, lr_scheduler=scheduler)


def _overflow(gradient: Tensor) -> Tensor:
    return gradient * float("inf")


def _skipping(transport: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    engine = _engine(transport, initial=256.0, window=2, hysteresis=1)
    plain = plain_copy(build_mlp)
    exact = {p: nn.Parameter(p.detach().clone()) for p in plain.parameters()}
    plain.half()
    reference = torch.optim.SGD(exact.values(), lr=LR, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(reference, 1, gamma=0.5)
    for step, scale in enumerate(SCALES):
        assert engine.loss_scale == scale, step
        loss = _loss(engine, mlp_batch(step, 0, rank))
        if step in OVERFLOWS and rank == world - 1:
            loss.register_hook(_overflow)
        engine.backward(loss)
        result = engine.step()
        assert result.loss_scale == scale
        assert result.applied is (step not in OVERFLOWS)
        if step in OVERFLOWS:
            assert result.reason == f"the gradient of 'third.bias' is not finite on rank {world - 1}"
            continue
        assert result.reason == ""
        _plain_step(plain, exact, reference, step, scale)
        scheduler.step()
        assert engine.lr == reference.param_groups[0]["lr"]
        for (name, got), wanted in zip(engine.module.named_parameters(), plain.parameters(), strict=True):
            same(wanted, got, f"{name} at step {step}", exact=True if world == 2 else None)
    assert (engine.global_step, engine.skipped_steps) == (len(SCALES) - 3, 3)
    assert engine.lr == LR * 0.5 ** (len(SCALES) - 3), "the scheduler does not advance on skipped steps"
    engine.close()


@torch.no_grad()
def _write_back(exact: dict[nn.Parameter, nn.Parameter]) -> None:
    for parameter, master in exact.items():
        parameter.copy_(master)
        parameter.grad = None


def _plain_step(
    plain: nn.Module, exact: dict[nn.Parameter, nn.Parameter], reference: torch.optim.Optimizer, step: int, scale: float
) -> None:
    world = dist.get_world_size()
    for master in exact.values():
        master.grad = torch.zeros_like(master)
    for rank in range(world):
        (_loss(plain, mlp_batch(step, 0, rank)) * scale).backward()
        for parameter, master in exact.items():
            master.grad += parameter.grad.float() * (1 / world)
            parameter.grad = None
    for master in exact.values():
        master.grad *= 1 / scale
    reference.step()
    _write_back(exact)


@everywhere
def test_all_ranks_skip_and_recover(transport: str, world: int) -> None:
    run(world, _skipping, transport)


def _nan_loss(transport: str) -> str:
    last = dist.get_world_size() - 1
    engine = _engine(transport, initial=256.0)
    before = zp.full(engine.module.first.weight)
    for step in range(20):
        loss = _loss(engine, mlp_batch(step, 0, dist.get_rank()))
        engine.backward(loss * (float("nan") if dist.get_rank() == last else 1.0))
        try:
            result = engine.step()
        except zp.errors.NonFiniteError as error:
            assert step == 10
            same(before, engine.module.first.weight, exact=True)
            engine.close()
            return str(error)
        assert not result.applied
        assert result.reason == f"the loss is not finite on rank {last}"
        assert engine.loss_scale == 256.0, "a bad loss is no overflow"
    return "no error"


@everywhere
def test_a_loss_that_stays_nan_is_reported(transport: str, world: int) -> None:
    for told in run(world, _nan_loss, transport):
        assert told == f"the loss is not finite on rank {world - 1}, for 11 steps in a row; training cannot go on"


def _smallest_scale(transport: str) -> str:
    engine = _engine(transport, initial=4.0, min=2.0, hysteresis=1)
    for step in range(3):
        loss = _loss(engine, mlp_batch(step, 0, dist.get_rank()))
        if dist.get_rank() == 0:
            loss.register_hook(_overflow)
        engine.backward(loss)
        try:
            assert not engine.step().applied
        except zp.errors.NonFiniteError as error:
            assert step >= 1
            engine.close()
            return str(error)
    return "no error"


@everywhere
def test_overflow_at_the_smallest_scale_ends_the_run(transport: str, world: int) -> None:
    for told in run(world, _smallest_scale, transport):
        assert told.startswith("the gradient of 'third.bias' is not finite on rank 0 at the smallest loss scale (2)")


def _fixed_scale(transport: str) -> list[float]:
    engine = _engine(transport, initial=8.0, dynamic=False)
    seen = []
    for step in range(2):
        loss = _loss(engine, mlp_batch(step, 0, dist.get_rank()))
        if step == 0 and dist.get_rank() == 0:
            loss.register_hook(_overflow)
        engine.backward(loss)
        result = engine.step()
        assert result.applied is (step == 1)
        seen.append(engine.loss_scale)
    engine.close()
    return seen


def test_a_fixed_scale_stays() -> None:
    assert run(2, _fixed_scale, "shared") == [[8.0, 8.0]] * 2


def test_loss_scale_needs_fp16() -> None:
    with pytest.raises(zp.errors.ConfigError, match="loss_scale takes effect only with precision='fp16'"):
        zp.Config(precision="bf16", loss_scale={"initial": 8.0})


def _skipping_without_a_scale(transport: str, precision: str | None) -> list[str]:
    """One bad step changes nothing; ten are borne, the eleventh ends the run."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = plain_copy(build_mlp)
    config = {"transport": transport, "precision": precision, "skip_nonfinite": True}
    engine = zp.Engine(model, torch.optim.SGD(model.parameters(), lr=LR), config)
    before = zp.full(engine.module.first.weight)
    told = []
    for step in range(11):
        loss = engine(mlp_batch(step, 0, dist.get_rank()).to(dtype)).float().square().mean()
        if dist.get_rank() == 0:
            loss.register_hook(_overflow)
        engine.backward(loss)
        try:
            result = engine.step()
        except zp.errors.NonFiniteError as error:
            assert step == 10
            told.append(str(error))
        else:
            assert not result.applied and result.loss_scale == 1.0
            told.append(result.reason)
    same(before, engine.module.first.weight, exact=True)
    assert (engine.global_step, engine.skipped_steps) == (0, 11)
    engine.close()
    return sorted(set(told))


@pytest.mark.parametrize("precision", ["bf16", None])
def test_steps_are_skipped_without_a_loss_scale_where_asked(precision: str | None) -> None:
    reason = "the gradient of 'third.bias' is not finite on rank 0"
    for told in run(2, _skipping_without_a_scale, "shared", precision):
        assert told == [reason, f"{reason}, for 11 steps in a row; training cannot go on"]
