"""Parameters of several dtypes live in one model and in one optimizer group, each with its own dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness import assert_same_training
from tests.harness.models import mlp_batch
from tests.scenarios.beside import everywhere


class _Mixed(nn.Module):
    """A frozen bf16 base with fp32 adapters, an fp32 norm, a trained bf16 layer, fp64 scales and int8 data."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(7, 17).to(torch.bfloat16).requires_grad_(False)
        self.down = nn.Linear(7, 3, bias=False)
        self.up = nn.Linear(3, 17, bias=False)
        self.norm = nn.LayerNorm(17)
        self.frozen_norm = nn.LayerNorm(17).requires_grad_(False)
        self.trained = nn.Linear(17, 5).to(torch.bfloat16)
        self.scale = nn.Parameter(torch.rand(5, dtype=torch.float64))
        self.codes = nn.Parameter(torch.randint(-8, 8, (5,), dtype=torch.int8), requires_grad=False)
        self.register_buffer("table", torch.randint(-128, 127, (17,), dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        base = self.base(x.bfloat16()).float() + self.up(self.down(x))
        hidden = self.frozen_norm(self.norm(base)) + self.table / 128
        return self.trained(hidden.bfloat16()).float() * self.scale.float() + self.codes


DTYPES = {
    "base.weight": torch.bfloat16,
    "base.bias": torch.bfloat16,
    "down.weight": torch.float32,
    "up.weight": torch.float32,
    "norm.weight": torch.float32,
    "norm.bias": torch.float32,
    "frozen_norm.weight": torch.float32,
    "frozen_norm.bias": torch.float32,
    "trained.weight": torch.bfloat16,
    "trained.bias": torch.bfloat16,
    "scale": torch.float64,
    "codes": torch.int8,
    "table": torch.int8,
}


def _dtypes(model: nn.Module, engine: Any) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def _trainable(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """All trainable ones in one group, whatever their dtype."""
    return torch.optim.AdamW([p for p in parameters if p.dtype != torch.int8], lr=1e-2, weight_decay=0.1)


@everywhere
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
@pytest.mark.parametrize("init", [False, True])
def test_each_keeps_its_dtype(init: bool, bucket_bytes: int, transport: str, world: int) -> None:
    done = assert_same_training(
        _Mixed,
        mlp_batch,
        optimizer=_trainable,
        world=world,
        transport=transport,
        steps=2,
        init=init,
        config={"bucket_bytes": bucket_bytes},
        inspect=_dtypes,
    )
    assert all(rank.extra == DTYPES for rank in done.ranks)


def _plain_precision(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


class _Teacher(nn.Module):
    """A frozen fp32 part before a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(7, 17).requires_grad_(False)
        self.student = nn.Linear(17, 5)
        self.register_buffer("mean", torch.rand(7))

    def forward(self, x: Tensor) -> Tensor:
        return self.student(torch.tanh(self.teacher(x - self.mean)).to(self.student.weight.dtype))


@everywhere
@pytest.mark.parametrize("cast_frozen", [False, True])
def test_precision_casts_frozen_parameters_only_if_asked(cast_frozen: bool, transport: str, world: int) -> None:
    done = assert_same_training(
        _Teacher,
        _bf16_batch if cast_frozen else mlp_batch,
        optimizer=_plain_precision,
        world=world,
        transport=transport,
        steps=2,
        config={"precision": "bf16", "cast_frozen": cast_frozen},
        inspect=_dtypes,
        loss=_cast_loss if cast_frozen else _loss,
    )
    frozen = torch.bfloat16 if cast_frozen else torch.float32
    for rank in done.ranks:
        assert rank.extra["teacher.weight"] == rank.extra["teacher.bias"] == frozen
        assert rank.extra["student.weight"] == torch.bfloat16
        assert rank.extra["mean"] == torch.float32


def _bf16_batch(step: int, micro: int, rank: int) -> Tensor:
    return mlp_batch(step, micro, rank)


def _loss(model: Any, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def _cast_loss(model: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).float().square().mean()
