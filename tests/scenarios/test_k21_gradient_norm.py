"""The gradient norm is that of the averaged gradients, each parameter once, whoever clips."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness import assert_same_training
from tests.harness.models import LM, lm_batch, next_token
from tests.scenarios.beside import everywhere


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
