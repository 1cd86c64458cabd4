"""Parameters that a first forward makes are sharded, equal on all ranks, and trained once the optimizer has them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropage as zp
from tests.harness import run
from tests.harness.models import mlp_batch
from tests.scenarios.beside import averaged_backward, everywhere, same_parameters


def _lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(17), nn.Tanh(), nn.LazyLinear(5))


class _Grows(nn.Module):
    """Makes a parameter, and then a module, when it first runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if not hasattr(self, "gate"):
            self.gate = nn.Parameter(torch.randn(x.shape[-1]))
            self.last = nn.Linear(x.shape[-1], 5)
        return self.last(x * self.gate)


class _Holder(nn.Module):
    """Owns nothing of its own when it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.grows = _Grows()

    def forward(self, x: Tensor) -> Tensor:
        return self.grows(x)


def _build(transport: str, build: type[nn.Module], init: bool) -> nn.Module:
    torch.manual_seed(0)
    if init:
        with zp.init({"transport": transport}):
            return build()
    return zp.shard(build(), {"transport": transport})


def _step(plain: nn.Module, reference: torch.optim.Optimizer, engine: zp.Engine, step: int) -> None:
    averaged_backward(plain.parameters(), lambda rank: plain(mlp_batch(step, 0, rank)).square().mean())
    reference.step()
    plain.zero_grad()  # also of parameters that no optimizer has
    engine.backward(engine(mlp_batch(step, 0, dist.get_rank())).square().mean())
    assert engine.step().applied


def _dry_run_first(transport: str) -> None:
    """As torch asks for lazy modules: one forward, then the optimizer."""
    for build in (_lazy, _Grows, _Holder):
        for init in (False, True):
            torch.manual_seed(0)
            plain = build()
            torch.manual_seed(1)
            plain(mlp_batch(0, 0, 0))
            model = _build(transport, build, init)
            torch.manual_seed(1 + dist.get_rank())  # ranks would draw different values
            model(mlp_batch(0, 0, dist.get_rank()))
            assert all(zp.is_paged(p) for p in model.parameters()), build
            same_parameters(plain, model, exact=True)
            reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
            engine = zp.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
            for step in range(2):
                _step(plain, reference, engine, step)
            same_parameters(plain, model)
            engine.close()


@everywhere
def test_dry_run_then_optimizer(transport: str, world: int) -> None:
    run(world, _dry_run_first, transport)


def _engine_first(transport: str) -> None:
    """The engine is there already: late parameters stay until they are given to the optimizer."""
    torch.manual_seed(0)
    plain = _Grows()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    model = _build(transport, _Grows, init=False)
    engine = zp.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for made in (plain, engine):
        torch.manual_seed(1)
        made(mlp_batch(0, 0, 0))
    _step(plain, reference, engine, 0)
    same_parameters(plain, model)
    for late, optimizer in ((plain, reference), (model, engine.optimizer)):
        assert len(optimizer.param_groups) == 1
        optimizer.add_param_group({"params": [late.gate, *late.last.parameters()], "lr": 1e-3})
    for step in range(1, 3):
        _step(plain, reference, engine, step)
    same_parameters(plain, model)
    engine.close()


@everywhere
def test_parameters_later_than_the_engine(transport: str, world: int) -> None:
    run(world, _engine_first, transport)


def _replaced(transport: str) -> None:
    """A parameter replaced by an unsharded one: sharded as it is assigned."""
    model = _build(transport, _Grows, init=False)
    model.inner.weight = nn.Parameter(torch.full((7, 7), 0.5))
    model.inner.register_parameter("extra", nn.Parameter(torch.ones(3)))
    assert zp.is_paged(model.inner.weight)
    assert zp.is_paged(model.inner.extra)
    assert torch.equal(zp.full(model.inner.weight), torch.full((7, 7), 0.5))


@everywhere
def test_assigned_parameters(transport: str, world: int) -> None:
    run(world, _replaced, transport)
