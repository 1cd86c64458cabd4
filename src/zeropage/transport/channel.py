"""Point-to-point messages between the ranks of a group, apart from everybody else's.

Each channel has sockets (or streams) of its own, so it can be closed by dropping it, at any time, without
the other ranks, and no message of the program's own is ever mistaken for one of ours.
"""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from zeropage.transport.group import Group

__all__ = ["Channel", "DeviceChannel", "HostChannel"]

_DATA, _HEADERS = 0, 1  # tags of messages


class Channel(Protocol):
    def send(self, data: torch.Tensor, peer: int) -> dist.Work:
        """Begin to send `data` (contiguous) to rank `peer` of the group; it must not change until the work ends."""

    def receive(self, into: torch.Tensor, peer: int) -> dist.Work:
        """Begin to receive from rank `peer` of the group; messages of one pair arrive in order."""


class HostChannel:
    """Messages in host memory, over gloo.

    The backend is made on a store prefix of its own instead of by `new_group`, whose names depend on which
    groups are alive on each rank at that moment.
    """

    def __init__(self, group: Group, timeout_s: float) -> None:
        name = group.broadcast(uuid.uuid4().hex)
        store = dist.PrefixStore(  # type: ignore[attr-defined]
            f"zeropage/{name}", dist.distributed_c10d._get_default_store()
        )
        self._backend: Any = dist.ProcessGroupGloo(store, group.rank, group.world, timedelta(seconds=timeout_s))

    def send(self, data: torch.Tensor, peer: int) -> dist.Work:
        return self._backend.send([data], peer, _DATA)  # type: ignore[no-any-return]

    def receive(self, into: torch.Tensor, peer: int) -> dist.Work:
        return self._backend.recv([into], peer, _DATA)  # type: ignore[no-any-return]

    def send_header(self, data: torch.Tensor, peer: int) -> dist.Work:
        """Like `send`; headers and data do not meet each other's receivers."""
        return self._backend.send([data], peer, _HEADERS)  # type: ignore[no-any-return]

    def receive_header(self, into: torch.Tensor, peer: int) -> dist.Work:
        return self._backend.recv([into], peer, _HEADERS)  # type: ignore[no-any-return]


class DeviceChannel:
    """Messages in device memory, over the group's own backend (not run on such hardware yet)."""

    def __init__(self, group: Group) -> None:
        assert group.handle is not None
        self._group = group.handle
        self._ranks = dist.get_process_group_ranks(group.handle)

    def send(self, data: torch.Tensor, peer: int) -> dist.Work:
        work = dist.isend(data, self._ranks[peer], group=self._group)
        assert work is not None
        return work

    def receive(self, into: torch.Tensor, peer: int) -> dist.Work:
        work = dist.irecv(into, self._ranks[peer], group=self._group)
        assert work is not None
        return work
