"""What an engine answers about itself: counters, ranks, batch sizes, settings that were made sense of."""

from __future__ import annotations

from typing import Any

import torch

from zeropage.deepspeed import comm
from zeropage.deepspeed.accelerator import get_accelerator
from zeropage.deepspeed.getters import ConfigGetters
from zeropage.deepspeed.settings import Settings
from zeropage.engine import Engine

__all__ = ["EngineAnswers"]

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class EngineAnswers(ConfigGetters):
    """The answers of a `DeepSpeedEngine`; plain values of its configuration are in `ConfigGetters`."""

    zeropage_engine: Engine
    config: dict[str, Any]
    micro_steps: int  # calls of `step`
    global_samples: int  # samples of all steps so far
    basic_optimizer: torch.optim.Optimizer | None
    _config: Settings
    _batch: list[int]  # samples of a micro-batch on one rank, micro-batches of a step

    @property
    def global_steps(self) -> int:
        """Boundaries so far, skipped steps included."""
        return self.zeropage_engine.global_step + self.zeropage_engine.skipped_steps

    @property
    def skipped_steps(self) -> int:
        return self.zeropage_engine.skipped_steps

    @property
    def device(self) -> torch.device:
        return torch.device(get_accelerator().current_device_name())

    @property
    def global_rank(self) -> int:
        return comm.get_rank()

    @property
    def local_rank(self) -> int:
        return comm.get_local_rank()

    @property
    def world_size(self) -> int:
        return comm.get_world_size()

    @property
    def dp_world_size(self) -> int:
        return self.zeropage_engine.pagers[0].transport.world

    @property
    def data_parallel_group(self) -> Any:
        return self.zeropage_engine.process_group

    def get_data_parallel_rank(self) -> int:
        return self.zeropage_engine.pagers[0].transport.rank

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_tensor_parallel_rank(self) -> int:
        return 0

    def train_batch_size(self) -> int:
        micro, steps = self._batch
        return micro * steps * self.dp_world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._batch[0]

    def gradient_accumulation_steps(self) -> int:
        return self._batch[1]

    def managed_gradient_accumulation(self) -> bool:
        return self._config.managed_accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples of a step, samples of a micro-batch on one rank, micro-batches of a step."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        self._batch[0] = micro_batch_size

    def zero_optimization_stage(self) -> int:
        return self._config.stage

    def zero_optimization(self) -> bool:
        return self._config.stage > 0

    def zero_optimization_partition_gradients(self) -> bool:
        return self._config.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self._config.stage == 3

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        return self._config.gather_16bit_on_save

    def zero_cpu_offload(self) -> bool:
        return (self.zero_offload_optimizer() or {}).get("device") == "cpu"

    def zero_use_cpu_optimizer(self) -> bool:
        return (self.zero_offload_optimizer() or {}).get("device") in ("cpu", "nvme")

    def gradient_clipping(self) -> float:
        return self._config.gradient_clipping

    def postscale_gradients(self) -> bool:
        return not self._config.prescale_gradients

    def fp16_enabled(self) -> bool:
        return self._config.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        return self._config.precision == "bf16"

    def torch_autocast_dtype(self) -> torch.dtype | None:
        return self._config.autocast

    def dynamic_loss_scale(self) -> bool:
        return self._config.config.loss_scale.dynamic

    def initial_dynamic_scale(self) -> float:
        return self._config.config.loss_scale.initial

    def dynamic_loss_scale_args(self) -> dict[str, float]:
        scale = self._config.config.loss_scale
        return {
            "init_scale": scale.initial,
            "scale_window": scale.window,
            "delayed_shift": scale.hysteresis,
            "min_scale": scale.min,
        }

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype that gradients are summed in."""
        return _DTYPES[self.zeropage_engine.config.reduce_dtype]

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtype of trained parameters, and that in which gradients accumulate."""
        return _DTYPES[self._config.precision], self.communication_data_type

    def optimizer_name(self) -> str | None:
        if self.basic_optimizer is not None:
            return type(self.basic_optimizer).__name__
        return None if self._config.optimizer is None else self._config.optimizer.type

    def get_lr(self) -> list[Any]:
        return self._of_groups("lr")

    def get_type(self) -> list[Any]:
        return self._of_groups("type")

    def get_mom(self) -> list[Any]:
        return self._of_groups("momentum" if self.optimizer_name() in ("SGD", "RMSprop") else "betas")

    def _of_groups(self, key: str) -> list[Any]:
        groups = [] if self.basic_optimizer is None else self.basic_optimizer.param_groups
        return [group.get(key, 0.0) for group in groups]
