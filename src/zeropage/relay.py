"""A transport over another one: everything is passed on, and subclasses do something before or after.

`OrderedTransport` is the one for parameters that lie on a device: the threads of the transport inside launch what they
do on the device's default stream, and the lane puts that in order with the streams of the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from zeropage.layout import Layout
from zeropage.memory.device import Lane
from zeropage.memory.disk import DiskSlice
from zeropage.memory.host import Store
from zeropage.transport import Accumulator, Arrival, Transport

__all__ = ["OrderedTransport", "Relay", "RelayedSum"]


class RelayedSum:
    """An accumulator over another one."""

    def __init__(self, inner: Accumulator) -> None:
        self.inner = inner
        self.store = inner.store

    def add(self, gradient: torch.Tensor, scale: float, epoch: int) -> None:
        self.inner.add(gradient, scale, epoch)

    def present(self, epoch: int) -> bool:
        return self.inner.present(epoch)

    def own(self, epoch: int) -> torch.Tensor:
        return self.inner.own(epoch)

    def mark(self, epoch: int) -> None:
        self.inner.mark(epoch)

    def check(self, epoch: int) -> None:
        self.inner.check(epoch)

    def release(self) -> None:
        self.inner.release()


class Relay:
    """See `Transport`."""

    def __init__(self, inner: Transport, lane: Lane) -> None:
        self.inner, self.lane = inner, lane
        self.name, self.rank, self.world = inner.name, inner.rank, inner.world

    def allocate(self, name: str, layout: Layout, dtype: torch.dtype, device: torch.device) -> Store:
        return self.inner.allocate(name, layout, dtype, device)

    def private(
        self, shard: torch.Tensor | DiskSlice, layout: Layout, parts: Sequence[DiskSlice] | None = None
    ) -> Store:
        return self.inner.private(shard, layout, parts)

    def accumulator(self, name: str, layout: Layout, dtype: torch.dtype, device: torch.device) -> Accumulator:
        return self.inner.accumulator(name, layout, dtype, device)

    def settle(self) -> None:
        self.inner.settle()

    def gather(self, wanted: Sequence[tuple[Store, torch.Tensor]]) -> None:
        self.inner.gather(wanted)

    def fetch(self, wanted: Sequence[tuple[Store, torch.Tensor]]) -> Arrival:
        return self.inner.fetch(wanted)

    def gather_in_step(self, store: Store, frame: torch.Tensor, what: str) -> None:
        self.inner.gather_in_step(store, frame, what)

    def exclusive(self, store: Store) -> AbstractContextManager[None]:
        return self.inner.exclusive(store)

    def scatter(self, store: Store, full: torch.Tensor | None, source: int) -> None:
        self.inner.scatter(store, full, source)

    def meet(self, intent: str, payload: bytes = b"") -> list[bytes]:
        return self.inner.meet(intent, payload)

    def open_writes(self, intent: str, payload: bytes = b"") -> list[bytes]:
        return self.inner.open_writes(intent, payload)

    def close_writes(self) -> None:
        self.inner.close_writes()

    def begin_backward(self, *, reentrant: bool) -> None:
        self.inner.begin_backward(reentrant=reentrant)

    def end_backward(self) -> None:
        self.inner.end_backward()

    def await_gradients(self) -> None:
        self.inner.await_gradients()

    def close(self) -> None:
        self.inner.close()


class _OrderedSum(RelayedSum):
    """Gradients are added on the default stream, after what made them; sums are read after that."""

    def __init__(self, inner: Accumulator, lane: Lane) -> None:
        super().__init__(inner)
        self._lane = lane

    def add(self, gradient: torch.Tensor, scale: float, epoch: int) -> None:
        self._lane.hand_over([gradient])
        self.inner.add(gradient, scale, epoch)

    def own(self, epoch: int) -> torch.Tensor:
        found = self.inner.own(epoch)
        self._lane.take_over()
        return found


class OrderedTransport(Relay):
    def accumulator(self, name: str, layout: Layout, dtype: torch.dtype, device: torch.device) -> Accumulator:
        made = self.inner.accumulator(name, layout, dtype, device)
        return _OrderedSum(made, self.lane) if self.name == "collective" else made  # the others have no threads

    def gather(self, wanted: Sequence[tuple[Store, torch.Tensor]]) -> None:
        self.lane.hand_over(frame for _, frame in wanted)
        self.lane.take_over()  # some of it is done by this thread
        self.inner.gather(wanted)
        self.lane.take_over()

    def fetch(self, wanted: Sequence[tuple[Store, torch.Tensor]]) -> Arrival:
        self.lane.hand_over(frame for _, frame in wanted)
        return _Ordered(self.inner.fetch(wanted), self.lane)

    def gather_in_step(self, store: Store, frame: torch.Tensor, what: str) -> None:
        self.lane.hand_over([frame])
        self.lane.take_over()
        self.inner.gather_in_step(store, frame, what)
        self.lane.take_over()

    def scatter(self, store: Store, full: torch.Tensor | None, source: int) -> None:
        self.lane.hand_over([] if full is None else [full])
        self.inner.scatter(store, full, source)
        self.lane.take_over()

    def open_writes(self, intent: str, payload: bytes = b"") -> list[bytes]:
        answers = self.inner.open_writes(intent, payload)
        self.lane.take_over()  # slices may still be being sent
        return answers

    def close_writes(self) -> None:
        self.lane.hand_over([])  # what is sent from now on is what has been written
        self.inner.close_writes()


class _Ordered(Arrival):
    def __init__(self, inner: Arrival, lane: Lane) -> None:
        super().__init__()
        self._inner, self._lane = inner, lane

    @property
    def over(self) -> bool:
        return self._inner.over

    @property
    def here(self) -> bool:
        return self._inner.here

    def wait(self) -> None:
        self._inner.wait()
        self._lane.take_over()
