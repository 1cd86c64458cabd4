"""Two runs give the same bits at any world size, with micro-batches and old-style checkpointing too."""

from __future__ import annotations

import random
import time

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeropage as zp
from tests.harness import run


class Shared(nn.Module):
    """One layer used three times, inside re-entrant checkpoints if asked: its gradient comes in parts."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(7, 40)
        self.again = nn.Linear(40, 40)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = checkpoint(self._turn, x, use_reentrant=True) if self.reentrant else self._turn(x)
        return x

    def _turn(self, x: Tensor) -> Tensor:
        return torch.tanh(self.again(x))


def _train(transport: str, seed: int, *, reentrant: bool, deterministic: bool) -> list[Tensor]:
    """Weights after three steps of three micro-batches, in which ranks are held up at random."""
    rank = torch.distributed.get_rank()
    delays = random.Random(100 * seed + rank)
    torch.manual_seed(0)
    model = Shared(reentrant=reentrant)
    config = {"transport": transport, "accumulate": 3, "deterministic": deterministic}
    engine = zp.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config)
    data = torch.Generator().manual_seed(rank)
    for _ in range(9):
        time.sleep(delays.random() * 0.004)
        engine.backward(engine(torch.randn(5, 7, generator=data)).square().mean())
        engine.step()
    found = [zp.full(p) for p in model.parameters()]
    engine.close()
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("transport", ["shared", "collective"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_same_bits_in_every_run(transport: str, world: int, reentrant: bool) -> None:
    runs = [run(world, _train, transport, seed, reentrant=reentrant, deterministic=True) for seed in range(2)]
    first = runs[0][0]
    for ranks in runs:
        for found in ranks:
            assert all(torch.equal(one, other) for one, other in zip(first, found, strict=True))


def test_any_order_is_close() -> None:
    """Without `deterministic` ranks add as they come: equal to rounding."""
    ordered = run(3, _train, "shared", 0, reentrant=False, deterministic=True)[0]
    free = run(3, _train, "shared", 1, reentrant=False, deterministic=False)[0]
    for one, other in zip(ordered, free, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
