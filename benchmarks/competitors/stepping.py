"""B5: only the optimizer's step, on 16-bit gradients, with clipping and 16-bit weights out.

Norms agree where one rank has all gradients: torch's are of a rank's own share here.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from benchmarks.competitors.base import Job, optimizer_settings
from benchmarks.competitors.plain import Masters
from zeropage.bench.stepping import CLIP, WIDTH, Stepping, Weights, gradient

__all__ = ["NUMEL", "Torch", "Zeropage"]

_COUNT = 48
NUMEL = _COUNT * WIDTH**2


def _every_core() -> None:
    """As torch starts a process that nobody has bound: on all cores, with as many threads."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    torch.set_num_threads(os.cpu_count() or 1)


class Zeropage(Stepping):
    def __init__(self, job: Job, *, unbound: bool = False, **settings: Any) -> None:
        if unbound:
            _every_core()
        super().__init__(_COUNT, {"precision": "bf16"} | settings, optimizer_settings())

    def facts(self) -> dict[str, Any]:
        return {}


class Torch:
    """Gradients cast to fp32, their norm taken and clipped, AdamW (fused) on fp32 masters, weights cast back.

    Every rank steps its share of them. `one`: everything lies in one flat tensor, as a library may arrange it.
    """

    def __init__(self, job: Job, *, one: bool = False, unbound: bool = False) -> None:
        if unbound:
            _every_core()
        torch.manual_seed(0)
        self.model = Weights(_COUNT // job.world).bfloat16()
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
