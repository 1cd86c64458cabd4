"""The three reports that the project exists for, on its own interface (the third: test_bounded_memory)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zeropage as zp
from tests.harness import assert_same_training, run
from tests.harness.models import mlp_batch

TRANSPORTS = ["shared", "collective"]
WORLDS = [2, 3]
WIDTH = 7


# -- 1. a frozen teacher in 16 bits and a student in 32, in one module or in two


class Distillation(nn.Module):
    """A teacher of one dtype beside a student of another, which learns what the teacher says."""

    def __init__(self, teacher: torch.dtype, student: torch.dtype = torch.float32, *, trains: bool = False) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(WIDTH, 90), nn.Tanh(), nn.Linear(90, WIDTH)).to(teacher)
        self.student = nn.Sequential(nn.Linear(WIDTH, 30), nn.Tanh(), nn.Linear(30, WIDTH)).to(student)
        self.teacher.requires_grad_(trains)

    def forward(self, x: Tensor) -> Tensor:
        teacher, student = self.teacher[0].weight.dtype, self.student[0].weight.dtype
        return self.student(x.to(student)).float() - self.teacher(x.to(teacher)).float()


def _trainable_adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2)


def _what_each_holds(model: nn.Module, engine: zp.Engine) -> dict[str, object]:
    optimizer = engine.optimizer
    assert optimizer is not None
    return {
        "teacher dtypes": {p.dtype for p in model.teacher.parameters()},
        "teacher is sharded": all(zp.is_paged(p) for p in model.teacher.parameters()),
        "teacher has a gradient": any(p.grad is not None for p in model.teacher.parameters()),
        "states": len(optimizer.state),
        "gradient bytes": engine.memory().gradients,
        "shard elements": sum(zp.local(p).numel() for p in model.teacher.parameters()),
    }


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_frozen_teacher_of_another_dtype(dtype: torch.dtype, transport: str, world: int) -> None:
    same = assert_same_training(
        partial(Distillation, dtype), mlp_batch, world=world, transport=transport,
        optimizer=_trainable_adamw, inspect=_what_each_holds,
    )  # fmt: skip
    student = 30 * WIDTH + 30 + WIDTH * 30 + WIDTH
    teacher = 90 * WIDTH + 90 + WIDTH * 90 + WIDTH
    held = [record.extra for record in same.ranks]
    for seen in held:
        assert seen["teacher dtypes"] == {dtype}
        assert seen["teacher is sharded"] is True
        assert seen["teacher has a gradient"] is False
        assert seen["states"] == 4
    assert sum(seen["gradient bytes"] for seen in held) == 4 * student
    assert sum(seen["shard elements"] for seen in held) == teacher


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_trainable_dtypes(transport: str, world: int) -> None:
    build = partial(Distillation, torch.bfloat16, trains=True)
    assert_same_training(build, mlp_batch, world=world, transport=transport, optimizer=_trainable_adamw)


def _teacher_in_a_module_of_its_own(transport: str) -> list[float]:
    """Losses of a student whose teacher was built sharded, apart, and given to no engine."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    with zp.init({"transport": transport}):
        whole = Distillation(torch.float16)
    teacher, student = whole.teacher, whole.student
    alone = nn.Sequential(*student)
    engine = zp.Engine(alone, torch.optim.AdamW(alone.parameters(), lr=1e-2))
    losses = []
    for step in range(3):
        x = mlp_batch(step, 0, rank)
        with torch.no_grad():
            wanted = teacher(x.half()).float()
        loss = (engine(x) - wanted).square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    engine.close()
    torch.distributed.barrier()
    return losses


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_teacher_without_an_engine(transport: str) -> None:
    found = run(2, _teacher_in_a_module_of_its_own, transport)
    torch.manual_seed(0)
    plain = Distillation(torch.float16)
    optimizer = torch.optim.AdamW(plain.student.parameters(), lr=1e-2)
    for step in range(3):
        for rank in range(2):
            loss = plain(mlp_batch(step, 0, rank)).square().mean()
            assert found[rank][step] == loss.item()
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


