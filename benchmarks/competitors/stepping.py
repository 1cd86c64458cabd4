"""B5: only the optimizer's step, on 16-bit gradients, with clipping and 16-bit weights out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import zeropage as zp
from benchmarks.competitors.base import Job, optimizer_settings
from benchmarks.competitors.plain import Masters

__all__ = ["NUMEL", "Torch", "Zeropage"]

_COUNT, _WIDTH = 48, 1024
NUMEL = _COUNT * _WIDTH**2
_CLIP = 1.0


class _Weights(nn.Module):
    """Square matrices; the loss is a product with constants, so that backward hands these out as gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(_WIDTH, _WIDTH) for _ in range(_COUNT))

    def forward(self, gradient: Tensor) -> Tensor:
        return torch.stack([(weight * gradient).sum() for weight in self.weights]).sum()


def _gradient(index: int) -> Tensor:
    return torch.randn(_WIDTH, _WIDTH, generator=torch.Generator().manual_seed(index)).bfloat16()


class Zeropage:
    def __init__(self, job: Job, **settings: Any) -> None:
        torch.manual_seed(0)
        with zp.init({"precision": "bf16", "clip_grad_norm": _CLIP} | settings):
            model = _Weights()
        self.engine = zp.Engine(model, torch.optim.AdamW(model.parameters(), fused=True, **optimizer_settings()))

    def prepare(self, index: int) -> None:
        self.engine.backward(self.engine(_gradient(index)))

    def once(self, index: int) -> float:
        norm = self.engine.step().grad_norm
        assert norm is not None
        return norm

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.engine.close()


class Torch:
    """Gradients cast to fp32, their norm taken and clipped, AdamW (fused) on fp32 masters, weights cast back.

    `one`: everything lies in one flat tensor, as a library may arrange it.
    """

    def __init__(self, job: Job, *, one: bool = False) -> None:
        torch.manual_seed(0)
        self.model = _Weights().bfloat16()
        self.parameters = list(self.model.parameters())
        if one:
            self.parameters = [nn.Parameter(torch.cat([p.detach().flatten() for p in self.parameters]))]
        self.masters = Masters([(p, 0, p.numel()) for p in self.parameters], _CLIP)

    def prepare(self, index: int) -> None:
        gradient = _gradient(index)
        for parameter in self.parameters:
            parts = parameter.numel() // gradient.numel()
            parameter.grad = gradient.flatten().repeat(parts).view_as(parameter)

    def once(self, index: int) -> float:
        self.masters.step()
        return self.masters.norm

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...
