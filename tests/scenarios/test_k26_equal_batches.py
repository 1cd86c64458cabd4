"""The same data gives the same training, however it is spread: over ranks, micro-batches, or neither."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zeropage as zp
from tests.harness import run
from tests.harness.models import VOCABULARY, build_lm
from tests.scenarios.beside import plain_copy

ROWS, STEPS = 8, 4


def _data(step: int) -> Tensor:
    return torch.randint(VOCABULARY, (ROWS, 11), generator=torch.Generator().manual_seed(step))


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def _plain() -> tuple[list[float], Tensor]:
    model = plain_copy(build_lm)
    optimizer = _sgd(model)
    losses = []
    for step in range(STEPS):
        loss = _loss(model, _data(step))
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, torch.cat([p.detach().flatten() for p in model.parameters()])


def _spread(transport: str, micro_batches: int) -> tuple[list[float], Tensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = plain_copy(build_lm)
    engine = zp.Engine(model, _sgd(model), {"transport": transport, "accumulate": micro_batches})
    losses = []
    for step in range(STEPS):
        mine = _data(step).chunk(world)[rank]
        total = torch.zeros(())
        for part in mine.chunk(micro_batches):
            loss = _loss(engine, part)
            total += loss.detach() / micro_batches / world
            engine.backward(loss)
            engine.step()
        dist.all_reduce(total)
        losses.append(total.item())
    weights = torch.cat([zp.full(p).flatten() for p in model.parameters()])
    engine.close()
    return losses, weights


@pytest.mark.parametrize(("transport", "world"), [("local", 1), ("shared", 2), ("collective", 2), ("shared", 4)])
def test_the_same_total_batch(transport: str, world: int) -> None:
    wanted, weights = _plain()
    for micro_batches in (1, 2):
        for losses, found in run(world, _spread, transport, micro_batches):
            assert losses == pytest.approx(wanted, rel=1e-5)
            torch.testing.assert_close(found, weights, rtol=1e-4, atol=1e-6)


def _uneven(transport: str) -> Tensor:
    """Ranks with different numbers of tokens: a sum over the own ones, divided by the mean count of all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = plain_copy(build_lm)
    engine = zp.Engine(model, _sgd(model), {"transport": transport})
    for step in range(STEPS):
        tokens = _data(step)
        bounds = [0, 1, ROWS] if world == 2 else [0, 1, 3, ROWS]
        mine = tokens[bounds[rank] : bounds[rank + 1]]
        logits = engine(mine)[:, :-1]
        total = F.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten(), reduction="sum")
        engine.backward(total * world / (ROWS * 10))
        engine.step()
    weights = torch.cat([zp.full(p).flatten() for p in model.parameters()])
    engine.close()
    return weights


@pytest.mark.parametrize(("transport", "world"), [("shared", 2), ("collective", 2), ("shared", 3)])
def test_uneven_token_counts(transport: str, world: int) -> None:
    _, weights = _plain()
    for found in run(world, _uneven, transport):
        torch.testing.assert_close(found, weights, rtol=1e-4, atol=1e-6)
