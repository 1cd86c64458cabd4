"""Which transports can run on this machine, and why not.

Each probe tries the very thing that its transport stands on, and cleans up after itself. None of them
starts a process group or talks to another rank.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zeropage.transport import why_not_shared

__all__ = ["TransportVerdict", "backends", "probe_transports"]

_PROBE_TIMEOUT_S = 10.0

# What a rank does to reach another rank's mapping: open it by the other's process id.
_OPEN_IN_CHILD = "import sys; open(sys.argv[1], 'r+b', buffering=0).close()"


@dataclass(frozen=True, slots=True)
class TransportVerdict:
    """Whether a transport can run here; `reason` says why not, or what it would use."""

    name: str
    can_run: bool
    reason: str


def backends() -> tuple[str, ...]:
    """The backends of torch.distributed that this build of torch has."""
    if not dist.is_available():
        return ()
    available = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
        "xccl": dist.is_xccl_available(),
    }
    return tuple(name for name, present in available.items() if present)


def probe_transports() -> tuple[TransportVerdict, ...]:
    """The verdict on every transport, in the order in which `auto` considers them."""
    return probe_local(), probe_shared(), probe_collective()


def probe_local() -> TransportVerdict:
    """One rank needs nothing."""
    return TransportVerdict("local", can_run=True, reason="one rank, nothing to exchange")


def probe_shared() -> TransportVerdict:
    """Shared host memory needs Linux, memory files that others may open, and the store order of x86-64."""
    obstacle = _obstacle_to_sharing()
    return TransportVerdict(
        "shared", can_run=obstacle is None, reason=obstacle or "all ranks on one host, through memory files"
    )


def probe_collective() -> TransportVerdict:
    """Collectives need torch.distributed with a backend for the devices at hand."""
    found = backends()
    wanted = ("nccl", "gloo") if torch.cuda.is_available() else ("gloo",)
    usable = [name for name in wanted if name in found]
    if not dist.is_available():
        return TransportVerdict("collective", can_run=False, reason="this torch was built without distributed")
    if not usable:
        return TransportVerdict(
            "collective", can_run=False, reason=f"this torch has none of the backends {', '.join(wanted)}"
        )
    return TransportVerdict("collective", can_run=True, reason=f"over {' and '.join(usable)}")


def _obstacle_to_sharing() -> str | None:
    """The first thing that keeps ranks of this host from sharing memory; None if nothing does."""
    reason = why_not_shared()
    if reason is not None:
        return reason
    try:
        memory_file = os.memfd_create("zeropage-probe")
    except OSError as error:
        return f"os.memfd_create failed: {error.strerror}"
    try:
        return _obstacle_to_opening(f"/proc/{os.getpid()}/fd/{memory_file}")
    finally:
        os.close(memory_file)


def _obstacle_to_opening(path: str) -> str | None:
    """Let another process open this one's memory file, as a rank would."""
    command = [sys.executable, "-I", "-S", "-c", _OPEN_IN_CHILD, path]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"could not start a process to try it: {error}"
    if child.returncode == 0:
        return None
    return f"another process may not open /proc/<pid>/fd: {child.stderr.strip().splitlines()[-1]}"
