"""Slices in host memory for parameters of a device (`offload.parameters` or `offload.optimizer` = "host").

    slices, sums of gradients, masters, states    in host memory; the optimizer steps there
    frames                                        on the device, filled by copies beside the program (`Lane.fill`)
    gradients                                     copied to the host beside backward, then added to the sums

The transport inside serves parameters in host memory, so several devices of one host share one copy of all slices
(`shared`). Pages of the device have no memory that an operator could use in place: each is read through a frame. The
one rule: the host changes no slice while a copy may read it (`Lane.drain`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from zeropage.layout import Layout
from zeropage.memory.device import Flight, Lane, map_memory
from zeropage.memory.disk import DiskSlice
from zeropage.memory.host import Store
from zeropage.memory.shared import SharedBlock
from zeropage.relay import Relay, RelayedSum
from zeropage.transport import Accumulator, Arrival, Transport

__all__ = ["HostedTransport"]

_HOST = torch.device("cpu")
_Wanted = tuple[Store, torch.Tensor]


class HostedStore(Store):
    """The store of a page of the device: `inner` is what the transport inside knows."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.uid, self.check, self.layout = inner.uid, inner.check, inner.layout
        self.whole = None
        self.owner, self.parts = inner.owner, inner.parts

    @property
    def slice(self) -> torch.Tensor | DiskSlice:  # type: ignore[override]  # the inner one is replaced now and then
        return self.inner.slice


class _SumStore(HostedStore):
    """The store of a sum of gradients."""


@dataclass(frozen=True, slots=True, eq=False)
class _Copied:
    """A gradient on its way to the host, and where it is to be added."""

    target: Accumulator
    gradient: torch.Tensor
    flight: Flight
    scale: float
    epoch: int


class HostedTransport(Relay):
    """Serves pages of a device over a transport for pages in host memory.

    Args:
        copying_bytes: how many bytes of gradients may be on their way to the host (one may be larger, by itself).
    """

    def __init__(self, inner: Transport, lane: Lane, copying_bytes: int) -> None:
        super().__init__(inner, lane)
        self._copying_bytes = copying_bytes
        self._copying: deque[_Copied] = deque()
        self._nbytes = 0

    # -- memory

    def allocate(self, name: str, layout: Layout, dtype: torch.dtype, device: torch.device) -> Store:
        if not self.lane.serves(device):
            return self.inner.allocate(name, layout, dtype, device)
        if self.name == "shared":
            store = self.inner.allocate(name, layout, dtype, _HOST)
            assert isinstance(store.owner, SharedBlock)
            self.lane.pin(store.owner.storage)
            return HostedStore(store)
        self.inner.meet(f"allocate page {name} of {layout.numel} x {dtype} in host memory")
        return HostedStore(self.inner.private(self._pinned(layout.length(self.rank), dtype), layout))

    def _pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode(False):
            if not count:
                return torch.empty(0, dtype=dtype, device=_HOST)
            memory = torch.frombuffer(map_memory(count * dtype.itemsize), dtype=dtype, count=count)
            self.lane.pin(memory.untyped_storage())
            return memory

    def accumulator(self, name: str, layout: Layout, dtype: torch.dtype, device: torch.device) -> Accumulator:
        if not self.lane.serves(device):
            return self.inner.accumulator(name, layout, dtype, device)
        return _HostedSum(self.inner.accumulator(name, layout, dtype, _HOST), self)

    # -- reading

    def gather(self, wanted: Sequence[_Wanted]) -> None:
        hosted, others = _divide(wanted)
        if others:
            self.inner.gather(others)
        if hosted:
            flight = self._fill(hosted)
            self.lane.ready(flight)
            if any(isinstance(store, _SumStore) for store, _ in hosted):
                flight.wait()  # the next backward adds to it without asking

    def _fill(self, hosted: Sequence[tuple[HostedStore, torch.Tensor]]) -> Flight:
        """Bring what is not on this host, and begin to copy all of it."""
        sources = {store: self._source(store) for store, _ in hosted}
        away = [(store.inner, sources[store]) for store, _ in hosted if store.inner.whole is None]
        if away:
            self.inner.gather(away)
        self.inner.settle()
        return self.lane.fill([(frame, sources[store]) for store, frame in hosted])

    def _source(self, store: HostedStore) -> torch.Tensor:
        """The whole page in host memory: in place, or a place to bring it to."""
        whole = store.inner.whole
        return self.lane.staging(store.layout.numel, store.dtype) if whole is None else whole

    def fetch(self, wanted: Sequence[_Wanted]) -> Arrival:
        hosted, others = _divide(wanted)
        here = [(store, frame) for store, frame in hosted if store.inner.whole is not None]
        away = [(store, frame, self._source(store)) for store, frame in hosted if store.inner.whole is None]
        first = [*others, *((store.inner, source) for store, _, source in away)]
        return _Coming(
            self.lane,
            self.inner.fetch(first) if first else None,
            [(frame, source) for _, frame, source in away],
            self._fill(here) if here else None,
        )

    def gather_in_step(self, store: Store, frame: torch.Tensor, what: str) -> None:
        if not isinstance(store, HostedStore):
            self.inner.gather_in_step(store, frame, what)
            return
        staging = self.lane.staging(store.layout.numel, store.dtype)  # the slices are being written
        self.inner.gather_in_step(store.inner, staging, what)
        self.lane.ready(self.lane.fill([(frame, staging)]))

    # -- writing

    def exclusive(self, store: Store) -> AbstractContextManager[None]:
        self.lane.drain()
        return self.inner.exclusive(_inner(store))

    def scatter(self, store: Store, full: torch.Tensor | None, source: int) -> None:
        self.settle_copies()
        if isinstance(store, HostedStore):
            full = None if full is None else full.to(_HOST)
        self.inner.scatter(_inner(store), full, source)

    def meet(self, intent: str, payload: bytes = b"") -> list[bytes]:
        self.settle_copies()
        return self.inner.meet(intent, payload)

    def open_writes(self, intent: str, payload: bytes = b"") -> list[bytes]:
        self.settle_copies()
        return self.inner.open_writes(intent, payload)

    def settle_copies(self) -> None:
        """Nothing is on its way in either direction: gradients are added, slices may change once all ranks say so."""
        self.land()
        self.lane.drain()

    # -- gradients

    def bring(self, target: Accumulator, gradient: torch.Tensor, scale: float, epoch: int) -> None:
        """Begin to copy a gradient to the host; it is added to `target` when it is there."""
        host, flight = self.lane.fetch(gradient.contiguous())
        self._copying.append(_Copied(target, host, flight, scale, epoch))
        self._nbytes += host.nbytes
        self.land(self._copying_bytes)

    def land(self, nbytes: int = -1) -> None:
        """Add gradients in the order in which they came, until at most `nbytes` are on their way (-1: none at all)."""
        while self._copying and self._nbytes > nbytes:
            copied = self._copying.popleft()
            self._nbytes -= copied.gradient.nbytes
            copied.flight.wait()
            copied.target.add(copied.gradient, copied.scale, copied.epoch)

    def end_backward(self) -> None:
        self.land()
        self.inner.end_backward()

    def await_gradients(self) -> None:
        self.land()
        self.inner.await_gradients()

    def close(self) -> None:
        self._copying.clear()
        self._nbytes = 0
        self.lane.drain()
        self.inner.close()


