"""Optimizer state that was read before a step shows the step's values when it is read again."""

from __future__ import annotations

import torch
import torch.distributed as dist

import zeropage as zp
from tests.harness import run
from tests.harness.models import build_mlp, mlp_batch
from tests.scenarios.beside import averaged_backward, everywhere, plain_copy, same


def _read_between(transport: str) -> None:
    plain, model = plain_copy(build_mlp), plain_copy(build_mlp)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = zp.Engine(model, optimizer, {"transport": transport})
    for step in range(3):
        averaged_backward(plain.parameters(), lambda rank, s=step: plain(mlp_batch(s, 0, rank)).square().mean())
        reference.step()
        reference.zero_grad()
        engine.backward(engine(mlp_batch(step, 0, dist.get_rank())).square().mean())
        engine.step()
        for name, parameter in model.named_parameters():
            for key in ("exp_avg", "exp_avg_sq"):
                expected = reference.state[plain.get_parameter(name)][key]
                same(expected, optimizer.state[parameter][key], f"{name}.{key} after step {step}")
    engine.close()


@everywhere
def test_read_between_steps(transport: str, world: int) -> None:
    run(world, _read_between, transport)
