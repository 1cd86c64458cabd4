"""K01, K08: ranks touch different parameters, in different numbers; the numbers stay right on every transport."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zeropage as zp
from tests.harness import assert_same_training, run
from tests.harness.models import (
    LM,
    Routed,
    build_moe,
    build_two_tower,
    mlp_batch,
    moe_batch,
    next_token,
    two_tower_batch,
)

TRANSPORTS = ["shared", "collective"]
WORLDS = [2, 3]


def _moe_batch_with_an_idle_step(step: int, micro: int, rank: int) -> Routed:
    """In step 1 experts 0 to 2 get no token on any rank."""
    return Routed(mlp_batch(step, micro, rank), (3,)) if step == 1 else moe_batch(step, micro, rank)


def _swapping_experts(step: int, micro: int, rank: int) -> Routed:
    """Each rank its own expert, another one each step."""
    return Routed(mlp_batch(step, micro, rank), ((step + rank) % 4,))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("batches", [_moe_batch_with_an_idle_step, _swapping_experts])
def test_experts_by_rank(batches: object, transport: str, world: int) -> None:
    assert_same_training(build_moe, batches, world=world, transport=transport, steps=4)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_towers_by_rank(transport: str, world: int) -> None:
    assert_same_training(build_two_tower, two_tower_batch, world=world, transport=transport, steps=4)


def _unused_experts_stay(transport: str) -> tuple[bool, bool]:
    """Whether an expert that nobody used has no gradient, and kept its values over a step."""
    torch.manual_seed(0)
    model = build_moe()
    engine = zp.Engine(model, torch.optim.AdamW(model.parameters(), lr=0.1), {"transport": transport})
    before = zp.full(model.experts[3].weight)
    for step in range(2):
        engine.backward(engine(moe_batch(step, 0, torch.distributed.get_rank())).square().mean())
        gradient = model.experts[3].weight.grad
        engine.step()
    kept = torch.equal(before, zp.full(model.experts[3].weight))
    engine.close()
    return gradient is None, kept


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_no_stale_update(transport: str) -> None:
    assert run(2, _unused_experts_stay, transport) == [(True, True)] * 2


def _generate(model: nn.Module, tokens: torch.Tensor, length: int) -> torch.Tensor:
    """Greedy, until an end of sequence that is forced after `length` tokens; no flag, no padding."""
    with torch.no_grad():
        for _ in range(length):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
    return tokens


def _generate_then_train(transport: str) -> tuple[bool, list[float]]:
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    plain = LM(tied=False)
    torch.manual_seed(0)
    model = LM(tied=False)
    engine = zp.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), {"transport": transport})
    prompt = torch.randint(0, 17, (2, 3), generator=torch.Generator().manual_seed(rank))
    length = (2, 5, 4)[rank]
    same = torch.equal(_generate(model, prompt, length), _generate(plain, prompt, length))
    losses = []
    for _ in range(2):
        loss = next_token(engine, prompt)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    engine.close()
    return same, losses


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_generation_that_stops_at_different_lengths(transport: str, world: int) -> None:
    results = run(world, _generate_then_train, transport, timeout=30)
    assert all(same for same, _ in results)
    torch.manual_seed(0)
    plain = LM(tied=False)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        for rank in range(world):
            prompt = torch.randint(0, 17, (2, 3), generator=torch.Generator().manual_seed(rank))
            loss = next_token(plain, prompt)
            assert results[rank][1][step] == pytest.approx(loss.item(), rel=1e-6)
            (loss / world).backward()
        optimizer.step()
        optimizer.zero_grad()
