"""What the runner asks of a competitor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from benchmarks import models

__all__ = ["SEED", "EngineTraining", "Job", "Training", "Work", "optimizer_settings"]

SEED = 17


def optimizer_settings() -> dict[str, Any]:
    return {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}


@dataclass(frozen=True, slots=True)
class Job:
    """A training run: everything that all competitors must do alike."""

    model: str
    tokens: int
    precision: str = "fp32"  # bf16 has fp32 masters
    accumulate: int = 1
    checkpointing: bool = False
    clip: float | None = None
    rank: int = 0
    world: int = 1

    @staticmethod
    def of(settings: Mapping[str, Any], rank: int, world: int) -> Job:
        return Job(**settings, rank=rank, world=world)

    def build(self) -> nn.Module:
        """The model, with the same values in every rank and for every competitor."""
        torch.manual_seed(SEED)
        return models.build(self.model, checkpointing=self.checkpointing)

    def batches(self, step: int) -> list[Tensor]:
        """This rank's micro-batches of that step."""
        return [
            models.tokens(self.model, self.tokens, step * self.accumulate + i, self.rank)
            for i in range(self.accumulate)
        ]


class Training:
    """What training runs have in common."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def prepare(self, index: int) -> None:
        self.batches = self.job.batches(index)

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


class EngineTraining(Training):
    """The loop of those whose engine counts micro-batches by itself."""

    engine: Any

    def once(self, index: int) -> float:
        total = 0.0
        for batch in self.batches:
            loss = self.engine(batch)
            total += loss.item()
            self.engine.backward(loss)
            self.engine.step()
        return total / len(self.batches)


class Work(Protocol):
    """Something that can be done again and again, and is timed."""

    def prepare(self, index: int) -> None:
        """What goes before the `index`-th time and is not timed."""

    def once(self, index: int) -> float | None:
        """The thing itself; a training step gives this rank's mean loss, which all competitors must agree on."""

    def facts(self) -> dict[str, Any]:
        """What else is to be written down, once a window is over."""

    def close(self) -> None: ...
