"""Gradients of bf16 parameters are summed in fp32 over micro-batches and ranks; the dtype can be chosen."""

from __future__ import annotations

import torch
from torch import nn

import zeropage as zp
from tests.harness import run
from tests.scenarios.beside import everywhere

MICRO = 64
TINY = 2.0**-9  # exact in bf16, but 1 + TINY is not


class _Model(nn.Module):
    """The gradient of every weight is what the loss says; sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(17, 7, dtype=torch.bfloat16))
        self.bias = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))

    def forward(self, slope: float) -> torch.Tensor:
        return slope * (self.weight.sum() + self.bias.sum())


def _sums(transport: str, reduce_dtype: str) -> tuple[torch.Tensor, torch.Tensor, float]:
    """One gradient of 1 and then many tiny ones; what the parameters become at a learning rate of 1."""
    model = _Model()
    config = {"transport": transport, "reduce_dtype": reduce_dtype}
    engine = zp.Engine(model, torch.optim.SGD(model.parameters(), lr=1.0), config)
    for micro in range(MICRO):
        engine.backward(engine(1.0 if micro == 0 else TINY))
    norm = engine.step().grad_norm
    found = zp.full(model.weight).float(), zp.full(model.bias).float(), norm
    engine.close()
    return found


EXACT = 1 + (MICRO - 1) * TINY


@everywhere
def test_fp32_sums_are_exact(transport: str, world: int) -> None:
    for weight, bias, norm in run(world, _sums, transport, "fp32"):
        expected = torch.tensor(-EXACT).bfloat16().float()
        assert torch.equal(weight, expected.expand(17, 7))
        assert torch.equal(bias, expected.expand(5))
        assert abs(norm - EXACT * (17 * 7 + 5) ** 0.5) < 1e-5 * norm


@everywhere
def test_bf16_sums_lose_small_gradients(transport: str, world: int) -> None:
    """Asked for, the narrow sum is what one gets: the option takes effect."""
    for weight, bias, norm in run(world, _sums, transport, "bf16"):
        assert torch.equal(weight, torch.full((17, 7), -1.0))
        assert torch.equal(bias, torch.full((5,), -1.0))
        assert abs(norm - (17 * 7 + 5) ** 0.5) < 1e-5 * norm


def _many_small_steps(transport: str) -> list[float]:
    """Updates below the resolution of bf16 add up in the fp32 master."""
    model = _Model()
    with torch.no_grad():
        model.weight.fill_(1.0)
    engine = zp.Engine(model, torch.optim.SGD(model.parameters(), lr=TINY / 4), {"transport": transport})
    seen = []
    for _ in range(16):
        engine.backward(engine(1.0))
        engine.step()
        seen.append(zp.full(model.weight)[3, 4].item())
    engine.close()
    return seen


@everywhere
def test_masters_keep_small_updates(transport: str, world: int) -> None:
    for seen in run(world, _many_small_steps, transport):
        exact = [1 - (step + 1) * TINY / 4 for step in range(16)]
        assert seen == torch.tensor(exact).bfloat16().tolist()
        assert seen[-1] < 1.0
