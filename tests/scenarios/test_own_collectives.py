"""Collective calls of the program's own, anywhere between those of zeropage, while ranks need different pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropage as zp
from tests.harness import run
from tests.harness.models import Routed, build_moe, mlp_batch
from tests.scenarios.beside import everywhere

STEPS = 3


def _batch(step: int, rank: int) -> Routed:
    """Rank 0 uses one expert, rank 1 two, rank 2 three: they make different numbers of calls."""
    return Routed(mlp_batch(step, 0, rank), tuple((step + i) % 4 for i in range(rank + 1)))


class _Total(torch.autograd.Function):
    """The sum over ranks, inside of a model; its gradient is summed too."""

    @staticmethod
    def forward(_: Any, value: torch.Tensor) -> torch.Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class _Synchronised(nn.Module):
    """As with synchronised batch norm: ranks talk in the middle of forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.head = build_moe(), nn.Linear(1, 1)

    def forward(self, batch: Routed, total: Any) -> torch.Tensor:
        mean = self.experts(batch).square().mean().reshape(1, 1)
        return (self.head(total(mean)) + mean).sum()


def _train(transport: str) -> tuple[list[float], list[torch.Tensor]]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = _Synchronised()
    config = {"transport": transport, "resident_bytes": 0 if rank else None, "readahead": rank != 1, "timeout_s": 20}
    engine = zp.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config)
    sums = []
    for step in range(STEPS):
        with torch.no_grad():
            metric = engine(_batch(step, rank), _Total.apply)
            dist.all_reduce(metric)
        loss = engine(_batch(step, rank), _Total.apply)
        engine.backward(loss)
        told = loss.detach().clone()
        dist.all_reduce(told)
        engine.step()
        dist.barrier()
        sums += [metric.item(), told.item()]
    weights = [zp.full(parameter) for parameter in model.parameters()]
    dist.barrier()
    engine.close()
    return sums, weights


def _plainly(world: int) -> tuple[list[float], list[torch.Tensor]]:
    """All ranks in one process: the total is a sum over their graphs."""
    torch.manual_seed(0)
    model = _Synchronised()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sums = []
    for step in range(STEPS):
        means = [model.experts(_batch(step, rank)).square().mean().reshape(1, 1) for rank in range(world)]
        loss = sum((model.head(torch.stack(means).sum(0)) + mean).sum() for mean in means)
        (loss / world).backward()
        optimizer.step()
        optimizer.zero_grad()
        sums += [loss.item()] * 2
    return sums, [parameter.detach() for parameter in model.parameters()]


@everywhere
def test_training_with_collectives_of_its_own(transport: str, world: int) -> None:
    sums, weights = _plainly(world)
    for found, parameters in run(world, _train, transport, timeout=60):
        assert found == pytest.approx(sums, rel=1e-5)
        for one, other in zip(parameters, weights, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
