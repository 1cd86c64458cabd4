"""Rounds: one-sided reads and additions over two-sided messages.

Every call of every rank is a *request*. In each round all ranks tell each other what they want (a small
header), and then everybody serves everybody: a rank that asks for a page gets a slice from each owner, a
rank that adds a gradient sends each owner its part. Ranks need not want the same thing: while one reads
expert 3 the other may read expert 5, or add a gradient, or wait at a meeting, serving until all have come.
So nothing depends on the order in which ranks touch pages, and identities, never positions, say what a
message holds. A header that cannot be served is an error on all ranks, because all see all headers.

A rank whose program makes no call at all takes part as well: the thread that hears the others' headers answers
for it (`inbox`). Only while this rank writes its slices does everybody wait.
"""

from __future__ import annotations

import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from zeropage.errors import (
    DivergenceError,
    PeerLostError,
    PeerTimeoutError,
    TransportUnavailableError,
    UnsupportedOperationError,
)
from zeropage.layout import Layout
from zeropage.memory.disk import DiskSlice
from zeropage.memory.host import Store, allocate
from zeropage.memory.raw import as_bytes
from zeropage.transport.base import accumulate, overtaken
from zeropage.transport.channel import Channel, Collective, DeviceChannel, HostChannel, Message, in_host_memory
from zeropage.transport.control import describe_divergence
from zeropage.transport.courier import Arrival, Courier, closed
from zeropage.transport.group import Group
from zeropage.transport.inbox import HEADER, Inbox, Lost
from zeropage.transport.requests import Kind, Part, Request, Round, wanted_by_all

__all__ = ["RoundAccumulator", "Rounds"]

_T = TypeVar("_T")
_ROOM = HEADER - 16  # bytes of a request that travel with its header; the rest follows in a second message
_PIECE = 16 << 20  # gloo pipelines messages of this size best
_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip
_REDUCED = (torch.float32, torch.bfloat16, torch.float64)  # by devices, before they are scaled: fp16 might overflow


