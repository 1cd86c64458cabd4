"""The gradient norm is that of the averaged gradients, each parameter once, whoever clips."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeropage as zp
from tests.harness import assert_same_training, run
from tests.harness.models import LM, lm_batch, next_token
from tests.scenarios.beside import averaged_backward, everywhere, plain_copy, same_parameters


class _Awkward(LM):
    """Tied weights, a frozen norm, and a layer that nobody calls."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.norm.requires_grad_(False)
        self.unused = nn.Linear(7, 5)


def _huge(model: Any, tokens: Tensor) -> Tensor:
    return 1e4 * next_token(model, tokens)


def _tiny(model: Any, tokens: Tensor) -> Tensor:
    return 1e-4 * next_token(model, tokens)


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Unlike an Adam it does not hide a wrong factor."""
    return torch.optim.SGD(parameters, lr=0.1)


@everywhere
@pytest.mark.parametrize("engine", [True, False], ids=["engine", "torch.nn.utils"])
@pytest.mark.parametrize("loss", [_huge, _tiny])
def test_norm_before_clipping(loss, engine: bool, transport: str, world: int) -> None:
    done = assert_same_training(
        _Awkward,
        lm_batch,
        loss=loss,
        optimizer=_sgd,
        clip=1.0,
        steps=3,
        accumulate=2,
        engine=engine,
        world=world,
        transport=transport,
    )
    for rank in done.ranks:
        assert len(rank.grad_norms) == 3
        assert all((norm > 1e2) if loss is _huge else (0 < norm < 1) for norm in rank.grad_norms)
        assert rank.grad_norms == done.ranks[0].grad_norms


def _limit_for_one_step(transport: str, precision: str | None) -> None:
    """Clipped at the first step and the third; the norm is told before the step, and is not scaled."""
    plain, model = plain_copy(_Awkward), plain_copy(_Awkward)
    optimizer = _sgd(p for p in plain.parameters() if p.requires_grad)
    scaled = {"precision": precision, "loss_scale": {"initial": 128.0}} if precision else {}
    config = {"transport": transport, **scaled}
    engine = zp.Engine(model, _sgd(p for p in model.parameters() if p.requires_grad), config)
    rank = torch.distributed.get_rank()
    for step in range(3):
        averaged_backward(plain.parameters(), lambda rank, step=step: next_token(plain, lm_batch(step, 0, rank)))
        engine.backward(next_token(engine, lm_batch(step, 0, rank)).float())
        limit = float("inf") if step == 1 else 0.2
        norm = nn.utils.clip_grad_norm_(plain.parameters(), limit)
        if step != 1:
            told = engine.clip_grad_norm_(limit)
            assert told == engine.grad_norm == pytest.approx(float(norm), rel=2e-2 if precision else 1e-5)
            assert told > limit, "or this shows nothing"
        optimizer.step()
        optimizer.zero_grad()
        result = engine.step()
        assert result.applied and result.grad_norm == pytest.approx(float(norm), rel=2e-2 if precision else 1e-5)
    if precision is None:
        same_parameters(plain, model, exact=False)
    engine.close()


@everywhere
@pytest.mark.parametrize("precision", [None, "fp16"])
def test_a_limit_for_one_step(precision: str | None, transport: str, world: int) -> None:
    run(world, _limit_for_one_step, transport, precision)
