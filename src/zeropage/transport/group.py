"""The process group that zeropage stands on: found, started, and asked the few things needed to begin."""

from __future__ import annotations

import atexit
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from zeropage.errors import ConfigError

__all__ = ["Group", "end_group", "find_group"]

_T = TypeVar("_T")
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),  # torchrun
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)


class Group:
    """A `torch.distributed` process group, or one process by itself when `handle` is None."""

    def __init__(self, handle: dist.ProcessGroup | None) -> None:
        self.handle = handle
        self.rank = dist.get_rank(handle) if handle is not None else 0
        self.world = dist.get_world_size(handle) if handle is not None else 1

    def broadcast(self, value: _T) -> _T:
        """The value of the group's first rank, on all ranks."""
        if self.handle is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=dist.get_global_rank(self.handle, 0), group=self.handle)
        return box[0]

    def gather(self, value: _T) -> list[_T]:
        """Everybody's value, by rank, on all ranks."""
        if self.handle is None:
            return [value]
        values: list[_T | None] = [None] * self.world
        dist.all_gather_object(values, value, group=self.handle)
        return values  # type: ignore[return-value]  # filled by the call above

    def barrier(self) -> None:
        if self.handle is not None:
            dist.barrier(group=self.handle)

    def on_one_host(self) -> bool:
        """Whether all ranks run under one kernel and see each other's processes."""
        return len(set(self.gather((socket.gethostname(), _boot_id(), _pid_namespace())))) == 1


def find_group(group: object, timeout_s: float) -> Group:
    """The given group, torch's default one, or one started from a launcher's variables; else one process.

    Raises:
        ConfigError: a launcher's variables are there in part (the missing one is named), or `group` is
            not a process group.
    """
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"group must be a torch.distributed.ProcessGroup or None, not {type(group).__name__}; "
            "make one with torch.distributed.new_group(ranks)"
        )
    if isinstance(group, dist.ProcessGroup):
        return Group(group)
    if not dist.is_available():
        return Group(None)
    if not dist.is_initialized() and not _start(timeout_s):
        return Group(None)
    return Group(dist.group.WORLD)


def _start(timeout_s: float) -> bool:
    """Start torch's default group from a launcher's variables; False if there is no launcher."""
    for rank_name, world_name in _LAUNCHERS:
        if rank_name in os.environ and world_name in os.environ:
            break
    else:
        for rank_name, world_name in _LAUNCHERS[:1]:
            if rank_name in os.environ or world_name in os.environ:
                partner = world_name if rank_name in os.environ else rank_name
                raise ConfigError(f"{partner} is not set in the environment although its partner is; use torchrun")
        return False
    rank, world = int(os.environ[rank_name]), int(os.environ[world_name])
    if world == 1 and "MASTER_ADDR" not in os.environ:
        return False
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} must be set for {world} ranks to find each other "
            f"(rank {rank}, from {rank_name}); torchrun sets them"
        )
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))
    atexit.register(end_group)
    return True


def end_group() -> None:
    """For `atexit`, by whoever started torch's default group: a process that exits with one of gloo's open aborts now
    and then."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def _pid_namespace() -> str:
    path = Path("/proc/self/ns/pid")
    return os.readlink(path) if path.exists() else ""
