"""Message sizes, budgets and readahead change speed and memory, never a bit of the result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zeropage as zp
from tests.harness import run
from tests.harness.models import LM, lm_batch, next_token
from tests.scenarios.beside import plain_copy

STEPS = 2
PARAMETER = 17 * 6 * 4  # bytes of the largest one


class _Unused(LM):
    """One layer never runs."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.unused = nn.Linear(7, 5)


def _settings() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{}]
    for bucket_bytes in (1, PARAMETER, 1 << 26):
        for resident_bytes in (0, 1 << 26):
            for readahead in (True, False):
                found.append({"bucket_bytes": bucket_bytes, "resident_bytes": resident_bytes, "readahead": readahead})
    found.append({"resident_bytes": 0, "poison_frames": True})
    found.append({"resident_bytes": PARAMETER, "poison_frames": True})
    return found


Result = tuple[list[float | None], torch.Tensor]


def _train(transport: str, settings: dict[str, Any]) -> Result:
    """Losses and norms, and the weights at the end."""
    model = plain_copy(_Unused)
    config = {"transport": transport, "clip_grad_norm": 1.0, **settings}
    engine = zp.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config)
    numbers: list[float | None] = []
    for step in range(STEPS):
        loss = next_token(engine, lm_batch(step, 0, torch.distributed.get_rank()))
        engine.backward(loss)
        assert model.unused.weight.grad is None
        numbers += [loss.item(), engine.step().grad_norm]
    weights = torch.cat([zp.full(p).flatten() for p in model.parameters()])
    engine.close()
    return numbers, weights


def _sweep() -> tuple[Result, list[Result]]:
    return _train("shared", {}), [_train("collective", settings) for settings in _settings()]


@pytest.mark.slow
def test_all_settings_give_the_same_bits() -> None:
    for (numbers, weights), found in run(2, _sweep):
        for settings, (other_numbers, other_weights) in zip(_settings(), found, strict=True):
            assert other_numbers == numbers, settings
            assert torch.equal(other_weights, weights), settings
