"""zeropage, with either transport."""

from __future__ import annotations

from typing import Any

import torch

import zeropage as zp
from benchmarks.competitors.base import EngineTraining, Job, optimizer_settings

__all__ = ["Training"]


class Training(EngineTraining):
    def __init__(self, job: Job, transport: str = "auto", **more: Any) -> None:
        super().__init__(job)
        config: dict[str, Any] = {"transport": transport, "accumulate": job.accumulate} | more
        if job.precision != "fp32":
            config["precision"] = job.precision
        if job.clip is not None:
            config["clip_grad_norm"] = job.clip
        with zp.init(config):
            model = job.build()
        self.engine = zp.Engine(model, torch.optim.AdamW(model.parameters(), fused=True, **optimizer_settings()))
        self.first = 0

    def facts(self) -> dict[str, Any]:
        report = self.engine.memory()
        return {
            "memory": {name: getattr(report, name) for name in ("parameters", "gradients", "optimizer", "peak_frames")}
        }

    def close(self) -> None:
        self.engine.close()
