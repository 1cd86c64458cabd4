"""One rank: the shard is the page, nothing moves."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from zeropage.layout import Layout
from zeropage.memory.disk import DiskSlice
from zeropage.memory.host import Store, allocate, holders
from zeropage.transport.base import accumulate, overtaken
from zeropage.transport.courier import Arrival

__all__ = ["LocalAccumulator", "LocalTransport"]


class LocalAccumulator:
    """A gradient sum of one rank. See [Note: gradient epochs]. As in torch, the first gradient becomes the sum."""

    def __init__(self, name: str, store: Store, device: torch.device, dtype: torch.dtype) -> None:
        self.store = store
        self._name = name
        self._device, self._dtype = device, dtype
        self._epoch = -1

    def add(self, gradient: torch.Tensor, scale: float, epoch: int) -> None:
        if scale == 1.0 and self._epoch != epoch and self._may_keep(gradient):
            self._bind(gradient)
            self._epoch = epoch
            return
        if self.store.shard.numel() != self.store.layout.numel:
            self._bind(allocate(self.store.layout.numel, self._dtype, self._device))
        accumulate(self.store.shard, gradient, scale, first=self._epoch != epoch)
        self._epoch = epoch

    def _may_keep(self, gradient: torch.Tensor) -> bool:
        """Whether its memory can be that of the sum: none but the tensor that it is a flat view of is there too, and it
        is not of the pinned kind, which is for copies."""
        return (
            gradient.dtype == self._dtype
            and not gradient.is_pinned()
            and gradient.is_contiguous()
            and gradient.untyped_storage().nbytes() == gradient.nbytes
            and holders(gradient) <= 2
        )

    def _bind(self, memory: torch.Tensor) -> None:
        self.store.slice = memory
        self.store.whole = memory

    def present(self, epoch: int) -> bool:
        return self._epoch >= epoch

    def own(self, epoch: int) -> torch.Tensor:
        self.check(epoch)
        if self.store.shard.numel() != self.store.layout.numel:
            self._bind(allocate(self.store.layout.numel, self._dtype, self._device).zero_())
        return self.store.shard

    def mark(self, epoch: int) -> None:
        self._epoch = epoch

    def check(self, epoch: int) -> None:
        if self._epoch > epoch:
            raise overtaken(self._name)

    def release(self) -> None:
        self._bind(allocate(0, self._dtype, self._device))
        self._epoch = -1


class LocalTransport:
    name = "local"
    rank = 0
    world = 1

    def allocate(self, name: str, layout: Layout, dtype: torch.dtype, device: torch.device) -> Store:
        return self.private(allocate(layout.numel, dtype, device), layout)

    def private(
        self, shard: torch.Tensor | DiskSlice, layout: Layout, parts: Sequence[DiskSlice] | None = None
    ) -> Store:
        return Store(0, 0, layout, shard, whole=shard if isinstance(shard, torch.Tensor) else None)

    def accumulator(self, name: str, layout: Layout, dtype: torch.dtype, device: torch.device) -> LocalAccumulator:
        return LocalAccumulator(name, self.private(allocate(0, dtype, device), layout), device, dtype)

    def settle(self) -> None:
        """Nobody else writes."""

    def gather(self, wanted: Sequence[tuple[Store, torch.Tensor]]) -> None:
        for store, frame in wanted:
            frame.copy_(store.values())

    def fetch(self, wanted: Sequence[tuple[Store, torch.Tensor]]) -> Arrival:
        self.gather(wanted)
        return Arrival.at_once()

    def gather_in_step(self, store: Store, frame: torch.Tensor, what: str) -> None:
        frame.copy_(store.values())

    def exclusive(self, store: Store) -> AbstractContextManager[None]:
        return nullcontext()

    def scatter(self, store: Store, full: torch.Tensor | None, source: int) -> None:
        if full is not None:
            store.shard.copy_(full)

    def meet(self, intent: str, payload: bytes = b"") -> list[bytes]:
        return [payload]

    def open_writes(self, intent: str, payload: bytes = b"") -> list[bytes]:
        return [payload]

    def close_writes(self) -> None: ...

    def begin_backward(self, *, reentrant: bool) -> None: ...

    def end_backward(self) -> None: ...

    def await_gradients(self) -> None: ...

    def close(self) -> None: ...
