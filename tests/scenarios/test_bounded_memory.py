"""Building, initialising and editing take the shards plus one parameter; training stays under the budget."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zeropage as zp
from tests.harness import run
from tests.harness.allocations import allocations

WIDTH = 256
LAYERS = 12
PARAMETER = WIDTH * WIDTH * 4  # bytes of the largest one
SLACK = PARAMETER // 4  # biases, indices, messages


def _model() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def _shards(model: nn.Module, transport: str) -> int:
    """Bytes of this rank's shards that torch's allocator knows of."""
    if transport == "shared":
        return 0
    return sum(zp.local(p).numel() * 4 for p in model.parameters())


def _building(transport: str) -> dict[str, tuple[int, int]]:
    """By phase: the peak of bytes allocated, and what the shards alone take."""
    peaks = {}
    with allocations() as built, zp.init({"transport": transport}):
        model = _model()
    peaks["build"] = (built.peak, _shards(model, transport))
    with allocations() as drawn, torch.no_grad():
        for parameter in model.parameters():
            nn.init.normal_(parameter)
    peaks["random initialisation"] = (drawn.peak, 0)
    with allocations() as edited, torch.no_grad(), zp.gather(model.parameters(), writer=0):
        for parameter in model.parameters():
            parameter.add_(1.0)
            parameter[0] = 7.0
    peaks["edit of all parameters"] = (edited.peak, 0)
    peaks["first row after the edit"] = (int(zp.full(model[0].weight)[0].sum()), 0)
    return peaks


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("transport", ["shared", "collective"])
def test_construction_takes_one_parameter_beyond_the_shards(transport: str, world: int) -> None:
    for peaks in run(world, _building, transport):
        assert peaks.pop("first row after the edit") == (7 * WIDTH, 0)
        for phase, (peak, shards) in peaks.items():
            assert peak <= shards + PARAMETER + SLACK, f"{phase}: {peak:,} bytes, shards take {shards:,}"


class _Stumbles(nn.Module):
    """Raises in the middle of its forward when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, *, stumble: bool = False) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if stumble and index == LAYERS // 2:
                raise KeyError("in the middle of forward")
            x = x + torch.tanh(layer(x))
        return x


def _under_budget(budget: int) -> tuple[int, int, int, int, int]:
    """Peak of resident bytes, resident bytes after each of three phases, largest bytes alive in a backward."""
    model = _Stumbles()
    engine = zp.Engine(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), {"transport": "collective", "resident_bytes": budget}
    )
    x = torch.randn(4, WIDTH)
    loss = engine(x).square().mean()
    engine.backward(loss)
    engine.step()
    trained = engine.memory().frames
    with torch.no_grad():
        for _ in range(20):
            engine(x)
    evaluated = engine.memory().frames
    with pytest.raises(KeyError):
        engine(x, stumble=True)
    stumbled = engine.memory().frames
    with allocations() as used:
        loss = engine(x).square().mean()
        engine.backward(loss)
    peak = engine.memory().peak_frames
    engine.close()
    return peak, trained, evaluated, stumbled, used.peak


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("pages", [0, 1, 3])
def test_resident_bytes_stay_under_the_budget(pages: int, world: int) -> None:
    budget = pages * PARAMETER
    for peak, *phases, used in run(world, _under_budget, budget):
        assert peak <= budget + PARAMETER
        assert all(phase <= budget + PARAMETER for phase in phases)
        # what a backward takes besides: a gradient, the part received, activations
        assert used <= budget + 4 * PARAMETER, f"{used:,} bytes beyond shards and sums"
