"""Plain torch: an unsharded model in each rank, its gradients averaged by DDP, or no communication at all.

*Compute only* is the limit of what sharding can reach: every rank computes on all parameters, talks to nobody, and
its optimizer steps 1/N of the elements. It trains nothing sensible, so only its first loss is comparable.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.competitors.base import Job, Training, optimizer_settings

__all__ = ["ComputeOnly", "Ddp"]


class Masters:
    """AdamW (fused) on the fp32 values of the slices `[low, high)` of some parameters, each flat."""

    def __init__(self, slices: list[tuple[Tensor, int, int]], clip: float | None = None) -> None:
        self.clip = clip
        self.norm = 0.0  # before clipping, of the last step
        self.slices = [(p, p.detach().view(-1)[low:high], low, high) for p, low, high in slices]
        self.values = [part if part.dtype == torch.float32 else part.float() for _, part, _, _ in self.slices]
        for value in self.values:
            value.requires_grad_(True)
        self.optimizer = torch.optim.AdamW(self.values, fused=True, **optimizer_settings())

    @torch.no_grad()
    def step(self) -> None:
        for (parameter, _, low, high), value in zip(self.slices, self.values, strict=True):
            assert parameter.grad is not None
            value.grad = parameter.grad.view(-1)[low:high].to(value.dtype)
        if self.clip is not None:
            self.norm = float(torch.nn.utils.clip_grad_norm_(self.values, self.clip))
        self.optimizer.step()
        for (_, part, _, _), value in zip(self.slices, self.values, strict=True):
            value.grad = None
            if part.dtype != torch.float32:
                part.copy_(value)


class _Plain(Training):
    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.inner = job.build()
        if job.precision == "bf16":
            self.inner.bfloat16()
        self.model: torch.nn.Module = self.inner

    def once(self, index: int) -> float:
        total, last = 0.0, len(self.batches) - 1
        for i, batch in enumerate(self.batches):
            with nullcontext() if i == last else self.unsynchronised():
                loss = self.model(batch)
                total += loss.item()
                (loss / len(self.batches)).backward()
        self.masters.step()
        self.inner.zero_grad()
        return total / len(self.batches)

    def unsynchronised(self) -> Any:
        return nullcontext()


class ComputeOnly(_Plain):
    def __init__(self, job: Job) -> None:
        super().__init__(job)
        parameters = [(p, p.numel() // job.world) for p in self.inner.parameters()]
        self.masters = Masters([(p, job.rank * n, (job.rank + 1) * n) for p, n in parameters], job.clip)


class Ddp(_Plain):
    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.masters = Masters([(p, 0, p.numel()) for p in self.inner.parameters()], job.clip)
        self.model = DistributedDataParallel(self.inner, gradient_as_bucket_view=True)

    def unsynchronised(self) -> Any:
        assert isinstance(self.model, DistributedDataParallel)
        return self.model.no_sync()
