"""Optimizer groups stay as they were made: number, order, rates, schedule, empty and uneven ones, later ones."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

import zeropage as zp
from tests.harness import assert_same_training, run
from tests.harness.models import LM, build_mlp, lm_batch, mlp_batch, next_token
from tests.scenarios.beside import averaged_backward, everywhere, plain_copy, same_parameters


class _WithScalar(LM):
    """A parameter of one element: with several ranks most of them own nothing of it."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.temperature = nn.Parameter(torch.tensor([2.0]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.temperature


def _groups(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    parameters = list(parameters)
    single = [p for p in parameters if p.numel() == 1]
    vectors = [p for p in parameters if p.dim() == 1 and p.numel() > 1]
    matrices = [p for p in parameters if p.dim() > 1]
    return torch.optim.AdamW(
        [
            {"params": vectors, "lr": 0.0, "name": "still"},
            {"params": [], "lr": 0.5, "name": "empty"},
            {"params": single, "lr": 1e-3, "weight_decay": 0.0, "name": "single"},
            {"params": matrices, "lr": 1e-2, "betas": (0.8, 0.9), "name": "rest"},
        ]
    )


def _schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, [lambda n: 1.0, lambda n: n, lambda n: 0.5**n, lambda n: 1.0 / (n + 1)]
    )


def _inspect(model: nn.Module, engine: zp.Engine | None) -> list[tuple[str, int, float]]:
    assert engine is not None and engine.optimizer is not None
    return [(group["name"], len(group["params"]), group["lr"]) for group in engine.optimizer.param_groups]


@everywhere
def test_groups_rates_and_schedule(transport: str, world: int) -> None:
    done = assert_same_training(
        _WithScalar,
        lm_batch,
        loss=next_token,
        optimizer=_groups,
        scheduler=_schedule,
        steps=3,
        world=world,
        transport=transport,
        inspect=_inspect,
    )
    initial = plain_copy(_WithScalar)
    for rank in done.ranks:
        names, sizes, rates = zip(*rank.extra, strict=True)
        assert names == ("still", "empty", "single", "rest")
        assert sizes == (16, 0, 1, 10)
        assert rates == (0.0, 1.5, 1e-3 * 0.125, 1e-2 / 4)
        for name, parameter in initial.named_parameters():
            moved = not torch.equal(parameter.detach(), rank.parameters[name])
            assert moved is (parameter.dim() > 1 or parameter.numel() == 1), name


def _later(transport: str) -> None:
    """A group that is added in the middle of the training, with its own rate; rates set by hand take effect."""
    plain, model = plain_copy(build_mlp), plain_copy(build_mlp)
    reference = torch.optim.AdamW(plain.first.parameters(), lr=1e-2)
    engine = zp.Engine(model, torch.optim.AdamW(model.first.parameters(), lr=1e-2), {"transport": transport})
    for step in range(4):
        if step == 1:
            reference.add_param_group({"params": plain.third.parameters(), "lr": 1e-3})
            engine.optimizer.add_param_group({"params": model.third.parameters(), "lr": 1e-3})
        if step == 2:
            for optimizer in (reference, engine.optimizer):
                optimizer.param_groups[1]["lr"] = 5e-3
                optimizer.param_groups[0]["weight_decay"] = 0.5
        averaged_backward(plain.parameters(), lambda r, step=step: plain(mlp_batch(step, 0, r)).square().mean())
        reference.step()
        plain.zero_grad()
        engine.backward(engine(mlp_batch(step, 0, dist.get_rank())).square().mean())
        engine.step()
        same_parameters(plain, model)
    assert len(engine.optimizer.param_groups) == 2
    engine.close()


@everywhere
def test_groups_added_later(transport: str, world: int) -> None:
    run(world, _later, transport)
