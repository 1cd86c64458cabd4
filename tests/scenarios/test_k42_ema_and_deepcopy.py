"""An exponential average of the weights: a deep copy of a sharded model, updated slice by slice."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zeropage as zp
from tests.harness import run
from tests.harness.models import build_tied_lm, lm_batch, next_token
from tests.scenarios.beside import averaged_backward, everywhere, plain_copy, same, same_parameters


@torch.no_grad()
def _lerp(average: nn.Module, model: nn.Module) -> None:
    for kept, new in zip(average.parameters(), model.parameters(), strict=True):
        kept.lerp_(new, 0.1)


@torch.no_grad()
def _foreach(average: nn.Module, model: nn.Module) -> None:
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.1)


@torch.no_grad()
def _by_hand(average: nn.Module, model: nn.Module) -> None:
    for kept, new in zip(average.parameters(), model.parameters(), strict=True):
        kept.data.mul_(0.9).add_(new.data, alpha=0.1)


@torch.no_grad()
def _gathered(average: nn.Module, model: nn.Module) -> None:
    gather = zp.gather([*average.parameters(), *model.parameters()], writer=0)
    with gather:
        for kept, new in zip(average.parameters(), model.parameters(), strict=True):
            kept.lerp_(new, 0.1)


WAYS = {"lerp": _lerp, "foreach": _foreach, "by hand": _by_hand, "gathered": _gathered}


def _scenario(transport: str, folder: Path) -> None:
    for name, update in WAYS.items():
        plain, rank = plain_copy(build_tied_lm), dist.get_rank()
        model = zp.shard(plain_copy(build_tied_lm), {"transport": transport})
        model.embedding.weight.note = ["kept"]  # an attribute of the user's own
        plain_average, average = copy.deepcopy(plain), copy.deepcopy(model)
        assert all(zp.is_paged(p) for p in average.parameters())
        assert average.embedding.weight is average.head.weight
        assert average.embedding.weight is not model.embedding.weight
        assert average.embedding.weight.note == ["kept"]
        assert average.embedding.weight.note is not model.embedding.weight.note
        reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        engine = zp.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        for step in range(3):
            averaged_backward(plain.parameters(), lambda r, step=step: next_token(plain, lm_batch(step, 0, r)))
            reference.step()
            reference.zero_grad()
            engine.backward(next_token(engine, lm_batch(step, 0, rank)))
            engine.step()
            update(plain_average, plain) if update is not _gathered else _lerp(plain_average, plain)
            update(average, model)
        same_parameters(plain, model)
        same_parameters(plain_average, average)
        with torch.no_grad():
            batch = lm_batch(9, 0, rank)
            same(next_token(plain_average, batch), next_token(average, batch), f"evaluation of {name}")
        keeper = zp.Engine(average, config={"transport": transport})
        keeper.save(folder / name.replace(" ", "-"))
        restored = zp.Engine(plain_copy(build_tied_lm, seed=7), config={"transport": transport})
        restored.load(folder / name.replace(" ", "-"), weights_only=True)
        same_parameters(plain_average, restored.module)
        for one in (restored, keeper, engine):
            one.close()


@everywhere
def test_average_of_a_training(transport: str, world: int, tmp_path: Path) -> None:
    run(world, _scenario, transport, tmp_path)


def _averaged_model(transport: str) -> None:
    """torch's own class for it."""
    plain = plain_copy(build_tied_lm)
    model = zp.shard(plain_copy(build_tied_lm), {"transport": transport})
    averages = [AveragedModel(one, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for one in (plain, model)]
    for step in range(3):
        for one, average in zip((plain, model), averages, strict=True):
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter.add_(0.1 * (step + 1))
            average.update_parameters(one)
    same_parameters(averages[0], averages[1])
    assert all(zp.is_paged(p) for p in averages[1].parameters())


@everywhere
def test_averaged_model_of_torch(transport: str, world: int) -> None:
    run(world, _averaged_model, transport)


def _independent(transport: str) -> None:
    """A copy trains by itself, and outlives the original."""
    model = zp.shard(plain_copy(build_tied_lm), {"transport": transport})
    before = zp.full(model.head.weight)
    twin = copy.deepcopy(model)
    loss = next_token(twin, lm_batch(0, 0, dist.get_rank()))
    loss.backward()
    assert twin.head.weight.grad is not None
    assert model.head.weight.grad is None
    gradient = zp.full(twin.head.weight.grad)
    del model
    torch.optim.SGD(twin.parameters(), lr=1.0).step()
    same(before - gradient, twin.head.weight)


@everywhere
def test_a_copy_is_independent(transport: str, world: int) -> None:
    run(world, _independent, transport)
