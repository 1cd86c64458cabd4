"""Gathering one unit of parameters, and reducing one unit of gradients: by zeropage, and by torch.distributed.

A unit is `nbytes` of one dtype, cut over the ranks. `once` moves it and returns the sum of its first and last
element: `expected` if nothing went wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from zeropage.config import Config
from zeropage.layout import Layout
from zeropage.transport import Transport, find_group, open_transport

__all__ = ["Moving", "TorchGather", "TorchReduce", "Unit", "ZeropageGather", "ZeropageReduce", "opened"]

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Unit:
    nbytes: int
    dtype: torch.dtype
    rank: int
    world: int

    @property
    def numel(self) -> int:
        """Elements, as many for each rank."""
        return self.nbytes // self.dtype.itemsize // self.world * self.world

    @property
    def gathered(self) -> float:
        """What `once` of a gather returns: rank r's slice is full of r + 1."""
        return 1.0 + self.world

    @property
    def reduced(self) -> float:
        """What `once` of a reduction returns: rank r's gradient is full of r + 1."""
        return float(self.world * (self.world + 1))


class Moving(Protocol):
    expected: float

    def once(self, index: int) -> float: ...


def opened(transport: str, timeout_s: float = 600.0) -> Transport:
    """A transport over all ranks (collective); to be closed."""
    settings: Any = {"transport": transport, "timeout_s": timeout_s}
    return open_transport(Config(**settings), find_group(None, timeout_s), on_cpu=True)


class ZeropageGather:
    def __init__(self, unit: Unit, transport: Transport) -> None:
        self.expected = unit.gathered
        self._transport = transport
        self._store = transport.allocate("unit", Layout(unit.numel, unit.world), unit.dtype, _CPU)
        transport.open_writes("fill")
        self._store.shard.fill_(unit.rank + 1)
        transport.close_writes()
        in_place = self._store.whole is not None
        self._frame = torch.empty(0 if in_place else unit.numel, dtype=unit.dtype, device="cpu")

    def once(self, index: int) -> float:
        full = self._store.whole
        if full is not None:  # it is a view: all that is to be done is to see that nobody writes
            self._transport.settle()
        else:
            full = self._frame
            self._transport.gather([(self._store, full)])
        return float(full[0] + full[-1])


class TorchGather:
    def __init__(self, unit: Unit) -> None:
        self.expected = unit.gathered
        self._shard = torch.full((unit.numel // unit.world,), unit.rank + 1.0, dtype=unit.dtype, device="cpu")
        self._full = torch.empty(unit.numel, dtype=unit.dtype, device="cpu")

    def once(self, index: int) -> float:
        dist.all_gather_into_tensor(self._full, self._shard)
        return float(self._full[0] + self._full[-1])


class ZeropageReduce:
    """The sum is in fp32 for any gradient, as by default in training."""

    def __init__(self, unit: Unit, transport: Transport) -> None:
        self.expected = unit.reduced
        self._transport = transport
        self._sum = transport.accumulator("unit", Layout(unit.numel, unit.world), torch.float32, _CPU)
        self._gradient = torch.full((unit.numel,), unit.rank + 1.0, dtype=unit.dtype, device="cpu")

    def once(self, index: int) -> float:
        self._transport.begin_backward(reentrant=False)
        self._sum.add(self._gradient, 1.0, index)
        self._transport.end_backward()
        self._transport.await_gradients()
        own = self._sum.own(index)
        return float(own[0] + own[-1])


class TorchReduce:
    """`wide`: cast to fp32 and summed in it, as FSDP2 does with `reduce_dtype`."""

    def __init__(self, unit: Unit, *, wide: bool = False) -> None:
        self.expected = unit.reduced
        self._dtype = torch.float32 if wide else unit.dtype
        self._gradient = torch.full((unit.numel,), unit.rank + 1.0, dtype=unit.dtype, device="cpu")
        self._own = torch.empty(unit.numel // unit.world, dtype=self._dtype, device="cpu")

    def once(self, index: int) -> float:
        dist.reduce_scatter_tensor(self._own, self._gradient.to(self._dtype))
        return float(self._own[0] + self._own[-1])
