"""fp16 with a dynamic loss scale, saved beside training while a step overflows; resumed as if there were no break.

All ranks have the same batch, so one rank and two have the same gradients to the bit.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropage as zp
from tests.harness import run
from tests.harness.models import build_mlp, mlp_batch
from tests.scenarios.beside import plain_copy

STEPS = 12
OVERFLOWS = (3, 4, 5)
SAVES = (2, 3)  # after these steps: an overflow comes while the first is written, and the second holds a lowered scale


@dataclass
class Trace:
    """What each step told, and where it ended."""

    steps: list[tuple[bool, float, float]]  # applied, scale, rate
    counts: tuple[int, int]
    weights: dict[str, Tensor]
    masters: dict[str, Tensor]


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x.half()).float().square().mean()


def _engine(transport: str) -> zp.Engine:
    model = plain_copy(build_mlp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.75)
    config = {
        "transport": transport,
        "timeout_s": 20,
        "precision": "fp16",
        "loss_scale": {"initial": 1024.0, "window": 3, "hysteresis": 2},
    }
    return zp.Engine(model, optimizer, config, lr_scheduler=scheduler)


def _overflow(gradient: Tensor) -> Tensor:
    return gradient * float("inf")


def _step(engine: zp.Engine, step: int) -> tuple[bool, float, float]:
    loss = _loss(engine, mlp_batch(step, 0, 0))
    if step in OVERFLOWS and dist.get_rank() == dist.get_world_size() - 1:
        loss.register_hook(_overflow)
    engine.backward(loss)
    result = engine.step()
    assert result.applied is (step not in OVERFLOWS)
    return result.applied, result.loss_scale, engine.lr


def _trace(engine: zp.Engine, steps: list[tuple[bool, float, float]]) -> Trace:
    sharded = engine.sharded_optimizer
    assert sharded is not None and engine.optimizer is not None
    weights = {name: zp.full(p).detach() for name, p in engine.module.named_parameters()}
    exact = {f"{name}.{key}": zp.full(v) for name, p in engine.module.named_parameters()
             for key, v in engine.optimizer.state[p].items()}  # fmt: skip
    trace = Trace(steps, (engine.global_step, engine.skipped_steps), weights, exact)
    engine.close()
    return trace


class _HeldDisk:
    """Files reach the disk only when `release` is called: saves stay in flight."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._free = threading.Event()
        fsync = os.fsync

        def held(file: int) -> None:
            assert self._free.wait(30)
            fsync(file)

        patch.setattr(os, "fsync", held)

    def release(self) -> None:
        self._free.set()


def _saves_beside_overflows(transport: str, folder: Path) -> Trace:
    engine = _engine(transport)
    steps = []
    for step in range(STEPS):
        with pytest.MonkeyPatch.context() as patch:
            if step - 1 in SAVES:
                disk = _HeldDisk(patch)
                engine.save(folder, tag=f"after{step - 1}", client_state={"next": step}, wait=False)
            steps.append(_step(engine, step))
            if step - 1 in SAVES:
                assert not (folder / f"after{step - 1}").exists(), "it was still written while the step overflowed"
                disk.release()
                engine.save(folder, tag="flush")  # returns when the one before is done
    return _trace(engine, steps)


def _resumes(transport: str, folder: Path, tag: str) -> tuple[int, Trace]:
    engine = _engine(transport)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.zero_()
    first: Any = engine.load(folder, tag).client_state["next"]
    return first, _trace(engine, [_step(engine, step) for step in range(first, STEPS)])


def _same_values(found: dict[str, Tensor], expected: dict[str, Tensor], *, exact: bool) -> None:
    assert list(found) == list(expected)
    for name, value in found.items():
        if exact:
            assert torch.equal(value, expected[name]), name
        else:
            torch.testing.assert_close(value, expected[name], rtol=1e-2, atol=1e-3, msg=name)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("transport", ["shared", "collective"])
def test_an_overflow_while_a_save_is_written(transport: str, world: int, tmp_path: Path) -> None:
    expected = run(2, _saves_beside_overflows, transport, tmp_path)[0]
    scales = [scale for _, scale, _ in expected.steps]
    assert len(set(scales)) >= 3 and expected.counts == (STEPS - len(OVERFLOWS), len(OVERFLOWS)), scales
    for save in SAVES:
        config = "local" if world == 1 else transport
        for first, found in run(world, _resumes, config, tmp_path, f"after{save}"):
            assert first == save + 1
            assert found.steps == expected.steps[first:]
            assert found.counts == expected.counts
            _same_values(found.weights, expected.weights, exact=world <= 2)
            _same_values(found.masters, expected.masters, exact=world <= 2)
