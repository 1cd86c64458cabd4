"""`deepspeed.accelerator.get_accelerator()`: the device that this process computes on, CUDA or CPU."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch

__all__ = ["Accelerator", "get_accelerator", "is_current_accelerator_supported"]


class Accelerator:
    """Answers with torch's own functions for the devices of one kind, "cuda" or "cpu".

    What only makes sense with streams and graphs of a GPU is missing on purpose.
    """

    def __init__(self, kind: str) -> None:
        self._name = kind
        self._device: ModuleType = torch.cuda if kind == "cuda" else torch.cpu

    # -- which

    def device_name(self, device_index: int | None = None) -> str:
        if self._name == "cpu" or device_index is None:
            return self._name
        return f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def current_device(self) -> int:
        return int(torch.cuda.current_device()) if self._name == "cuda" else 0

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def set_device(self, device_index: int) -> None:
        if self._name == "cuda":
            torch.cuda.set_device(device_index)

    def device_count(self) -> int:
        return int(torch.cuda.device_count()) if self._name == "cuda" else 1

    def is_available(self) -> bool:
        return self._name == "cpu" or torch.cuda.is_available()

    def communication_backend_name(self) -> str:
        return "nccl" if self._name == "cuda" else "gloo"

    def communication_backend_version(self) -> Any:
        return torch.cuda.nccl.version() if self._name == "cuda" else None

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def is_synchronized_device(self) -> bool:
        return self._name == "cpu"

    def resolves_data_dependency(self) -> bool:
        return self._name == "cpu"

    def handles_memory_backpressure(self) -> bool:
        return self._name == "cpu"

    def use_host_timers(self) -> bool:
        return self._name == "cpu"

    # -- dtypes

    def is_bf16_supported(self) -> bool:
        return self._name == "cpu" or bool(torch.cuda.is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        return True

    def is_triton_supported(self) -> bool:
        return self._name == "cuda" and torch.cuda.get_device_capability()[0] >= 8

    def supported_dtypes(self) -> list[torch.dtype]:
        narrow = [torch.bfloat16] if self.is_bf16_supported() else []
        return [torch.float32, torch.float16, *narrow]

    def amp(self) -> Any:
        return torch.amp

    # -- random numbers

    def manual_seed(self, seed: int) -> Any:
        return torch.manual_seed(seed) if self._name == "cpu" else torch.cuda.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        return torch.manual_seed(seed) if self._name == "cpu" else torch.cuda.manual_seed_all(seed)

    def initial_seed(self) -> int:
        return int(torch.initial_seed()) if self._name == "cpu" else int(torch.cuda.initial_seed())

    def random(self) -> Any:
        return torch.random

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        if self._name == "cpu":
            return torch.get_rng_state()
        return torch.cuda.get_rng_state(self.current_device() if device_index is None else device_index)

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        if self._name == "cpu":
            torch.set_rng_state(new_state)
        else:
            torch.cuda.set_rng_state(new_state, self.current_device() if device_index is None else device_index)

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.default_generator if self._name == "cpu" else torch.cuda.default_generators[device_index]

    # -- waiting and memory

    def synchronize(self, device_index: int | None = None) -> None:
        if self._name == "cuda":
            torch.cuda.synchronize(device_index)

    def empty_cache(self) -> None:
        if self._name == "cuda":
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return int(torch.cuda.memory_allocated(device_index)) if self._name == "cuda" else 0

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return int(torch.cuda.max_memory_allocated(device_index)) if self._name == "cuda" else 0

    def memory_reserved(self, device_index: int | None = None) -> int:
        return int(torch.cuda.memory_reserved(device_index)) if self._name == "cuda" else 0

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return int(torch.cuda.max_memory_reserved(device_index)) if self._name == "cuda" else 0

    def memory_cached(self, device_index: int | None = None) -> int:
        return self.memory_reserved(device_index)

    def max_memory_cached(self, device_index: int | None = None) -> int:
        return self.max_memory_reserved(device_index)

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        return dict(torch.cuda.memory_stats(device_index)) if self._name == "cuda" else {}

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        if self._name == "cuda":
            torch.cuda.reset_peak_memory_stats(device_index)

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        self.reset_peak_memory_stats(device_index)

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor.pin_memory() if self._name == "cuda" else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self._name == "cuda" and tensor.is_pinned()

    def total_memory(self, device_index: int | None = None) -> int:
        if self._name == "cuda":
            return int(torch.cuda.get_device_properties(self.current_device()).total_memory)
        import psutil

        return int(psutil.virtual_memory().total)

    # -- marks for profilers

    def range_push(self, message: str) -> Any:
        return torch.cuda.nvtx.range_push(message) if self._name == "cuda" else None

    def range_pop(self) -> Any:
        return torch.cuda.nvtx.range_pop() if self._name == "cuda" else None

    def lazy_call(self, callback: Any) -> None:
        callback()

    def get_compile_backend(self) -> str:
        return "inductor"

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"] if self._name == "cuda" else []


@functools.cache
def get_accelerator() -> Accelerator:
    """The one accelerator: CUDA where there is any, the CPU otherwise."""
    return Accelerator("cuda" if torch.cuda.is_available() else "cpu")


def is_current_accelerator_supported() -> bool:
    return True
