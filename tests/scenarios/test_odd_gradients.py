"""Gradients whose memory does not tell their values: odd strides, a lazy sign, a lazy conjugate."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropage as zp
from tests.harness import run

STEPS = 2


class _Stacked(nn.Module):
    """Each gradient is one element of a stack, with the stride of the stack."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.stack([self.a, self.b], -1) * x[:2]).square().sum()


class _Negative(nn.Module):
    """The gradient of an imaginary part, conjugated, is a view with a negative sign beside it."""

    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.arange(1.0, 1 + count))

    def forward(self, x: Tensor) -> Tensor:
        made = torch.complex(x[: len(self.b)], self.b).conj()
        return (made * (2 + 3j)).real.sum()


class _NegativeMany(_Negative):
    def __init__(self) -> None:
        super().__init__(300)


class _Conjugated(nn.Module):
    """The gradient of a complex parameter is a conjugated view."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Parameter(torch.arange(300) * (1 + 2j))

    def forward(self, x: Tensor) -> Tensor:
        return (self.c.conj() * x).real.sum()


def _steps(model: nn.Module, engine: zp.Engine | None, ranks: list[int]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    for step in range(STEPS):
        for rank in ranks:
            x = torch.arange(300.0) * (1 + rank) + step
            if engine is not None:
                engine.backward(engine(x))
            else:
                (model(x) / len(ranks)).backward()
        if engine is not None:
            engine.step()
        else:
            optimizer.step()
            optimizer.zero_grad()


def _train(make: type[nn.Module], transport: str) -> list[Tensor]:
    model = make()
    engine = zp.Engine(model, torch.optim.SGD(model.parameters(), lr=0.125), {"transport": transport, "timeout_s": 10})
    _steps(model, engine, [dist.get_rank()])
    full = [zp.full(parameter) for parameter in model.parameters()]
    dist.barrier()
    engine.close()
    return full


@pytest.mark.parametrize("transport", ["shared", "collective"])
@pytest.mark.parametrize("make", [_Stacked, _Negative, _NegativeMany, _Conjugated])
def test_two_ranks_train_as_one_process(make: type[nn.Module], transport: str) -> None:
    plain = make()
    _steps(plain, None, [0, 1])
    for full in run(2, _train, make, transport):
        assert all(map(torch.equal, full, plain.parameters()))
