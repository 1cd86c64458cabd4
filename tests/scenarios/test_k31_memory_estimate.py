"""K31: what a rank will hold is told before anything is allocated, and is what it holds then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import zeropage as zp
from tests.harness import run
from zeropage.errors import ConfigError

OPTIMIZERS = {
    "AdamW": lambda model: optim.AdamW(model.parameters(), lr=1e-3),
    "AdamW amsgrad": lambda model: optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True),
    "SGD": lambda model: optim.SGD(model.parameters(), lr=1e-3),
    "SGD momentum": lambda model: optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
}


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(256, 256).requires_grad_(False)
        self.inner = nn.Linear(256, 512)
        self.outer = nn.Linear(512, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(
            torch.relu(self.inner(self.frozen(x.to(self.frozen.weight.dtype)).to(self.inner.weight.dtype)))
        )


def _held(config: dict[str, Any], kind: str) -> tuple[zp.MemoryReport, zp.MemoryReport]:
    """What was told, and what is held after two steps."""
    told_model = _Model()
    told = zp.estimate_memory(told_model, OPTIMIZERS[kind](told_model), config, world=2)
    model = _Model()
    with zp.Engine(model, OPTIMIZERS[kind](model), config) as engine:
        for _ in range(2):
            engine.backward(engine(torch.randn(4, 256)).float().square().mean())
            engine.step()
        return told, engine.memory()


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"precision": "bf16"},
        {"precision": "bf16", "cast_frozen": True, "reduce_dtype": "bf16"},
        {"precision": "bf16", "transport": "collective"},
    ],
    ids=["fp32", "bf16", "all bf16", "collective"],
)
def test_what_was_told_is_held(config: dict[str, Any], kind: str) -> None:
    for told, held in run(2, _held, config, kind):
        assert told.parameters == pytest.approx(held.parameters, rel=0.1)
        assert told.gradients == pytest.approx(held.gradients, rel=0.1)
        assert told.optimizer == pytest.approx(held.optimizer, rel=0.1, abs=64)  # the numbers of steps
        assert held.peak_frames <= told.peak_frames


@pytest.mark.parametrize("where", [{"optimizer": "disk"}, {"parameters": "disk", "optimizer": "disk"}])
def test_what_goes_to_the_disk_is_told(where: dict[str, str], tmp_path: Path) -> None:
    config = {"precision": "bf16", "offload": {**where, "folder": str(tmp_path)}}
    for told, held in run(2, _held, config, "AdamW"):
        assert told.by_device["disk"] == pytest.approx(held.by_device["disk"], rel=0.1)
        in_memory = sum(nbytes for place, nbytes in held.by_device.items() if place != "disk")
        assert told.by_device["memory"] == pytest.approx(in_memory, rel=0.1)


def test_nothing_is_allocated() -> None:
    with torch.device("meta"):
        model = nn.Linear(1 << 20, 1 << 20)  # 4 TB
    told = zp.estimate_memory(model, optim.AdamW(model.parameters()), {"precision": "bf16"}, world=1024)
    assert told.parameters + told.optimizer == pytest.approx(14 * (2**40 + 2**20) / 1024, rel=1e-6)


def test_what_cannot_be_told_is_refused() -> None:
    model = nn.Linear(8, 8, bias=False)
    with pytest.raises(ConfigError, match="Muon"):
        zp.estimate_memory(model, optim.Muon(model.parameters(), lr=1e-3))
    with pytest.raises(ConfigError, match="does not belong"):
        zp.estimate_memory(model, optim.SGD(nn.Linear(2, 2).parameters(), lr=1e-3))
