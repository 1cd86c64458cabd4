"""Large parameters are stepped piece by piece and summed part by part: the bits are those of doing it at once.

Pieces and parts are made small here, so that small models have many.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zeropage as zp
from tests.harness import run
from tests.operators.test_optimizers import ELEMENTWISE
from zeropage import optim
from zeropage.transport import shared

SMALL, LARGE = 64, 1 << 30  # elements
ADAM = [name for name in ELEMENTWISE if name.startswith("Adam") and name != "Adamax"]
CONFIGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "clipped": {"clip_grad_norm": 0.01},
    "accumulated": {"accumulate": 3},
    "bf16": {"precision": "bf16", "clip_grad_norm": 0.01},
    "bf16 sums": {"precision": "bf16", "reduce_dtype": "bf16"},
    "fp16": {"precision": "fp16", "loss_scale": {"initial": 256.0}},
}


@contextmanager
def _cut_at(elements: int) -> Iterator[None]:
    with mock.patch.object(optim, "_PIECE", elements), mock.patch.object(shared, "_PART", elements):
        yield


def _train(elements: int, kind: str, config: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters and states after four steps, in which ranks are held up at random."""
    rank = torch.distributed.get_rank()
    delays, data = random.Random(elements + rank), torch.Generator().manual_seed(rank)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(37, 41), nn.Tanh(), nn.Linear(41, 23))
    optimizer = ELEMENTWISE[kind](list(model.parameters()))
    with _cut_at(elements), zp.Engine(model, optimizer, {"transport": "shared"} | config) as engine:
        for _ in range(4 * engine.config.accumulate):
            x = torch.randn(5, 37, generator=data).to(next(model.parameters()).dtype)
            loss = engine(x).float().square().mean()
            time.sleep(delays.random() * 0.003)
            engine.backward(loss)
            engine.step()
        states = [optimizer.state[p] for p in model.parameters()]
        found = [value for state in states for value in state.values()]
        return [zp.full(p) for p in model.parameters()], [zp.full(v) if zp.is_paged(v) else v for v in found]


def _same(kind: str, config: dict[str, Any], world: int) -> None:
    cut, whole = (run(world, _train, elements, kind, config) for elements in (SMALL, LARGE))
    for ours, theirs in zip(cut, whole, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert len(mine) == len(other) > 0
            assert all(torch.equal(one, another) for one, another in zip(mine, other, strict=True))


@pytest.mark.parametrize("kind", ADAM)
def test_every_adam(kind: str) -> None:
    _same(kind, CONFIGS["clipped"], world=2)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("config", list(CONFIGS))
def test_every_precision(config: str, world: int) -> None:
    _same("AdamW fused", CONFIGS[config], world)