# -- 2. weights used outside their own module; saved or resumed before the first forward; a skipped step


class AttentionPool(nn.Module):
    """CLIP's pooling: the weights of four Linear modules go straight into one functional call."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        pooled, _ = F.multi_head_attention_forward(
            x.mean(0, keepdim=True), x, x, x.shape[-1], self.heads, None,
            torch.cat([self.query.bias, self.key.bias, self.value.bias]), None, None, False, 0.0,
            self.out.weight, self.out.bias, use_separate_proj_weight=True, training=self.training,
            q_proj_weight=self.query.weight, k_proj_weight=self.key.weight, v_proj_weight=self.value.weight,
            need_weights=False,
        )  # fmt: skip
        return pooled[0]


class Reader(nn.Module):
    """Pools with its attention; from step 5 on it also reads a weight of a module that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.pool = AttentionPool(16, 2)
        self.other = nn.Linear(16, 16)
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        pooled = self.pool(x)
        return pooled if self.step < 5 else pooled + pooled @ self.other.weight


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


STEPS = 8
BAD_STEP = 3


def _engine(transport: str, precision: str | None) -> zp.Engine:
    torch.manual_seed(0)
    model = Reader()
    config: dict[str, object] = {"transport": transport}
    if precision == "fp16":
        config |= {"precision": "fp16", "loss_scale": {"initial": 64.0, "hysteresis": 1}}
    return zp.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config)


def _train(engine: zp.Engine, steps: range, *, bad: bool, half: bool) -> list[tuple[float, bool]]:
    rank = torch.distributed.get_rank()
    seen = []
    for step in steps:
        engine.module.step = step
        x = _batch(step, rank)
        loss = engine(x.half() if half else x).float().square().mean()
        value = loss.item()
        if bad and step == BAD_STEP and rank == 1:
            loss = loss * float("inf")
        engine.backward(loss)
        seen.append((value, engine.step().applied))
    return seen


def _interrupted(transport: str, folder: str, precision: str | None) -> tuple[list[tuple[float, bool]], ...]:
    """The losses without a break; and with saves before the first forward and after step 2, resumed each time."""
    fp16 = precision == "fp16"
    engine = _engine(transport, precision)
    whole = _train(engine, range(STEPS), bad=fp16, half=fp16)
    engine.close()

    engine = _engine(transport, precision)
    engine.save(folder, "untouched")
    engine.close()
    engine = _engine(transport, precision)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.zero_()
    engine.load(folder, "untouched")
    first = _train(engine, range(3), bad=fp16, half=fp16)
    engine.save(folder)
    engine.close()
    engine = _engine(transport, precision)
    assert engine.load(folder).tag == "step3"
    rest = _train(engine, range(3, STEPS), bad=fp16, half=fp16)
    engine.close()
    return whole, first + rest


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("precision", [None, "fp16"])
def test_resume_with_borrowed_weights(precision: str | None, transport: str, world: int, tmp_path: Path) -> None:
    for whole, resumed in run(world, _interrupted, transport, str(tmp_path), precision):
        assert resumed == whole
        assert [applied for _, applied in whole] == [precision is None or step != BAD_STEP for step in range(STEPS)]


class _ReaderByStep(Reader):
    """Takes the step with the batch, so that plain and sharded runs agree on it."""

    def forward(self, batch: tuple[int, Tensor]) -> Tensor:
        self.step, x = batch
        return super().forward(x)


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _numbered_batch(step: int, micro: int, rank: int) -> tuple[int, Tensor]:
    return step, _batch(step, rank)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_borrowed_weights_train_as_in_plain_torch(transport: str, world: int) -> None:
    # not Adam: the gradient of a key bias is zero but for rounding, and Adam makes full steps of that
    assert_same_training(_ReaderByStep, _numbered_batch, world=world, transport=transport, steps=STEPS, optimizer=_sgd)