class _Coming(Arrival):
    """Pages on their way: copies under way, and what has to come to this host first and is copied by who waits."""

    def __init__(
        self,
        lane: Lane,
        inner: Arrival | None,
        staged: list[tuple[torch.Tensor, torch.Tensor]],
        flight: Flight | None,
    ) -> None:
        super().__init__()
        self._lane, self._inner, self._staged, self._flight = lane, inner, staged, flight
        self._second: Flight | None = None

    @property
    def over(self) -> bool:
        return self._inner is None or self._inner.over

    @property
    def here(self) -> bool:
        """Whether nothing but the lane's own stream will write to the frames, in the order of its calls."""
        return not self._staged and (self._inner is None or self._inner.here)

    def wait(self) -> None:
        if self._inner is not None:
            self._inner.wait()
        if self._staged:
            self._second = self._lane.fill(self._staged)
            self._staged = []
        for flight in (self._flight, self._second):
            if flight is not None:
                self._lane.ready(flight)


class _HostedSum(RelayedSum):
    """The sum of a gradient in host memory; what is added is copied there first."""

    def __init__(self, inner: Accumulator, transport: HostedTransport) -> None:
        super().__init__(inner)
        self.store = _SumStore(inner.store)
        self._transport = transport

    def add(self, gradient: torch.Tensor, scale: float, epoch: int) -> None:
        self._transport.bring(self.inner, gradient, scale, epoch)

    def present(self, epoch: int) -> bool:
        self._transport.land()
        return self.inner.present(epoch)

    def own(self, epoch: int) -> torch.Tensor:
        self._transport.land()
        return self.inner.own(epoch)

    def mark(self, epoch: int) -> None:
        self._transport.land()
        self.inner.mark(epoch)

    def check(self, epoch: int) -> None:
        self._transport.land()
        self.inner.check(epoch)

    def release(self) -> None:
        self._transport.land()
        self.inner.release()


def _divide(wanted: Sequence[_Wanted]) -> tuple[list[tuple[HostedStore, torch.Tensor]], list[_Wanted]]:
    """Pages of the device, and others (states of an optimizer, say)."""
    hosted = [(store, frame) for store, frame in wanted if isinstance(store, HostedStore)]
    return hosted, [(store, frame) for store, frame in wanted if not isinstance(store, HostedStore)]


def _inner(store: Store) -> Store:
    return store.inner if isinstance(store, HostedStore) else store
