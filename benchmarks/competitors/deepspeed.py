"""DeepSpeed stage 3 on its CPU accelerator: its own AdamW, built before anything is timed."""

from __future__ import annotations

from typing import Any

import deepspeed

from benchmarks.competitors.base import EngineTraining, Job, optimizer_settings

__all__ = ["Training", "settings_of"]


def settings_of(**more: Any) -> dict[str, Any]:
    """A configuration of stage 3 with the optimizer that all competitors have."""
    optimizer = optimizer_settings()
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True},
        "optimizer": {"type": "AdamW", "params": {**optimizer, "betas": list(optimizer["betas"])}},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 30,
    } | more


class Training(EngineTraining):
    def __init__(self, job: Job) -> None:
        super().__init__(job)
        settings = settings_of(gradient_accumulation_steps=job.accumulate)
        if job.precision == "bf16":
            settings["bf16"] = {"enabled": True}
        if job.clip is not None:
            settings["gradient_clipping"] = job.clip
        model = job.build()
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)

    def facts(self) -> dict[str, Any]:
        return {"optimizer": type(self.engine.optimizer.optimizer).__name__}
