"""Two orders of layers that alternate: the trace learns them, wrong guesses cost little, and nothing is logged."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropage as zp
from tests.harness import run
from tests.scenarios.beside import averaged_backward, plain_copy, same_parameters

WIDTH, LAYERS, STEPS = 16, 12, 20
PARAMETER = WIDTH * WIDTH * 4


class _Orders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor, *, backwards: bool) -> Tensor:
        for layer in reversed(self.layers) if backwards else self.layers:
            x = torch.tanh(layer(x))
        return x


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(31 * step + rank))


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _scenario(readahead: bool) -> tuple[list[str], list[int], list[int], int, int]:
    """Log lines, gathers asked for and bytes moved by step, pages read ahead and used, and wasted."""
    listener = _Listener()
    logging.getLogger("zeropage").addHandler(listener)
    config = {
        "transport": "collective",
        "readahead": readahead,
        "bucket_bytes": 4 * PARAMETER,
        "resident_bytes": 8 * PARAMETER,
    }
    plain, model = plain_copy(_Orders), plain_copy(_Orders)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    engine = zp.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config)
    counters = engine.pagers[0].counters
    faults, moved = [], []
    for step in range(STEPS):
        backwards = step % 2 == 1
        averaged_backward(
            plain.parameters(),
            lambda rank, step=step, b=backwards: plain(_batch(step, rank), backwards=b).square().mean(),
        )
        reference.step()
        reference.zero_grad()
        before = counters.faults, counters.bytes_moved
        engine.backward(engine(_batch(step, dist.get_rank()), backwards=backwards).square().mean())
        faults.append(counters.faults - before[0])
        moved.append(counters.bytes_moved - before[1])
        engine.step()
    same_parameters(plain, model)
    found = listener.lines, faults, moved, counters.readahead_used, counters.readahead_wasted
    engine.close()
    logging.getLogger("zeropage").removeHandler(listener)
    return found


def test_alternation_is_learnt() -> None:
    needed = 2 * LAYERS  # each layer in forward and in backward
    for lines, faults, moved, used, wasted in run(2, _scenario, True):
        assert lines == []
        late = range(STEPS // 2, STEPS)
        assert max(faults[step] for step in late) <= needed * 3 // 4, "one message brings several layers"
        assert max(moved[step] for step in late) <= (needed + 6) * PARAMETER, "little is gathered for nothing"
        assert wasted <= used // 4
    for lines, faults, _, used, wasted in run(2, _scenario, False):
        assert lines == []
        assert used == wasted == 0
        assert max(faults) <= needed
