"""B5: only the optimizer's step, on 16-bit gradients, with clipping and 16-bit weights out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.competitors.base import Job, optimizer_settings
from benchmarks.competitors.plain import Masters
from zeropage.bench.stepping import CLIP, WIDTH, Stepping, Weights, gradient

__all__ = ["NUMEL", "Torch", "Zeropage"]

_COUNT = 48
NUMEL = _COUNT * WIDTH**2


class Zeropage(Stepping):
    def __init__(self, job: Job, **settings: Any) -> None:
        super().__init__(_COUNT, {"precision": "bf16"} | settings, optimizer_settings())

    def facts(self) -> dict[str, Any]:
        return {}


class Torch:
    """Gradients cast to fp32, their norm taken and clipped, AdamW (fused) on fp32 masters, weights cast back.

    `one`: everything lies in one flat tensor, as a library may arrange it.
    """

    def __init__(self, job: Job, *, one: bool = False) -> None:
        torch.manual_seed(0)
        self.model = Weights(_COUNT).bfloat16()
        self.parameters = list(self.model.parameters())
        if one:
            self.parameters = [nn.Parameter(torch.cat([p.detach().flatten() for p in self.parameters]))]
        self.masters = Masters([(p, 0, p.numel()) for p in self.parameters], CLIP)

    def prepare(self, index: int) -> None:
        one = gradient(index).bfloat16()
        for parameter in self.parameters:
            parts = parameter.numel() // one.numel()
            parameter.grad = one.flatten().repeat(parts).view_as(parameter)

    def once(self, index: int) -> float:
        self.masters.step()
        return self.masters.norm

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...
