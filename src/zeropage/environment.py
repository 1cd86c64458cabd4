"""What zeropage finds here: versions, devices, memory and its limits, and which transports can run.

`collect()` looks, `render()` shows. Nothing here changes anything, so it is the first thing to attach to a
report of a fault.
"""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text

import zeropage
from zeropage.memory.limits import GroupMemory, cgroup_memory, machine_available, shared_memory_total
from zeropage.transport.probe import TransportVerdict, backends, probe_transports

__all__ = ["Environment", "collect", "render"]

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions that decide how zeropage behaves."""

    zeropage: str
    torch: str
    python: str
    system: str


@dataclass(frozen=True, slots=True)
class Device:
    """One device that torch can compute on; `nbytes` is its memory, `None` for the host's own."""

    name: str
    description: str
    nbytes: int | None


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory in bytes; `None` where there is no control group with a limit, or no such file system."""

    total: int
    available: int
    group: GroupMemory | None
    shared_file_system: int | None


@dataclass(frozen=True, slots=True)
class Environment:
    """Everything that `zeropage env` shows."""

    versions: Versions
    devices: tuple[Device, ...]
    backends: tuple[str, ...]
    memory: HostMemory
    transports: tuple[TransportVerdict, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain dictionaries and lists, for JSON."""
        return asdict(self)


def collect() -> Environment:
    """Look at this machine."""
    return Environment(
        versions=_versions(),
        devices=_devices(),
        backends=backends(),
        memory=_memory(),
        transports=probe_transports(),
    )


def render(environment: Environment) -> Group:
    """The environment as tables for a terminal."""
    return Group(_facts_table(environment), Text(), _transports_table(environment.transports))


def _versions() -> Versions:
    return Versions(
        zeropage=zeropage.__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        system=platform.platform(),
    )


def _devices() -> tuple[Device, ...]:
    cores = len(os.sched_getaffinity(0)) if platform.system() == "Linux" else os.cpu_count()
    host = Device("cpu", f"{platform.machine()}, {cores} cores, {torch.get_num_threads()} threads", nbytes=None)
    cards = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return (host, *(Device(f"cuda:{i}", p.name, nbytes=p.total_memory) for i, p in enumerate(cards)))


def _memory() -> HostMemory:
    return HostMemory(
        total=psutil.virtual_memory().total,
        available=machine_available(),
        group=cgroup_memory(),
        shared_file_system=shared_memory_total(),
    )


def _facts_table(environment: Environment) -> Table:
    versions, memory = environment.versions, environment.memory
    table = Table("what", "found", title="zeropage on this machine", title_justify="left")
    table.add_row("zeropage", versions.zeropage)
    table.add_row("torch", versions.torch)
    table.add_row("python", versions.python)
    table.add_row("system", versions.system)
    for device in environment.devices:
        size = "" if device.nbytes is None else f", {_gib(device.nbytes)}"
        table.add_row(device.name, device.description + size)
    table.add_row("distributed backends", ", ".join(environment.backends) or "none")
    table.add_row("memory", f"{_gib(memory.total)}, {_gib(memory.available)} available")
    table.add_row("control group", _describe_group(memory.group))
    table.add_row("/dev/shm", _describe_shared_memory(memory.shared_file_system))
    return table


def _transports_table(verdicts: tuple[TransportVerdict, ...]) -> Table:
    table = Table("transport", "runs here", "why", title="Transports", title_justify="left")
    for verdict in verdicts:
        table.add_row(verdict.name, "yes" if verdict.can_run else "no", verdict.reason)
    return table


def _describe_group(group: GroupMemory | None) -> str:
    return "no limit" if group is None else f"limit {_gib(group.limit)}, {_gib(group.available)} available"


def _describe_shared_memory(nbytes: int | None) -> str:
    return "none" if nbytes is None else f"{_gib(nbytes)} (zeropage's shared mappings are not bound by it)"


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.2f} GiB"
