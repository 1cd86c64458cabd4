"""DeepSpeed stage 3 on its CPU accelerator: its own AdamW, built before anything is timed."""

from __future__ import annotations

from typing import Any

import deepspeed

from benchmarks.competitors.base import LEARNING_RATE, Job

__all__ = ["Training"]


class Training:
    def __init__(self, job: Job) -> None:
        self.job = job
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": job.accumulate,
            "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": LEARNING_RATE, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01},
            },
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1 << 30,
        }
        if job.precision == "bf16":
            settings["bf16"] = {"enabled": True}
        if job.clip is not None:
            settings["gradient_clipping"] = job.clip
        model = job.build()
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)

    def prepare(self, index: int) -> None:
        self.batches = self.job.batches(index)

    def once(self, index: int) -> float:
        total = 0.0
        for batch in self.batches:
            loss = self.engine(batch)
            total += loss.item()
            self.engine.backward(loss)
            self.engine.step()
        return total / len(self.batches)

    def facts(self) -> dict[str, Any]:
        return {"optimizer": type(self.engine.optimizer.optimizer).__name__}

    def close(self) -> None: ...
