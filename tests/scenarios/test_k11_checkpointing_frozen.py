"""Activation checkpointing over frozen parameters and adapters, in both of torch's kinds, with accumulation."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.harness import assert_same_training
from tests.harness.models import LM, WIDTH, lm_batch, next_token
from tests.scenarios.beside import EVERYWHERE


class _Adapted(nn.Module):
    """A frozen block with a low-rank adapter beside it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + self.up(self.down(x))


class _Checkpointed(LM):
    """Frozen norms, block 0 frozen but for its adapter, block 1 trained; all blocks recomputed in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(tied=True)
        self.reentrant = reentrant
        self.blocks[0].requires_grad_(False)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.requires_grad_(False)
        self.blocks = nn.ModuleList(_Adapted(block) for block in self.blocks)

    def encode(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.norm(x)


def _trainable(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2)


def _frames(model: nn.Module, engine: Any) -> tuple[int, bool]:
    return engine.memory().frames, all(p.grad is None for p in model.parameters() if not p.requires_grad)


@pytest.mark.parametrize(("transport", "world"), [("local", 1), *EVERYWHERE])
@pytest.mark.parametrize("reentrant", [False, True])
def test_frozen_and_adapted(reentrant: bool, transport: str, world: int) -> None:
    done = assert_same_training(
        partial(_Checkpointed, reentrant),
        lm_batch,
        loss=next_token,
        optimizer=_trainable,
        accumulate=2,
        steps=2,
        world=world,
        transport=transport,
        config={"resident_bytes": 0},
        inspect=_frames,
    )
    for rank in done.ranks:
        frames, no_gradient = rank.extra
        assert frames <= 17 * WIDTH * 4
        assert no_gradient
