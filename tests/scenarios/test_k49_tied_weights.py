"""Tied weights are one parameter: one gradient with both uses, one norm, one update, both names in checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zeropage as zp
from tests.harness import assert_same_training, run
from tests.harness.models import build_lm, build_tied_lm, lm_batch, next_token
from tests.scenarios.beside import averaged_backward, everywhere, plain_copy, same, same_parameters


@everywhere
def test_training(transport: str, world: int) -> None:
    for init in (False, True):
        assert_same_training(
            build_tied_lm, lm_batch, loss=next_token, clip=0.1, world=world, transport=transport, init=init
        )


def _reset(model: nn.Module) -> None:
    """As loaders do with a model on the meta device: module by module, the tied one twice."""
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def _meta(transport: str, folder: Path) -> None:
    plain = build_tied_lm()
    _reset(plain)
    with torch.device("meta"):
        model = build_tied_lm()
    zp.shard(model, {"transport": transport})
    assert model.head.weight is model.embedding.weight
    _reset(model)
    assert model.head.weight is model.embedding.weight
    same_parameters(plain, model, exact=True)

    engine = zp.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    averaged_backward(plain.parameters(), lambda rank: next_token(plain, lm_batch(0, 0, rank)))
    engine.backward(next_token(engine, lm_batch(0, 0, dist.get_rank())))
    same(plain.embedding.weight.grad, model.head.weight.grad, "the gradient is the sum of both uses")
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    assert abs(engine.step().grad_norm - norm.item()) <= 1e-6 * norm.item()

    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    same(zp.full(model.embedding.weight), state["head.weight"], exact=True)
    engine.save(folder)
    engine.close()

    other = zp.shard(plain_copy(build_tied_lm, seed=9), {"transport": transport})
    tied = other.embedding.weight
    again = zp.Engine(other, torch.optim.AdamW(other.parameters(), lr=1e-2))
    again.load(folder)
    assert other.embedding.weight is other.head.weight is tied
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        same(zp.full(one), two, name, exact=True)
    again.close()


@everywhere
def test_from_meta_to_a_checkpoint(transport: str, world: int, tmp_path: Path) -> None:
    run(world, _meta, transport, tmp_path)


class _FarApart(nn.Module):
    """Three names for one matrix, in different blocks, one of them set by hand after construction."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(7, 7), nn.Tanh())
        self.second = nn.ModuleDict({"inner": nn.Linear(7, 7, bias=False)})
        self.third = nn.Linear(7, 7)
        self.second["inner"].weight = self.first[0].weight
        self.third.weight = self.first[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second["inner"](self.first(x)))


def _batch(step: int, micro: int, rank: int) -> torch.Tensor:
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(97 * step + rank))


@everywhere
def test_three_uses_in_different_blocks(transport: str, world: int) -> None:
    for init in (False, True):
        assert_same_training(_FarApart, _batch, world=world, transport=transport, init=init, accumulate=2)


def _tie_later(transport: str) -> None:
    """Tied after sharding: the old head is gone, the embedding stays what the optimizer is given."""
    plain = plain_copy(build_lm)
    plain.head.weight = plain.embedding.weight
    model = zp.shard(plain_copy(build_lm), {"transport": transport})
    model.head.weight = model.embedding.weight
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    engine = zp.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in range(2):
        averaged_backward(plain.parameters(), lambda rank, step=step: next_token(plain, lm_batch(step, 0, rank)))
        reference.step()
        reference.zero_grad()
        engine.backward(next_token(engine, lm_batch(step, 0, dist.get_rank())))
        engine.step()
    same_parameters(plain, model)
    engine.close()


@everywhere
def test_tied_after_sharding(transport: str, world: int) -> None:
    run(world, _tie_later, transport)
