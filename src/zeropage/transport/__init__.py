"""How a page is gathered and a gradient reduced. Only this package calls `torch.distributed`."""

from __future__ import annotations

import platform
import sys

from zeropage.config import Config
from zeropage.errors import TransportUnavailableError
from zeropage.transport.base import Accumulator, Transport, accumulate
from zeropage.transport.collective import CollectiveTransport
from zeropage.transport.courier import Arrival
from zeropage.transport.group import Group, end_group, find_group
from zeropage.transport.local import LocalTransport
from zeropage.transport.shared import SharedTransport

__all__ = ["Accumulator", "Arrival", "Group", "Transport", "accumulate", "end_group", "find_group", "open_transport"]


def open_transport(config: Config, group: Group, *, on_cpu: bool) -> Transport:
    """The transport that `config.transport` names, or for "auto" the best that can run here (collective).

    Raises:
        TransportUnavailableError: the named transport cannot run here; says why.
    """
    wanted: str = config.transport
    if wanted == "auto":
        wanted = _choose(group, on_cpu=on_cpu)
    if wanted == "local":
        if group.world != 1:
            raise TransportUnavailableError(
                f"transport='local' serves one rank, but the group has {group.world}; use 'auto'"
            )
        return LocalTransport()
    if group.handle is None:
        raise TransportUnavailableError(
            f"transport={wanted!r} needs a process group, and this process runs alone; start it with torchrun "
            "or use 'auto'"
        )
    if wanted == "collective":
        fixed = config.resident_bytes
        room = config.bucket_bytes if fixed is None else min(config.bucket_bytes, fixed // 2)
        return CollectiveTransport(group, config.timeout_s, room, deterministic=config.deterministic)
    reason = why_not_shared(on_cpu=on_cpu)
    if reason is None and not group.on_one_host():
        reason = "the ranks run on different hosts"
    if reason is not None:
        raise TransportUnavailableError(f"transport='shared' cannot run here: {reason}; use 'auto' or 'collective'")
    return SharedTransport(group, config.timeout_s, deterministic=config.deterministic)


def why_not_shared(*, on_cpu: bool = True) -> str | None:
    """Why ranks on this host could not share pages in memory; None if they can."""
    if not on_cpu:
        return "the parameters are not in host memory"
    if sys.platform != "linux":
        return f"it needs Linux (memfd_create), this is {sys.platform}"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"it relies on the memory order of x86-64, this is {platform.machine()}"
    return None


def _choose(group: Group, *, on_cpu: bool) -> str:
    if group.world == 1:
        return "local"
    if why_not_shared(on_cpu=on_cpu) is None and group.on_one_host():
        return "shared"
    return "collective"
