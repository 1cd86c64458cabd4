"""Ranks anywhere, over any backend of `torch.distributed`: pages are gathered into frames by messages.

Every rank keeps its own slices in memory of its own. All traffic goes through `Rounds`, which makes reads
and additions one-sided: ranks may touch different pages in different orders.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from zeropage.layout import Layout
from zeropage.memory.disk import DiskSlice
from zeropage.memory.host import Store, allocate
from zeropage.transport.courier import Arrival
from zeropage.transport.group import Group
from zeropage.transport.rounds import RoundAccumulator, Rounds

__all__ = ["CollectiveTransport"]


class CollectiveTransport:
    name = "collective"

    def __init__(self, group: Group, timeout_s: float, outgoing_bytes: int, *, deterministic: bool) -> None:
        self.rank, self.world = group.rank, group.world
        self._rounds = Rounds(group, timeout_s, outgoing_bytes, deterministic=deterministic)
        self._in_backward = False
        self.meet("start")

    def allocate(self, name: str, layout: Layout, dtype: torch.dtype, device: torch.device) -> Store:
        self.meet(f"allocate page {name} of {layout.numel} x {dtype}")
        shard = allocate(layout.length(self.rank), dtype, device)
        return self._rounds.private(shard, layout, _check_of(name))

    def private(
        self, shard: torch.Tensor | DiskSlice, layout: Layout, parts: Sequence[DiskSlice] | None = None
    ) -> Store:
        return self._rounds.private(shard, layout)

    def accumulator(self, name: str, layout: Layout, dtype: torch.dtype, device: torch.device) -> RoundAccumulator:
        return self._rounds.accumulator(name, layout, dtype, device, _check_of(name))

    def settle(self) -> None:
        """A rank that writes answers nobody but those that meet it."""

    def gather(self, wanted: Sequence[tuple[Store, torch.Tensor]]) -> None:
        self._rounds.gather(wanted)

    def fetch(self, wanted: Sequence[tuple[Store, torch.Tensor]]) -> Arrival:
        return self._rounds.fetch(wanted)

    def gather_in_step(self, store: Store, frame: torch.Tensor, what: str) -> None:
        self._rounds.meet(f"read {what} inside the optimizer step")
        self._rounds.gather([(store, frame)])

    def exclusive(self, store: Store) -> AbstractContextManager[None]:
        return nullcontext()

    def scatter(self, store: Store, full: torch.Tensor | None, source: int) -> None:
        self._rounds.scatter(store, full, source)

    def meet(self, intent: str, payload: bytes = b"") -> list[bytes]:
        self.end_backward()
        return self._rounds.meet(intent, payload)

    def open_writes(self, intent: str, payload: bytes = b"") -> list[bytes]:
        self.end_backward()
        return self._rounds.meet(intent, payload, to_write=True)

    def close_writes(self) -> None:
        self._rounds.writing = False

    def begin_backward(self, *, reentrant: bool) -> None:
        self._in_backward = True
        self._rounds.reentrant = self._rounds.reentrant or reentrant

    def end_backward(self) -> None:
        if self._in_backward:
            self._in_backward = False
            self._rounds.end_backward()

    def await_gradients(self) -> None:
        self.end_backward()
        self._rounds.await_ended()

    def close(self) -> None:
        self._rounds.close()


def _check_of(name: str) -> int:
    """Guards against pages of different names under one number."""
    return zlib.crc32(name.encode())
