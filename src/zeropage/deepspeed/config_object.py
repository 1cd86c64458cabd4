"""`deepspeed.DeepSpeedConfig`: a configuration as an object."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeropage.deepspeed import comm
from zeropage.deepspeed.settings import Settings, read_settings

__all__ = ["DeepSpeedConfig"]


class DeepSpeedConfig:
    """Reads `config` for the ranks that there are; every field of `Settings` is an attribute.

    Raises:
        ConfigError: see `read_settings`.
    """

    def __init__(self, config: Mapping[str, Any] | str | Path, mpu: object = None, mesh_device: object = None) -> None:
        self.settings: Settings = read_settings(config, comm.get_world_size())
        self.world_size = comm.get_world_size()
        self.global_rank = comm.get_rank()

    @property
    def zero_optimization_stage(self) -> int:
        return self.settings.stage

    @property
    def zero_enabled(self) -> bool:
        return self.settings.stage > 0

    def __getattr__(self, name: str) -> Any:
        if name == "settings":
            raise AttributeError(name)
        return getattr(self.settings, name)