@dataclass(slots=True)
class _Traffic:
    """The messages of one round: those in host memory are in flight, those of devices are begun together.

    `in_common`: the pages, by number, that all ranks move at once instead (see [Note: native collectives]).
    """

    in_common: frozenset[int] = frozenset()
    works: list[tuple[int, dist.Work]] = field(default_factory=list)
    together: list[Message] = field(default_factory=list)
    collectives: dict[int, Collective] = field(default_factory=dict)  # by the number of the page
    keep: list[torch.Tensor] = field(default_factory=list)
    received: list[tuple[int, RoundAccumulator, torch.Tensor, float, int, Request]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Parcel:
    """A gradient of this rank on its way to the owners."""

    target: RoundAccumulator
    gradient: torch.Tensor  # 1-D, of one of the dtypes above
    scale: float
    epoch: int
    reentrant: bool


_Wanted = tuple[Store, torch.Tensor]
"""A page, and the frame that is to be filled with it."""


def _goes_with(first: _Parcel, other: _Parcel) -> bool:
    return first.reentrant == other.reentrant


class RoundAccumulator:
    """A gradient sum whose parts arrive in rounds; each rank sees every header, so all know who added."""

    def __init__(self, name: str, store: Store, rounds: Rounds, dtype: torch.dtype, device: torch.device) -> None:
        self.store = store
        self._name, self._rounds, self._dtype, self._device = name, rounds, dtype, device
        self._content = -1
        self._contributed = -1
        self._first = self._latest = 0  # one more than the number of the backward of the first and latest contribution
        self._turns: dict[int, int] = {}  # by rank: the last backward in which it has added all that it had
        self._lock = threading.Lock()  # the program and the thread that serves may both be here

    def add(self, gradient: torch.Tensor, scale: float, epoch: int) -> None:
        self._rounds.add(self, gradient, scale, epoch)

    def take(self, part: torch.Tensor, scale: float, epoch: int) -> None:
        """A part of this rank's slice has come in."""
        with self._lock:
            if epoch >= self._content:
                accumulate(self._memory(), part, scale, first=epoch > self._content)
                self._content = epoch

    def has_added(self, rank: int, turn: int) -> bool:
        """Whether `rank` has nothing more to add in the backward of that number."""
        return self._turns.get(rank, 0) >= turn

    def note(self, rank: int, epoch: int, turn: int, *, reentrant: bool) -> None:
        """`rank` contributes to `epoch` in the backward of that number."""
        if not reentrant:
            self._turns[rank] = turn
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
        with self._lock:
            memory = self._memory()
            if self._content < epoch:
                memory.zero_()
                self._content = epoch
            return memory

    def mark(self, epoch: int) -> None:
        with self._lock:
            self._memory()
            self._content = self._contributed = epoch
            self._first = self._latest = 0

    def check(self, epoch: int) -> None:
        if self._contributed > epoch or (self._contributed == epoch and self._latest > self._rounds.ended):
            raise overtaken(self._name)

    def release(self) -> None:
        self._rounds.drain()
        with self._lock:
            self.store.slice = allocate(0, self._dtype, self._device)
            self._content = -1

    def _memory(self) -> torch.Tensor:
        length = self.store.layout.length(self._rounds.rank)
        if self.store.shard.numel() != length:
            self.store.slice = allocate(length, self._dtype, self._device)
        return self.store.shard


class Rounds:
    """One rank's end of the rounds of a group.

    [Note: who answers] A round is made by one thread at a time: the program's, or one of the inbox that found
    nobody to answer a peer. The inbox's waits while this rank writes its slices (`writing`): the program opens
    and closes writes, and what it closes late is read late.
    """

    def __init__(self, group: Group, timeout_s: float, outgoing_bytes: int, *, deterministic: bool) -> None:
        self.rank, self.world, self.timeout_s = group.rank, group.world, timeout_s
        self.ended = 0
        self.reentrant = False
        self.writing = False
        self._deterministic = deterministic
        self._peers = [r for r in range(self.world) if r != self.rank]
        host = HostChannel(group, timeout_s)
        self._inbox = Inbox(host, self._peers, self._serve)
        self._host: HostChannel | None = host
        self._device: DeviceChannel | None = DeviceChannel(group, timeout_s)
        self._lock = threading.RLock()  # held for a whole round
        self._failed: Exception | None = None  # why no round is made any more
        self._courier: Courier[_Wanted, _Parcel] = Courier(self._fetch, self._deliver, _goes_with, outgoing_bytes)
        self._stores: weakref.WeakValueDictionary[int, Store] = weakref.WeakValueDictionary()
        self._sums: weakref.WeakValueDictionary[int, RoundAccumulator] = weakref.WeakValueDictionary()
        self._made = 0
        self._farewell = weakref.finalize(self, _leave, self._courier, self._inbox)

    # -- stores

    def private(self, shard: torch.Tensor | DiskSlice, layout: Layout, check: int = 0) -> Store:
        self._inbox.start()  # from now on others may ask
        store = Store(self._made + 1, check, layout, shard)
        self._stores[store.uid] = store
        self._made += 1  # from now on others may ask for it
        return store

    def accumulator(
        self, name: str, layout: Layout, dtype: torch.dtype, device: torch.device, check: int
    ) -> RoundAccumulator:
        store = Store(self._made + 1, check, layout, allocate(0, dtype, device))
        made = RoundAccumulator(name, store, self, dtype, device)
        self._stores[store.uid], self._sums[store.uid] = store, made
        self._made += 1
        return made

    # -- requests

    def gather(self, wanted: Sequence[_Wanted]) -> None:
        self._require_own_process()
        with self._courier:
            self._fetch(wanted)

    def fetch(self, wanted: Sequence[_Wanted]) -> Arrival:
        """Like `gather`, beside the program."""
        self._require_own_process()
        return self._courier.fetch(wanted)

    def _fetch(self, wanted: Sequence[_Wanted]) -> None:
        pages = tuple((store.uid, store.check) for store, _ in wanted)
        self._insist(Request(Kind.GATHER, pages=pages), self._was_served, frames=wanted)

    def add(self, target: RoundAccumulator, gradient: torch.Tensor, scale: float, epoch: int) -> None:
        """Beside the program: `gradient` is kept as it is until it has been sent (see `drain`)."""
        self._require_own_process()
        if gradient.dtype not in _DTYPES:
            gradient = gradient.to(target.store.dtype)
        gradient = _in_memory(gradient)
        parcel = _Parcel(target, gradient, scale, epoch, self.reentrant)
        self._courier.deliver(parcel, gradient.numel() * gradient.element_size())

    def _deliver(self, parcels: Sequence[_Parcel]) -> None:
        request = Request(
            Kind.ADD,
            pages=tuple((parcel.target.store.uid, parcel.target.store.check) for parcel in parcels),
            parts=tuple((parcel.epoch, parcel.scale, _DTYPES.index(parcel.gradient.dtype)) for parcel in parcels),
            reentrant=parcels[0].reentrant,
        )
        gradients = [parcel.gradient for parcel in parcels]
        self._insist(request, self._was_served, gradients=gradients, between=self._courier.give_way)

    def drain(self) -> None:
        """Wait until what was to be brought or added has been."""
        self._require_own_process()
        self._courier.drain()

    def _require_own_process(self) -> None:
        if self._inbox.forked:
            raise UnsupportedOperationError(
                f"a forked child of rank {self.rank} uses its sharded model, whose messages are the rank's own. Give "
                "the child plain tensors (zp.full), or move what it does into the rank."
            )

    def end_backward(self) -> None:
        """What the program adds next belongs to the next backward."""
        self.drain()
        self.reentrant = False
        self.ended += 1

    def meet(self, intent: str, payload: bytes = b"", *, to_write: bool = False) -> list[bytes]:
        self.drain()
        with self._lock:
            requests = self._insist(Request(Kind.MEET, intent=intent, payload=payload), _all_meet)
            intents = [request.intent for request in requests]
            if any(other != intents[0] for other in intents):
                raise DivergenceError(describe_divergence(intents))
            self.ended = max(request.ended for request in requests)
            self.writing = self.writing or to_write
        return [request.payload for request in requests]

    def await_ended(self) -> None:
        """Serve until every rank has ended as many backwards as this one, or waits at a meeting."""
        self.drain()
        self._insist(Request(Kind.AWAIT), self._all_ended)

    def scatter(self, store: Store, full: torch.Tensor | None, source: int) -> None:
        self.drain()
        with self._lock:
            self.meet(f"scatter page {store.uid} from rank {source}")
            with self._no_half_messages():
                self._connect([store])
                traffic = _Traffic()
                if self.rank == source:
                    assert full is not None
                    full = _in_memory(full)
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
        self._farewell()

    # -- until it is done

    def _insist(
        self,
        mine: Request,
        done: Callable[[Round], bool],
        frames: Sequence[_Wanted] = (),
        gradients: Sequence[torch.Tensor] = (),
        between: Callable[[], None] | None = None,
    ) -> list[Request]:
        """Make rounds until one is `done`; while the others' programs do something, that may take its time."""
        since = time.monotonic()
        while True:
            made = self._round(mine, frames, gradients)
            if done(made):
                return made.requests
            if made.moved:
                since = time.monotonic()
            elif time.monotonic() - since > self.timeout_s:
                idle = [rank for rank, request in enumerate(made.requests) if request.kind is Kind.IDLE]
                raise self._too_late(idle[0] if idle else min(self._peers))
            if between is not None:
                between()

    def _was_served(self, made: Round) -> bool:
        return self.rank not in made.deferred

    def _all_ended(self, made: Round) -> bool:
        return all(other.kind is Kind.MEET or other.ended >= self.ended for other in made.requests)

    def _serve(self, peer: int) -> None:
        """Answer a header of `peer` that the program does not come for (in a thread of the inbox)."""
        with self._lock:
            if self._inbox.pending(peer) and not self.writing and self._host is not None:
                try:
                    with torch.no_grad():
                        self._round(Request(Kind.IDLE))
                except Exception as error:  # told to the program when it comes
                    self._failed = self._failed or error

    # -- one round

    def _round(
        self,
        mine: Request,
        frames: Sequence[_Wanted] = (),
        gradients: Sequence[torch.Tensor] = (),
    ) -> Round:
        with self._lock, self._no_half_messages():
            requests = self._exchange(replace(mine, ended=self.ended, made=self._made))
            made = Round(requests, self._deferred(requests))
            served = [(rank, request) for rank, request in enumerate(requests) if rank not in made.deferred]
            self._connect(self._stores[uid] for _, request in served for uid, _ in request.pages)
            traffic = _Traffic(self._in_common([request for _, request in served]))
            for rank, request in served:
                if request.kind is Kind.GATHER:
                    self._serve_gather(traffic, rank, request, frames)
                elif request.kind is Kind.ADD:
                    self._serve_add(traffic, rank, request, gradients)
            self._finish(traffic)
            return made

    @contextmanager
    def _no_half_messages(self) -> Iterator[None]:
        """After what ends messages halfway (a lost peer, a signal's exception, memory), none is made any more: what
        the peers sent for that one would be taken for the next."""
        if self._failed is not None:
            raise self._failed
        try:
            yield
        except (DivergenceError, TransportUnavailableError):
            raise  # on all ranks, before the first message
        except PeerLostError as error:
            self._failed = error
            raise
        except BaseException as error:
            self._failed = PeerLostError(
                f"rank {self.rank} broke off a message to its peers ({error!r}), so it cannot tell their next ones "
                "from what is left of it. End the program on all ranks, and resume it from a checkpoint."
            )
            raise

    def _deferred(self, requests: list[Request]) -> set[int]:
        """The ranks whose requests have to wait for another round. All ranks see the same headers and come to the
        same conclusion; so all of them raise, or none.

        [Note: order of additions] Parts are added in the order (backward, rank), so that sums have the same bits
        in every run, at any world size. A part waits until every lower rank has added its own or has ended
        the backward of the same number, and every higher one that of the number before. As over `shared`,
        this cannot deadlock: see [Note: turns].
        """
        deferred: set[int] = set()
        unknown = {}
        for rank, request in enumerate(requests):
            known = self._sums if request.kind is Kind.ADD else self._stores
            for uid, check in request.pages:
                without = [other for other in requests if other.made < uid]
                if without and all(other.kind not in (Kind.MEET, Kind.AWAIT) for other in without):
                    deferred.add(rank)  # they will have made it when their programs have come as far
                    continue
                store = self._stores.get(uid)
                if without or uid not in known or store is None or store.check != check:
                    unknown[rank] = uid
            orders = request.kind is Kind.ADD and self._deterministic and rank not in deferred and rank not in unknown
            if orders and not all(self._goes_before(other, rank, requests, deferred) for other in range(self.world)):
                deferred.add(rank)
        if unknown:
            raise DivergenceError(
                f"rank {self.rank} does not have what was asked for (by rank: page number {unknown}). Parameters "
                "must be created in the same order on every rank."
            )
        return deferred

    def _goes_before(self, other: int, rank: int, requests: list[Request], deferred: set[int]) -> bool:
        """Whether `other` has nothing to add that comes before what `rank` wants to add now."""
        mine, theirs = requests[rank], requests[other]
        needed = mine.turn if other < rank else mine.turn - 1
        if theirs.kind is Kind.MEET or theirs.ended >= needed:
            return True
        now: set[tuple[int, int]] = set()  # what it adds in this very round
        if other < rank and theirs.kind is Kind.ADD and theirs.turn == mine.turn and not theirs.reentrant:
            now = set() if other in deferred else set(theirs.pages)
        return all(page in now or self._sums[page[0]].has_added(other, needed) for page in mine.pages)

    def _in_common(self, served: list[Request]) -> frozenset[int]:
        """The pages that all ranks ask for, or add to alike, and that are moved by a collective of the devices.

        [Note: native collectives] What all ranks want crosses the border of a host once in a ring, and once for each
        rank behind it in messages. So it goes by all-gather or reduce-scatter where nothing is lost by that: a
        reduce-scatter adds in an order of its own and in the gradients' dtype; messages are added in the order of ranks
        and in the dtype of the sum. All ranks see the same requests, and come to the same answer.
        """
        connected = self._device is not None and self._device.connected
        if not connected or len(served) < self.world or (self._deterministic and served[0].kind is Kind.ADD):
            return frozenset()
        wishes = wanted_by_all(served)
        return frozenset(uid for (uid, _), part in wishes if self._is_collective(self._stores[uid], part))

    def _is_collective(self, store: Store, part: Part | None) -> bool:
        """Whether devices have a collective for it: slices of one length; a `part` in the dtype of the sum."""
        even = store.layout.numel == store.layout.world * store.layout.chunk
        added = part is None or (store.dtype == _DTYPES[part[2]] and store.dtype in _REDUCED)
        return even and added and not in_host_memory(store.slice)

    def _serve_gather(self, traffic: _Traffic, rank: int, request: Request, frames: Sequence[_Wanted]) -> None:
        if rank != self.rank:
            for uid, _ in request.pages:
                if uid not in traffic.in_common:
                    self._send(traffic, self._stores[uid].values(), rank)
            return
        for store, frame in frames:
            if store.uid in traffic.in_common:
                traffic.collectives[store.uid] = Collective("all_gather", as_bytes(frame), as_bytes(store.values()))
                continue
            for owner in range(self.world):
                part = frame[slice(*store.layout.bounds(owner))]
                if owner == self.rank:
                    part.copy_(store.values())
                else:
                    self._receive(traffic, part, owner)

    def _serve_add(self, traffic: _Traffic, rank: int, request: Request, gradients: Sequence[torch.Tensor]) -> None:
        for index, ((uid, _), (epoch, scale, dtype)) in enumerate(zip(request.pages, request.parts, strict=True)):
            target = self._sums[uid]
            layout, device = target.store.layout, target.store.slice.device
            low, high = layout.bounds(self.rank)
            if uid in traffic.in_common:  # all of it counts as this rank's part, and the others' as empty
                part = allocate(high - low if rank == self.rank else 0, _DTYPES[dtype], device)
                if rank == self.rank:
                    traffic.collectives[uid] = Collective("reduce_scatter", gradients[index], part)
            elif rank == self.rank:
                for peer in self._peers:
                    self._send(traffic, gradients[index][slice(*layout.bounds(peer))], peer)
                part = gradients[index][low:high]
            else:
                part = allocate(high - low, _DTYPES[dtype], device)
                self._receive(traffic, part, rank)
            traffic.received.append((rank, target, part, scale, epoch, request))

    def _finish(self, traffic: _Traffic) -> None:
        if traffic.collectives:
            in_one_order = sorted(traffic.collectives)
            traffic.works.append(self._begin_collectives([traffic.collectives[uid] for uid in in_one_order]))
        if traffic.together:
            traffic.works += self._begin(self._device, traffic.together)
        for peer, work in traffic.works:
            self._wait(work, peer)
        for rank, target, part, scale, epoch, request in traffic.received:  # in rank order
            target.note(rank, epoch, request.turn, reentrant=request.reentrant)
            if part.numel():
                target.take(part, scale, epoch)

    # -- messages

    def _exchange(self, mine: Request) -> list[Request]:
        if self._host is None:
            raise closed()
        self._inbox.start()
        data = pickle.dumps(tuple(getattr(mine, name) for name in mine.__slots__))
        head = len(data).to_bytes(8, "little") + data[:_ROOM]
        try:
            sent = self._inbox.post(head, asks=mine.asks)
            heads = [
                head if peer == self.rank else self._inbox.take(peer, self.timeout_s) for peer in range(self.world)
            ]
        except Lost as lost:
            raise (self._too_late(lost.peer) if lost.late else self._gone(lost.peer)) from None
        for peer, work in sent:
            self._wait(work, peer)
        lengths = [int.from_bytes(head[:8], "little") for head in heads]
        rest = torch.tensor(list(data[_ROOM:]), dtype=torch.uint8, device="cpu")
        tails = self._swap(rest, [max(0, length - _ROOM) for length in lengths])
        return [
            Request(*pickle.loads(head[8 : 8 + min(_ROOM, length)] + tail.numpy().tobytes()))
            for head, tail, length in zip(heads, tails, lengths, strict=True)
        ]

    def _swap(self, mine: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
        """Everybody's bytes, by rank; `sizes` are known to all, a size of zero sends nothing."""
        with torch.inference_mode(False):
            found = [
                mine if r == self.rank else torch.empty(n, dtype=torch.uint8, device="cpu") for r, n in enumerate(sizes)
            ]
        works = []
        for peer in self._peers:
            if mine.numel():
                works += self._begin(self._host, [Message("send", mine, peer)])
            if sizes[peer]:
                works += self._begin(self._host, [Message("receive", found[peer], peer)])
        for peer, work in works:
            self._wait(work, peer)
        return found

    def _send(self, traffic: _Traffic, data: torch.Tensor, peer: int) -> None:
        for piece in _pieces(data):
            traffic.keep.append(piece)
            self._add(traffic, Message("send", piece, peer))

    def _receive(self, traffic: _Traffic, into: torch.Tensor, peer: int) -> None:
        for piece in _pieces(into):
            self._add(traffic, Message("receive", piece, peer))

    def _add(self, traffic: _Traffic, message: Message) -> None:
        if in_host_memory(message.data):
            traffic.works += self._begin(self._host, [message])
        else:
            traffic.together.append(message)

    def _begin(self, channel: Channel | None, messages: Sequence[Message]) -> list[tuple[int, dist.Work]]:
        """Each work with its peer. Of a group that fails nobody knows whose fault it is, so the first one's stands."""
        if channel is None:
            raise closed()
        works = self._attempt(messages[0].peer, partial(channel.begin, messages))
        return [(message.peer, work) for message, work in zip(messages, works, strict=False)]

    def _begin_collectives(self, collectives: Sequence[Collective]) -> tuple[int, dist.Work]:
        if self._device is None:
            raise closed()
        first = self._peers[0]
        return first, self._attempt(first, partial(self._device.begin_collectives, collectives))

    def _attempt(self, peer: int, begin: Callable[[], _T]) -> _T:
        try:
            with torch.inference_mode(False):
                return begin()
        except RuntimeError as error:
            raise self._lost(peer, error) from error

    def _connect(self, stores: Iterable[Store]) -> None:
        """Connect the devices, if any of `stores` is the first to need it; all ranks are here, with the same ones."""
        if self._device is None or self._device.connected:
            return
        apart = next((store.slice for store in stores if not in_host_memory(store.slice)), None)
        if apart is not None:
            self._device.connect(apart.device)

    def _wait(self, work: dist.Work, peer: int) -> None:
        try:
            work.wait(timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            raise self._lost(peer, error) from error

    def _lost(self, peer: int, error: RuntimeError) -> PeerLostError:
        late = "tim" in str(error).lower() and "out" in str(error).lower()
        return self._too_late(peer) if late else self._gone(peer)

    def _too_late(self, peer: int) -> PeerTimeoutError:
        self._inbox.lose(peer)
        return PeerTimeoutError(
            f"rank {peer} did not answer rank {self.rank} within {self.timeout_s:g} s. It may be in code that "
            "the other ranks do not run, or have raised an error that was caught."
        )

    def _gone(self, peer: int) -> PeerLostError:
        first = self._inbox.lost_by(peer)
        self._inbox.lose(peer if first is None else first)
        if first is not None:
            return PeerLostError(f"rank {peer} is gone, having lost rank {first} (seen by rank {self.rank})")
        return PeerLostError(
            f"rank {peer} is gone (seen by rank {self.rank}): it died, or let go of its model while others still "
            "read it. End the program on all ranks together, with engine.close() or torch.distributed.barrier()."
        )


def _leave(courier: Courier[_Wanted, _Parcel], inbox: Inbox) -> None:
    if not inbox.forked:
        courier.close()
    inbox.close()


def _all_meet(made: Round) -> bool:
    return all(request.kind is Kind.MEET for request in made.requests)


def _in_memory(data: torch.Tensor) -> torch.Tensor:
    """`data` or a copy whose memory alone tells the values: element after element, no lazy conjugate or sign."""
    return data.resolve_conj().resolve_neg().contiguous()


def _pieces(data: torch.Tensor) -> list[torch.Tensor]:
    """As bytes, since backends do not know every dtype."""
    return list(as_bytes(data).split(_PIECE)) if data.numel() else []
