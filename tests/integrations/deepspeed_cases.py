"""What the tests of the DeepSpeed-shaped face share: configurations, and a plain training beside a sharded one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.harness.models import build_mlp, mlp_batch
from tests.scenarios.beside import averaged_backward, plain_copy
from zeropage.deepspeed.engine import DeepSpeedEngine
from zeropage.deepspeed.initialization import initialize

__all__ = ["Beside", "config", "engine_of", "loss_of"]


def config(**changes: Any) -> dict[str, Any]:
    """Stage 3 without clipping; `changes` on top."""
    return {
        "train_micro_batch_size_per_gpu": 3,
        "zero_optimization": {"stage": 3},
        "gradient_clipping": 0.0,
    } | changes


def loss_of(model: Callable[[Tensor], Tensor], step: int, micro: int, rank: int) -> Tensor:
    return model(mlp_batch(step, micro, rank)).square().mean()


def engine_of(model: nn.Module, optimizer: Any = None, **changes: Any) -> DeepSpeedEngine:
    engine, *_ = initialize(model=model, optimizer=optimizer, config=config(**changes))
    return engine


class Beside:
    """A plain model with its optimizer, trained on the average over ranks, and a copy to shard."""

    def __init__(
        self,
        optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, lr=1e-2),
        clip: float | None = None,
        build: Callable[[], nn.Module] = build_mlp,
    ) -> None:
        self.plain, self.model = plain_copy(build), plain_copy(build)
        self.make = optimizer
        self.optimizer = optimizer(self.plain.parameters())
        self.clip = clip

    def step(self, micro_batches: Sequence[tuple[int, int]]) -> float:
        """One step of the plain model on (step, micro) of all ranks; the gradient's norm before clipping."""
        for step, micro in micro_batches:
            averaged_backward(
                self.plain.parameters(),
                lambda rank, s=step, m=micro: loss_of(self.plain, s, m, rank) / len(micro_batches),
            )
        norm = nn.utils.clip_grad_norm_(self.plain.parameters(), self.clip or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)


def rank() -> int:
    return dist.get_rank()
