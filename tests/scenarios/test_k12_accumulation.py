"""Micro-batches add up to the joint batch, with and without no_sync, in an engine and in a plain loop."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import zeropage as zp
from tests.harness import assert_same_training, run
from tests.harness.models import build_mlp, mlp_batch
from tests.scenarios.beside import everywhere, plain_copy

MICRO = 3


@everywhere
def test_three_micro_batches(transport: str, world: int) -> None:
    for engine in (True, False):
        assert_same_training(
            build_mlp, mlp_batch, accumulate=MICRO, steps=3, world=world, transport=transport, engine=engine
        )


def _joint_batch(transport: str) -> None:
    """Whatever way the micro-batches go, the step is that of one backward over all of them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    plain = plain_copy(build_mlp)
    joint = torch.cat([mlp_batch(0, micro, r) for micro in range(MICRO) for r in range(world)])
    plain(joint).square().mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for way in ("step after each", "no_sync", "loss.backward", "step by hand"):
        model = plain_copy(build_mlp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accumulate = 1 if way == "step by hand" else MICRO
        engine = zp.Engine(model, optimizer, {"transport": transport, "accumulate": accumulate})
        for micro in range(MICRO):
            last = micro == MICRO - 1
            if way == "no_sync" and not last:
                with engine.no_sync():
                    engine.backward(_loss(engine, micro, rank))
                    assert not engine.step().applied
                continue
            if way == "loss.backward":
                (_loss(engine, micro, rank) / MICRO).backward()
            elif way == "step by hand":
                engine.backward(_loss(engine, micro, rank) / MICRO)
                if not last:
                    continue
            else:
                engine.backward(_loss(engine, micro, rank))
            result = engine.step()
            assert result.applied is last
            assert result.reason == ("" if last else "accumulating")
            assert (result.grad_norm is not None) is last
        assert engine.global_step == 1
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(zp.full(p), q.detach(), rtol=1e-5, atol=1e-7, msg=f"{way}: {name}")
        assert all(p.grad is None for p in model.parameters())
        engine.close()


def _loss(model: nn.Module, micro: int, rank: int) -> torch.Tensor:
    return model(mlp_batch(0, micro, rank)).square().mean()


@everywhere
def test_equals_the_joint_batch(transport: str, world: int) -> None:
    run(world, _joint_batch, transport)
