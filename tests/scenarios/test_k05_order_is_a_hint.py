"""Layers dropped, evaluation in between, saving and resuming: the order of modules never decides a result."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropage as zp
from tests.harness import run
from tests.harness.models import LM, lm_batch, next_token
from tests.scenarios.beside import averaged_backward, everywhere, plain_copy, same, same_parameters


class _Dropping(LM):
    """Leaves out one block on every other step, runs them backwards on every third, skips its head when asked."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.number = 0

    def encode(self, tokens: Tensor) -> Tensor:
        blocks = list(self.blocks)
        if self.number % 2:
            del blocks[self.number // 2 % 2]
        if self.number % 3 == 0:
            blocks.reverse()
        x = self.embedding(tokens)
        for block in blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: Tensor, *, headless: bool = False) -> Tensor:
        hidden = self.encode(tokens)
        return hidden if headless else self.head(hidden)


def _scenario(transport: str, folder: Path) -> None:
    rank = dist.get_rank()
    config = {"transport": transport, "bucket_bytes": 1024, "resident_bytes": 2048}
    plain = plain_copy(_Dropping)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    engine = _engine(plain_copy(_Dropping), config)
    for round_number in range(2):
        for step in range(4 * round_number, 4 * round_number + 4):
            _train(plain, reference, engine, step)
        engine.eval()
        plain.eval()
        with torch.no_grad():
            for step in range(2):
                batch = lm_batch(100 + step, 0, rank)
                same(plain(batch, headless=True), engine(batch, headless=True))
                if step == rank:  # evaluation need not be the same on all ranks
                    same(plain.head(plain(batch, headless=True)), engine(batch))
        engine.train()
        plain.train()
        for step in range(20 + 4 * round_number, 24 + 4 * round_number):
            _train(plain, reference, engine, step)
        engine.save(folder, tag=f"round{round_number}")
        engine.close()
        engine = _engine(plain_copy(_Dropping, seed=9), config)
        engine.load(folder)
        same_parameters(plain, engine.module)
    engine.close()


def _engine(model: nn.Module, config: dict[str, object]) -> zp.Engine:
    return zp.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config)


def _train(plain: nn.Module, reference: torch.optim.Optimizer, engine: zp.Engine, step: int) -> None:
    plain.number = engine.module.number = step
    averaged_backward(plain.parameters(), lambda rank: next_token(plain, lm_batch(step, 0, rank)))
    reference.step()
    reference.zero_grad()
    engine.backward(next_token(engine, lm_batch(step, 0, dist.get_rank())))
    assert engine.step().applied


@everywhere
def test_layer_drop_evaluation_resume(transport: str, world: int, tmp_path: Path) -> None:
    run(world, _scenario, transport, tmp_path)
