"""Point-to-point messages between the ranks of a group, apart from everybody else's.

Each channel has connections of its own, so it can be closed by dropping it, at any time, without the other ranks, and
no message of the program's own is ever mistaken for one of ours, or waits behind it.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from zeropage.errors import TransportUnavailableError
from zeropage.memory.disk import DiskSlice
from zeropage.transport.group import Group

__all__ = ["Channel", "Collective", "DeviceChannel", "HostChannel", "Message", "in_host_memory"]

_DATA, _HEADERS = 0, 1  # tags of messages


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """`data` (contiguous) to or from rank `peer` of the group; it belongs to the message until that has ended."""

    kind: Literal["send", "receive"]
    data: torch.Tensor
    peer: int


@dataclass(frozen=True, slots=True, eq=False)
class Collective:
    """What all ranks do at once to one page: bring its slices together, or add up their parts of it for the owners.

    `whole` (1-D) has a part of equal length for each rank; `part` is what belongs to this one.
    """

    kind: Literal["all_gather", "reduce_scatter"]
    whole: torch.Tensor
    part: torch.Tensor


class Channel(Protocol):
    def begin(self, messages: Sequence[Message]) -> list[dist.Work]:
        """Begin them: a work for each, or one for all. Those of one pair of ranks arrive in order."""


def in_host_memory(data: torch.Tensor | DiskSlice) -> bool:
    """Whether the host's channel is for `data`."""
    return data.device.type == "cpu"


class HostChannel:
    """Messages in host memory, over gloo.

    The backend is made on a store prefix of its own instead of by `new_group`, whose names depend on which
    groups are alive on each rank at that moment.
    """

    def __init__(self, group: Group, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        self._backend: Any = dist.ProcessGroupGloo(_own_store(group), group.rank, group.world, timeout)

    def begin(self, messages: Sequence[Message]) -> list[dist.Work]:
        return [_begin(self._backend, message) for message in messages]

    def abandon(self) -> None:
        """In a forked child: keep gloo for good. Letting go of it would wait for its threads, which are not there."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._backend))

    def send_header(self, data: torch.Tensor, peer: int) -> dist.Work:
        """Headers and data do not meet each other's receivers."""
        return self._backend.send([data], peer, _HEADERS)  # type: ignore[no-any-return]

    def receive_header(self, into: torch.Tensor, peer: int) -> dist.Work:
        return self._backend.recv([into], peer, _HEADERS)  # type: ignore[no-any-return]


class DeviceChannel:
    """Messages in device memory, over NCCL (not run on such hardware yet).

    [Note: messages in groups] NCCL makes a message when both of its ends have come to it, and each end comes to its
    messages one after the other: two ranks that send to each other first would wait for each other. So all messages of
    a round are begun as one group. What connects the ranks needs all of them at once (`connect`). And it is a
    communicator of its own: calls on one must come in the same order on all ranks, which holds for ours and for the
    program's, but not for both together.
    """

    def __init__(self, group: Group, timeout_s: float) -> None:
        self._rank, self._world, self._timeout_s = group.rank, group.world, timeout_s
        self._store = _own_store(group)
        self._backend: Any = None

    @property
    def connected(self) -> bool:
        return self._backend is not None

    def connect(self, device: torch.device) -> None:
        """Make the connections; this rank's messages are on `device` (collective).

        Raises:
            TransportUnavailableError: torch has no NCCL for that device.
        """
        self._backend = open_nccl(self._store, self._rank, self._world, device, self._timeout_s)
        self._backend.eager_connect_single_device(device)

    def begin(self, messages: Sequence[Message]) -> list[dist.Work]:
        return [self._as_group(partial(_begin, self._backend, message) for message in messages)]

    def begin_collectives(self, collectives: Sequence[Collective]) -> dist.Work:
        """Begin them as one group (collective: all ranks come with the same ones, in the same order)."""
        return self._as_group(partial(_begin_collective, self._backend, move) for move in collectives)

    def _as_group(self, calls: Iterable[Callable[[], object]]) -> dist.Work:
        """A group that is begun is ended, whatever happens in between: the calls that came next would wait in it."""
        self._backend._start_coalescing()
        try:
            for call in calls:
                call()
        except BaseException:
            with suppress(RuntimeError):  # the first one tells more
                self._backend._end_coalescing()
            raise
        return self._backend._end_coalescing()  # type: ignore[no-any-return]


def _begin(backend: Any, message: Message) -> dist.Work:
    move = backend.send if message.kind == "send" else backend.recv
    return move([message.data], message.peer, _DATA)  # type: ignore[no-any-return]


def _begin_collective(backend: Any, move: Collective) -> None:
    if move.kind == "all_gather":
        backend._allgather_base(move.whole, move.part)
    else:
        backend._reduce_scatter_base(move.part, move.whole)


def open_nccl(store: Any, rank: int, world: int, device: torch.device, timeout_s: float) -> Any:
    """A communicator of all ranks that find each other in `store`."""
    if device.type != "cuda" or not dist.is_nccl_available():
        raise TransportUnavailableError(
            f"transport='collective' moves parameters on {device} between ranks over NCCL, which this torch does not "
            "have for them. Use CUDA devices with a CUDA build of torch, or keep the model on the CPU."
        )
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupNCCL(store, rank, world, options)


def _own_store(group: Group) -> Any:
    """A part of the store that nobody else uses (collective)."""
    name = group.broadcast(uuid.uuid4().hex)
    return dist.PrefixStore(  # type: ignore[attr-defined]
        f"zeropage/{name}", dist.distributed_c10d._get_default_store()
    )
