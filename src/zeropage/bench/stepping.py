"""Only the optimizer's step, with clipping: AdamW (fused) over square matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zeropage.construct import init
from zeropage.engine import Engine

__all__ = ["CLIP", "WIDTH", "Stepping", "Weights", "gradient"]

WIDTH = 1024
CLIP = 1.0


class Weights(nn.Module):
    """`count` square matrices; the loss is a product with constants, so that backward hands these out as gradients."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(count))

    def forward(self, gradient: Tensor) -> Tensor:
        return torch.stack([(weight * gradient).sum() for weight in self.weights]).sum()


def gradient(index: int) -> Tensor:
    """What every matrix gets as its gradient in repeat `index`."""
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(index))


class Stepping:
    """`count` matrices over all ranks (collective); `prepare` runs backward, `once` steps and gives the norm."""

    def __init__(self, count: int, config: dict[str, Any], adam: dict[str, Any]) -> None:
        torch.manual_seed(0)
        with init({"clip_grad_norm": CLIP} | config):
            model = Weights(count)
        self.engine = Engine(model, torch.optim.AdamW(model.parameters(), fused=True, **adam))
        self._dtype = next(model.parameters()).dtype

    def prepare(self, index: int) -> None:
        self.engine.backward(self.engine(gradient(index).to(self._dtype)))

    def once(self, index: int) -> float:
        norm = self.engine.step().grad_norm
        assert norm is not None
        return norm

    def close(self) -> None:
        self.engine.close()
