"""`deepspeed.utils.groups`: all ranks are one data-parallel group; of the other kinds each rank is one by itself."""

from __future__ import annotations

from typing import Any

from zeropage.deepspeed import comm
from zeropage.errors import ConfigError

__all__ = [
    "get_data_parallel_group", "get_data_parallel_rank", "get_data_parallel_world_size", "get_model_parallel_group",
    "get_model_parallel_rank", "get_model_parallel_world_size", "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank", "get_tensor_model_parallel_world_size", "initialize",
]  # fmt: skip


def get_data_parallel_group() -> Any:
    return comm.get_world_group()


def get_data_parallel_rank() -> int:
    return comm.get_rank()


def get_data_parallel_world_size() -> int:
    return comm.get_world_size()


def get_model_parallel_rank() -> int:
    return 0


def get_model_parallel_world_size() -> int:
    return 1


def get_tensor_model_parallel_rank() -> int:
    return 0


def get_tensor_model_parallel_world_size() -> int:
    return 1


def get_model_parallel_group() -> Any:
    raise _absent("tensor")


def get_tensor_model_parallel_group() -> Any:
    raise _absent("tensor")


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Accepted for models without expert parallelism."""
    if ep_size != 1:
        raise _absent("expert")


def _get_data_parallel_group() -> Any:
    return comm.get_world_group()


def _get_data_parallel_rank() -> int:
    return comm.get_rank()


def _get_data_parallel_world_size() -> int:
    return comm.get_world_size()


def _get_sequence_parallel_rank() -> int:
    return 0


def _get_sequence_parallel_world_size() -> int:
    return 1


def _get_sequence_parallel_group() -> Any:
    raise _absent("sequence")


def _get_sequence_data_parallel_group() -> Any:
    return comm.get_world_group()


def _get_sequence_data_parallel_rank() -> int:
    return comm.get_rank()


def _get_sequence_data_parallel_world_size() -> int:
    return comm.get_world_size()


def _get_expert_parallel_group(group_name: str) -> Any:
    raise _absent("expert")


def _get_expert_data_parallel_group(group_name: str) -> Any:
    raise _absent("expert")


def _absent(kind: str) -> ConfigError:
    return ConfigError(f"there is no {kind} parallelism here, so there is no such group; use all ranks for data")
