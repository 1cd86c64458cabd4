"""Blocks are frozen and unfrozen in the middle of a run; optimizer states stay, also over a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zeropage as zp
from tests.harness import assert_same_training, run
from tests.harness.models import LM, build_lm, lm_batch, next_token
from tests.scenarios.beside import averaged_backward, everywhere, plain_copy, same, same_parameters


def _schedule(model: LM, step: int) -> None:
    """Block 0 frozen for two steps, all trained for two, block 1 frozen for two, all again."""
    model.blocks[0].requires_grad_(step // 2 != 0)
    model.blocks[1].requires_grad_(step // 2 != 2)


@everywhere
def test_freezing_and_unfreezing(transport: str, world: int) -> None:
    for engine in (True, False):
        assert_same_training(
            build_lm,
            lm_batch,
            loss=next_token,
            before_step=_schedule,
            steps=8,
            world=world,
            transport=transport,
            engine=engine,
        )


def _frozen_do_not_move(transport: str) -> None:
    model = zp.shard(plain_copy(build_lm), {"transport": transport})
    engine = zp.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1))
    before = {name: zp.full(p) for name, p in model.named_parameters()}
    model.blocks[0].requires_grad_(False)
    for step in range(2):
        engine.backward(next_token(engine, lm_batch(step, 0, dist.get_rank())))
        assert model.blocks[0].up.weight.grad is None
        engine.step()
    for name, parameter in model.named_parameters():
        moved = not torch.equal(before[name], zp.full(parameter))
        assert moved is not name.startswith("blocks.0."), name
    engine.close()


@everywhere
def test_frozen_parameters_are_not_even_decayed(transport: str, world: int) -> None:
    run(world, _frozen_do_not_move, transport)


def _resuming(transport: str, folder: Path) -> None:
    """A save and a resume on each border; the frozen block keeps its moments through the checkpoint."""
    plain = plain_copy(build_lm)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    engine = _engine(plain_copy(build_lm), transport)
    for step in range(8):
        if step and step % 2 == 0:
            engine.save(folder, tag=f"step{step}")
            engine.close()
            engine = _engine(plain_copy(build_lm, seed=step), transport)
            _schedule(engine.module, step)
            assert engine.load(folder).tag == f"step{step}"
            assert engine.global_step == step
        _schedule(plain, step)
        _schedule(engine.module, step)
        averaged_backward(plain.parameters(), lambda rank, step=step: next_token(plain, lm_batch(step, 0, rank)))
        reference.step()
        reference.zero_grad()
        engine.backward(next_token(engine, lm_batch(step, 0, dist.get_rank())))
        engine.step()
        same_parameters(plain, engine.module)
    kept, wanted = engine.optimizer.state, reference.state
    for (name, p), q in zip(engine.module.named_parameters(), plain.parameters(), strict=True):
        assert float(kept[p]["step"]) == float(wanted[q]["step"]) == (6.0 if name.startswith("blocks") else 8.0)
        same(wanted[q]["exp_avg"], kept[p]["exp_avg"], f"exp_avg of {name}")
    engine.close()


def _engine(model: nn.Module, transport: str) -> zp.Engine:
    return zp.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), {"transport": transport})


@everywhere
def test_save_and_resume_between(transport: str, world: int, tmp_path: Path) -> None:
    run(world, _resuming, transport, tmp_path)
