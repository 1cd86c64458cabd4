"""The monitors of a configuration: numbers of training go to TensorBoard, to CSV files or to Weights & Biases."""

from __future__ import annotations

import csv
import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from zeropage.deepspeed.settings import MonitorSettings
from zeropage.errors import ConfigError

__all__ = ["CsvMonitor", "Monitor", "MonitorMaster", "TensorBoardMonitor", "WandbMonitor"]

_JOB = "DeepSpeedJobName"  # DeepSpeed's default

Event = tuple[str, float, int]
"""Name, value and the number of samples seen so far."""


class Monitor(Protocol):
    """Where events go."""

    def write_events(self, event_list: Sequence[Event]) -> None: ...


class MonitorMaster:
    """All monitors that are enabled; the first rank writes, the others do nothing.

    Raises:
        ConfigError: a monitor's package is not installed.
    """

    def __init__(self, settings: MonitorSettings, rank: int = 0) -> None:
        self.enabled = settings.enabled
        self.monitors: list[Monitor] = []
        if rank == 0:
            if settings.tensorboard is not None:
                self.monitors.append(TensorBoardMonitor(**settings.tensorboard))
            if settings.csv is not None:
                self.monitors.append(CsvMonitor(**settings.csv))
            if settings.wandb is not None:
                self.monitors.append(WandbMonitor(**settings.wandb))

    def write_events(self, event_list: Sequence[Event]) -> None:
        for monitor in self.monitors:
            monitor.write_events(event_list)


class CsvMonitor:
    """One file for each name, in `output_path/job_name`."""

    def __init__(self, output_path: str = "", job_name: str = _JOB) -> None:
        self.log_dir = Path(output_path) / job_name
        self.log_dir.mkdir(parents=True, exist_ok=True)

    def write_events(self, event_list: Sequence[Event]) -> None:
        for name, value, samples in event_list:
            path = self.log_dir / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            begun = path.exists()
            with path.open("a", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                if not begun:
                    writer.writerow(["step", name.rpartition("/")[2]])
                writer.writerow([samples, value])


class TensorBoardMonitor:
    """Scalars for TensorBoard, in `output_path/job_name`."""

    def __init__(self, output_path: str = "", job_name: str = _JOB) -> None:
        _require("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(Path(output_path) / job_name))

    def write_events(self, event_list: Sequence[Event]) -> None:
        for name, value, samples in event_list:
            self._writer.add_scalar(name, value, samples)
        self._writer.flush()


class WandbMonitor:
    """A run of Weights & Biases."""

    def __init__(self, project: str = "deepspeed", group: str | None = None, team: str | None = None) -> None:
        _require("wandb", "wandb")
        self._wandb: Any = importlib.import_module("wandb")
        self._wandb.init(project=project, group=group, entity=team)

    def write_events(self, event_list: Sequence[Event]) -> None:
        for name, value, samples in event_list:
            self._wandb.log({name: value}, step=samples)


def _require(package: str, key: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"config key '{key}.enabled' is true, and the package {package!r} is not installed: install it, or use "
            "csv_monitor, which needs none"
        )
