"""What was gathered goes again: after every block, in evaluation, after an exception, with saved activations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import zeropage as zp
from tests.harness import run
from tests.harness.allocations import allocations

WIDTH, LAYERS = 64, 10
PARAMETER = WIDTH * WIDTH * 4


class _Watched(nn.Module):
    """Notes the bytes of frames after every layer; raises in the middle when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.look = lambda: 0
        self.seen: list[int] = []

    def forward(self, x: Tensor, *, stumble: bool = False) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            self.seen.append(self.look())
            if stumble and index == LAYERS // 2:
                raise KeyError("in the middle")
        return self.head(x)


def _frames(readahead: bool) -> dict[str, int]:
    """The most bytes of frames by phase."""
    model = _Watched()
    config = {"transport": "collective", "resident_bytes": 2 * PARAMETER, "bucket_bytes": 1, "readahead": readahead}
    engine = zp.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    model.look = lambda: engine.memory().frames
    x = torch.randn(3, WIDTH)
    most = {}

    def note(phase: str) -> None:
        most[phase] = max([*model.seen, engine.memory().frames])
        model.seen.clear()

    for _ in range(3):
        loss = engine(x).square().mean()
        note("forward")
        engine.backward(loss)
        note("backward")
        engine.step()
        note("step")
    with torch.no_grad():
        for _ in range(20):
            engine(x)
        note("evaluation")
    with torch.inference_mode():
        engine(x)
        note("inference")
    try:
        engine(x, stumble=True)
    except KeyError:
        note("exception")
    kept = [engine(x) for _ in range(3)]  # three graphs alive at once: they save wrappers, not weights
    note("graphs")
    sum(out.square().mean() for out in kept).backward()
    note("their backward")
    most["peak"] = engine.memory().peak_frames
    engine.close()
    most["closed"] = engine.memory().frames
    return most


def test_frames_stay_in_the_budget() -> None:
    for readahead in (False, True):
        for most in run(2, _frames, readahead):
            assert most.pop("closed") == 0
            assert most.pop("peak") > 0
            for phase, nbytes in most.items():
                assert nbytes <= 3 * PARAMETER, f"{nbytes} bytes of frames in {phase}"
                assert nbytes % PARAMETER == 0


def _growth(transport: str) -> dict[str, int]:
    """Bytes that the allocator holds more after ten more rounds than after the first ones."""
    model = _Watched()
    engine = zp.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), {"transport": transport})
    x = torch.randn(3, WIDTH)

    def train() -> None:
        engine.backward(engine(x).square().mean())
        engine.step()
        model.seen.clear()

    def evaluate() -> None:
        with torch.no_grad():
            engine(x)
        model.seen.clear()

    def read() -> None:
        zp.full(model.head.weight)
        model.head.weight.sum()

    def stumble() -> None:
        try:
            engine(x, stumble=True)
        except KeyError:
            model.seen.clear()

    grown = {}
    for round_trip in (train, evaluate, read, stumble):
        for _ in range(3):
            round_trip()
        with allocations() as used:
            for _ in range(10):
                round_trip()
        grown[round_trip.__name__] = used.end
    engine.close()
    return grown


def test_nothing_grows() -> None:
    for transport in ("shared", "collective"):
        for grown in run(2, _growth, transport):
            for what, nbytes in grown.items():
                assert nbytes < PARAMETER // 2, f"{what} over {transport} keeps {nbytes} bytes"
