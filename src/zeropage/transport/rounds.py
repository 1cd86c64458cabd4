"""Rounds: one-sided reads and additions over two-sided messages.

Every call of every rank is a *request*. In each round all ranks tell each other what they want (a small
header), and then everybody serves everybody: a rank that asks for a page gets a slice from each owner, a
rank that adds a gradient sends each owner its part. Ranks need not want the same thing: while one reads
expert 3 the other may read expert 5, or add a gradient, or wait at a meeting, serving until all have come.
So nothing depends on the order in which ranks touch pages, and identities, never positions, say what a
message holds. A header that cannot be served is an error on all ranks, because all see all headers.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from typing import Literal

import torch
import torch.distributed as dist

from zeropage.errors import DivergenceError, PeerLostError, PeerTimeoutError
from zeropage.layout import Layout
from zeropage.memory.host import Store, allocate
from zeropage.transport.base import accumulate, overtaken
from zeropage.transport.channel import Channel, DeviceChannel, HostChannel
from zeropage.transport.control import describe_divergence
from zeropage.transport.group import Group

__all__ = ["RoundAccumulator", "Rounds"]

_HEADER = 1024  # bytes that travel always; longer requests send the rest in a second message
_PIECE = 16 << 20  # gloo pipelines messages of this size best
_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip


class _Kind(IntEnum):
    MEET = 0  # wait until all ranks have come here; serve meanwhile
    GATHER = 1  # send me these pages
    ADD = 2  # take my part of this gradient
    AWAIT = 3  # wait until all have ended as many backwards as I; serve meanwhile


@dataclass(frozen=True, slots=True)
class _Request:
    """What one rank wants in one round. Everything in it is the same on all ranks once exchanged."""

    kind: _Kind
    intent: str = ""
    payload: bytes = b""
    pages: tuple[tuple[int, int], ...] = ()  # (uid, check) of each page asked for
    epoch: int = 0
    scale: float = 1.0
    dtype: int = 0
    ended: int = 0  # backwards that the sender has ended


@dataclass(slots=True)
class _Traffic:
    """The messages of one round, in flight."""

    works: list[tuple[int, dist.Work]] = field(default_factory=list)
    keep: list[torch.Tensor] = field(default_factory=list)
    received: list[tuple[RoundAccumulator, torch.Tensor, _Request]] = field(default_factory=list)


class RoundAccumulator:
    """A gradient sum whose parts arrive in rounds; each rank sees every header, so all know who added."""

    def __init__(self, name: str, store: Store, rounds: Rounds, dtype: torch.dtype, device: torch.device) -> None:
        self.store = store
        self._name, self._rounds, self._dtype, self._device = name, rounds, dtype, device
        self._content = -1
        self._contributed = -1
        self._first = self._latest = 0  # one more than the number of the backward of the first and latest contribution

    def add(self, gradient: torch.Tensor, scale: float, epoch: int) -> None:
        self._rounds.add(self, gradient, scale, epoch)

    def take(self, part: torch.Tensor, scale: float, epoch: int) -> None:
        """A part of this rank's slice has come in."""
        if epoch >= self._content:
            accumulate(self._memory(), part, scale, first=epoch > self._content)
            self._content = epoch

    def note(self, epoch: int, turn: int) -> None:
        """Somebody contributed to `epoch` in the backward of that number."""
        if epoch > self._contributed:
            self._contributed, self._first, self._latest = epoch, turn, turn
        elif epoch == self._contributed:
            self._first, self._latest = min(self._first, turn), max(self._latest, turn)

    def present(self, epoch: int) -> bool:
        if self._contributed == -1 or self._contributed < epoch:
            return False
        return self._contributed > epoch or self._first <= self._rounds.ended

    def own(self, epoch: int) -> torch.Tensor:
        self.check(epoch)
        memory = self._memory()
        if self._content < epoch:
            memory.zero_()
            self._content = epoch
        return memory

    def mark(self, epoch: int) -> None:
        self._memory()
        self._content = self._contributed = epoch
        self._first = self._latest = 0

    def check(self, epoch: int) -> None:
        if self._contributed > epoch or (self._contributed == epoch and self._latest > self._rounds.ended):
            raise overtaken(self._name)

    def release(self) -> None:
        self.store.shard = allocate(0, self._dtype, self._device)
        self._content = -1

    def _memory(self) -> torch.Tensor:
        length = self.store.layout.length(self._rounds.rank)
        if self.store.shard.numel() != length:
            self.store.shard = allocate(length, self._dtype, self._device)
        return self.store.shard


