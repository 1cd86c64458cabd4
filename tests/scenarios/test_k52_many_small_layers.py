"""K52: many small layers are fetched many at a time, without anybody marking groups."""

from __future__ import annotations

import os
import resource

import torch
from torch import nn

import zeropage as zp
from tests.harness import run
from zeropage.construct import pagers_of

LAYERS = 500


def _messages_of_a_step() -> tuple[int, int]:
    """How often a layer was asked for in the fourth step, and how often pages were fetched for that."""
    with zp.init({"transport": "collective"}):
        model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(LAYERS)])
    (pager,) = pagers_of(model)
    asked = 0

    def counted(kind: str) -> None:
        inner = getattr(pager.transport, kind)

        def call(wanted: object) -> object:
            nonlocal asked
            asked += 1
            return inner(wanted)

        setattr(pager.transport, kind, call)

    counted("gather")
    counted("fetch")
    with zp.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1)) as engine:
        for _ in range(4):
            before, asked = pager.counters.faults + pager.counters.hits, 0
            engine.backward(engine(torch.ones(2, 16)).square().mean())
            engine.step()
        return pager.counters.faults + pager.counters.hits - before, asked


def test_small_layers_are_fetched_together() -> None:
    for touched, messages in run(2, _messages_of_a_step):
        assert touched >= LAYERS
        assert 0 < messages <= LAYERS // 10


def _train_with_few_descriptors() -> int:
    """How many more files are open after a step than before, where only 30 more may be."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 30, limits[1]))
    try:
        model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(LAYERS // 5)])
        engine = zp.Engine(model, torch.optim.AdamW(model.parameters()), {"transport": "shared"})
        engine.backward(engine(torch.ones(2, 16)).square().mean())
        engine.step()
        after = len(os.listdir("/proc/self/fd"))
        engine.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return after - before


def test_pages_keep_no_files_open() -> None:
    assert max(run(2, _train_with_few_descriptors)) < 10
