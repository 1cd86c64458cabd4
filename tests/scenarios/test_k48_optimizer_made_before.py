"""An optimizer made, and even stepped, before the model is sharded keeps its groups and its state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from tests.harness import assert_same_training
from tests.harness.models import build_lm, lm_batch, next_token
from tests.scenarios.beside import everywhere

Parameters = list[nn.Parameter]

KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),  # makes its state when it is built
    "sgd": partial(torch.optim.SGD, lr=1e-1, momentum=0.9),
}


def _one_group(kind: str, parameters: Parameters) -> torch.optim.Optimizer:
    return KINDS[kind](parameters)


def _groups(kind: str, parameters: Parameters) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not and learn more slowly."""
    matrices = [p for p in parameters if p.dim() > 1]
    vectors = [p for p in parameters if p.dim() == 1]
    return KINDS[kind](
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 1e-3, "weight_decay": 0.0}]
    )


def _stepped(kind: str, parameters: Parameters) -> torch.optim.Optimizer:
    """One step has been taken on plain parameters, so there is state of their full shapes."""
    optimizer = _groups(kind, parameters)
    for index, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, 0.01 * (index + 1))
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@everywhere
@pytest.mark.parametrize("engine", [True, False], ids=["engine", "loop"])
@pytest.mark.parametrize("kind", KINDS)
def test_groups_and_state_stay(kind: str, engine: bool, transport: str, world: int) -> None:
    for make in (_one_group, _stepped):
        assert_same_training(
            build_lm,
            lm_batch,
            loss=next_token,
            optimizer=partial(make, kind),
            optimizer_first=True,
            engine=engine,
            steps=3,
            world=world,
            transport=transport,
        )