class Rounds:
    """One rank's end of the rounds of a group. Not for use by two threads at once."""

    def __init__(self, group: Group, timeout_s: float) -> None:
        self.rank, self.world, self.timeout_s = group.rank, group.world, timeout_s
        self.ended = 0
        self._host: Channel | None = HostChannel(group, timeout_s)
        self._device: Channel | None = DeviceChannel(group)
        self._peers = [r for r in range(self.world) if r != self.rank]
        self._stores: weakref.WeakValueDictionary[int, Store] = weakref.WeakValueDictionary()
        self._sums: weakref.WeakValueDictionary[int, RoundAccumulator] = weakref.WeakValueDictionary()
        self._uid = 0

    # -- stores

    def private(self, shard: torch.Tensor, layout: Layout, check: int = 0) -> Store:
        self._uid += 1
        store = Store(self._uid, check, layout, shard)
        self._stores[store.uid] = store
        return store

    def accumulator(
        self, name: str, layout: Layout, dtype: torch.dtype, device: torch.device, check: int
    ) -> RoundAccumulator:
        made = RoundAccumulator(name, self.private(allocate(0, dtype, device), layout, check), self, dtype, device)
        self._sums[made.store.uid] = made
        return made

    # -- requests

    def gather(self, wanted: Sequence[tuple[Store, torch.Tensor]]) -> None:
        pages = tuple((store.uid, store.check) for store, _ in wanted)
        self._round(_Request(_Kind.GATHER, pages=pages, ended=self.ended), frames=wanted)

    def add(self, target: RoundAccumulator, gradient: torch.Tensor, scale: float, epoch: int) -> None:
        store = target.store
        if gradient.dtype not in _DTYPES:
            gradient = gradient.to(store.shard.dtype)
        request = _Request(
            _Kind.ADD, pages=((store.uid, store.check),), epoch=epoch, scale=scale,
            dtype=_DTYPES.index(gradient.dtype), ended=self.ended,
        )  # fmt: skip
        self._round(request, gradient=gradient.contiguous())

    def meet(self, intent: str, payload: bytes = b"") -> list[bytes]:
        mine = _Request(_Kind.MEET, intent=intent, payload=payload, ended=self.ended)
        while True:
            requests = self._round(mine)
            if all(request.kind is _Kind.MEET for request in requests):
                intents = [request.intent for request in requests]
                if any(other != intents[0] for other in intents):
                    raise DivergenceError(describe_divergence(intents))
                self.ended = max(request.ended for request in requests)
                return [request.payload for request in requests]

    def await_ended(self) -> None:
        """Serve until every rank has ended as many backwards as this one, or waits at a meeting."""
        mine = _Request(_Kind.AWAIT, ended=self.ended)
        while True:
            requests = self._round(mine)
            if all(other.kind is _Kind.MEET or other.ended >= self.ended for other in requests):
                return

    def scatter(self, store: Store, full: torch.Tensor | None, source: int) -> None:
        self.meet(f"scatter page {store.uid} from rank {source}")
        traffic = _Traffic()
        if self.rank == source:
            assert full is not None
            for peer in self._peers:
                self._send(traffic, full[slice(*store.layout.bounds(peer))], peer)
            store.shard.copy_(full[slice(*store.layout.bounds(self.rank))])
        else:
            self._receive(traffic, store.shard, source)
        self._finish(traffic)

    def close(self) -> None:
        self._stores.clear()
        self._sums.clear()
        self._host = self._device = None

    # -- one round

    def _round(
        self,
        mine: _Request,
        frames: Sequence[tuple[Store, torch.Tensor]] = (),
        gradient: torch.Tensor | None = None,
    ) -> list[_Request]:
        requests = self._exchange(mine)
        self._check(requests)
        traffic = _Traffic()
        for rank, request in enumerate(requests):
            if request.kind is _Kind.GATHER:
                self._serve_gather(traffic, rank, request, frames)
            elif request.kind is _Kind.ADD:
                self._serve_add(traffic, rank, request, gradient)
        self._finish(traffic)
        return requests

    def _serve_gather(
        self, traffic: _Traffic, rank: int, request: _Request, frames: Sequence[tuple[Store, torch.Tensor]]
    ) -> None:
        if rank != self.rank:
            for uid, _ in request.pages:
                self._send(traffic, self._stores[uid].shard, rank)
            return
        for store, frame in frames:
            for owner in range(self.world):
                part = frame[slice(*store.layout.bounds(owner))]
                if owner == self.rank:
                    part.copy_(store.shard)
                else:
                    self._receive(traffic, part, owner)

    def _serve_add(self, traffic: _Traffic, rank: int, request: _Request, gradient: torch.Tensor | None) -> None:
        target = self._sums[request.pages[0][0]]
        layout = target.store.layout
        low, high = layout.bounds(self.rank)
        if rank == self.rank:
            assert gradient is not None
            for peer in self._peers:
                self._send(traffic, gradient[slice(*layout.bounds(peer))], peer)
            part = gradient[low:high]
        else:
            part = allocate(high - low, _DTYPES[request.dtype], target.store.shard.device)
            self._receive(traffic, part, rank)
        traffic.received.append((target, part, request))

    def _finish(self, traffic: _Traffic) -> None:
        for peer, work in traffic.works:
            self._wait(work, peer)
        for target, part, request in traffic.received:  # in rank order: sums have the same bits in every run
            target.note(request.epoch, request.ended + 1)
            if part.numel():
                target.take(part, request.scale, request.epoch)

    def _check(self, requests: list[_Request]) -> None:
        """All ranks see the same headers, so all of them raise, or none."""
        unknown = {}
        for rank, request in enumerate(requests):
            known = self._sums if request.kind is _Kind.ADD else self._stores
            for uid, check in request.pages:
                store = self._stores.get(uid)
                if uid not in known or store is None or store.check != check:
                    unknown[rank] = uid
        if unknown:
            raise DivergenceError(
                f"rank {self.rank} does not have what was asked for (by rank: page number {unknown}). Parameters "
                "must be created in the same order on every rank."
            )

    # -- messages

    def _exchange(self, mine: _Request) -> list[_Request]:
        data = pickle.dumps(
            (mine.kind, mine.intent, mine.payload, mine.pages, mine.epoch, mine.scale, mine.dtype, mine.ended)
        )
        head = torch.zeros(_HEADER, dtype=torch.uint8, device="cpu")  # not the default, which may be "meta"
        head[:8] = torch.frombuffer(bytearray(len(data).to_bytes(8, "little")), dtype=torch.uint8)
        body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        room = _HEADER - 8
        head[8 : 8 + min(room, len(data))] = body[:room]
        heads = self._swap(head, [_HEADER] * self.world)
        lengths = [int.from_bytes(h[:8].numpy().tobytes(), "little") for h in heads]
        tails = self._swap(body[room:].contiguous(), [max(0, n - room) for n in lengths])
        whole = [
            h[8 : 8 + min(room, n)].numpy().tobytes() + t.numpy().tobytes()
            for h, t, n in zip(heads, tails, lengths, strict=True)
        ]
        return [_Request(*pickle.loads(data)) for data in whole]

    def _swap(self, mine: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
        """Everybody's bytes, by rank; `sizes` are known to all, a size of zero sends nothing."""
        with torch.inference_mode(False):
            found = [
                mine if r == self.rank else torch.empty(n, dtype=torch.uint8, device="cpu") for r, n in enumerate(sizes)
            ]
        works = []
        for peer in self._peers:
            if mine.numel():
                works.append((peer, self._begin("send", mine, peer)))
            if sizes[peer]:
                works.append((peer, self._begin("receive", found[peer], peer)))
        for peer, work in works:
            self._wait(work, peer)
        return found

    def _send(self, traffic: _Traffic, data: torch.Tensor, peer: int) -> None:
        for piece in _pieces(data):
            traffic.keep.append(piece)
            traffic.works.append((peer, self._begin("send", piece, peer)))

    def _receive(self, traffic: _Traffic, into: torch.Tensor, peer: int) -> None:
        for piece in _pieces(into):
            traffic.works.append((peer, self._begin("receive", piece, peer)))

    def _begin(self, what: Literal["send", "receive"], data: torch.Tensor, peer: int) -> dist.Work:
        channel = self._host if data.device.type == "cpu" else self._device
        if channel is None:
            raise PeerLostError("this process has closed the engine that served these parameters")
        try:
            with torch.inference_mode(False):
                return channel.send(data, peer) if what == "send" else channel.receive(data, peer)
        except RuntimeError as error:
            raise self._lost(peer, error) from error

    def _wait(self, work: dist.Work, peer: int) -> None:
        try:
            work.wait(timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            raise self._lost(peer, error) from error

    def _lost(self, peer: int, error: RuntimeError) -> PeerLostError:
        if "tim" in str(error).lower() and "out" in str(error).lower():
            return PeerTimeoutError(
                f"rank {peer} did not answer rank {self.rank} within {self.timeout_s:g} s. It may be in code that "
                "the other ranks do not run, or have raised an error that was caught."
            )
        return PeerLostError(
            f"rank {peer} is gone (seen by rank {self.rank}): it died, or let go of its model while others still "
            "read it. End the program on all ranks together, with engine.close() or torch.distributed.barrier()."
        )


def _pieces(data: torch.Tensor) -> list[torch.Tensor]:
    if data.numel() == 0:
        return []
    if data.dtype in (torch.complex64, torch.complex128):
        data = torch.view_as_real(data).reshape(-1)
    return list(data.detach().split(max(1, _PIECE // data.element_size())))
