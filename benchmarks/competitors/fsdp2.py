"""FSDP2: every block wrapped, then the root, as its documentation says."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.competitors import base
from benchmarks.competitors.base import Job, optimizer_settings

__all__ = ["Training"]


class Training(base.Training):
    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.model = job.build()
        mesh = init_device_mesh("cpu", (job.world,))
        policy = MixedPrecisionPolicy()
        if job.precision == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in self.model.get_submodule("blocks").children():
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, **optimizer_settings())

    def once(self, index: int) -> float:
        total = 0.0
        for batch in self.batches:
            loss = self.model(batch)
            total += loss.item()
            (loss / len(self.batches)).backward()
        if self.job.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.job.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total / len(self.batches)
