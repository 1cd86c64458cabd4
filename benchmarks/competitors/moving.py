"""B1: gathering one unit of parameters, and reducing one unit of gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from benchmarks.competitors.base import Job
from zeropage.config import Config
from zeropage.layout import Layout
from zeropage.transport import find_group, open_transport

__all__ = ["TorchGather", "TorchReduce", "ZeropageGather", "ZeropageReduce"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class _Unit:
    """`job.tokens` bytes of `job.precision`."""

    def __init__(self, job: Job) -> None:
        self.dtype = _DTYPES[job.precision]
        self.numel = job.tokens // self.dtype.itemsize
        self.rank, self.world = job.rank, job.world

    def prepare(self, index: int) -> None: ...

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


class _Zeropage(_Unit):
    def __init__(self, job: Job, transport: str) -> None:
        super().__init__(job)
        self.layout = Layout(self.numel, self.world)
        self.transport = open_transport(
            Config(transport=transport), find_group(None, 600.0), on_cpu=True  # type: ignore[arg-type]
        )  # fmt: skip

    def close(self) -> None:
        self.transport.close()


class ZeropageGather(_Zeropage):
    def __init__(self, job: Job, transport: str) -> None:
        super().__init__(job, transport)
        self.store = self.transport.allocate("unit", self.layout, self.dtype, torch.device("cpu"))
        self.transport.open_writes("fill")
        self.store.shard.fill_(self.rank + 1)
        self.transport.close_writes()
        self.frame = torch.empty(0 if self.store.whole is not None else self.numel, dtype=self.dtype)

    def once(self, index: int) -> float:
        if self.store.whole is not None:  # it is a view: all that is to be done is to see that nobody writes
            self.transport.settle()
            full = self.store.whole
        else:
            self.transport.gather([(self.store, self.frame)])
            full = self.frame
        return float(full[0] + full[-1])


class TorchGather(_Unit):
    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.shard = torch.full((self.numel // self.world,), float(self.rank + 1), dtype=self.dtype)
        self.full = torch.empty(self.numel, dtype=self.dtype)

    def once(self, index: int) -> float:
        dist.all_gather_into_tensor(self.full, self.shard)
        return float(self.full[0] + self.full[-1])


class ZeropageReduce(_Zeropage):
    """The sum is in fp32 for any gradient, as by default in training."""

    def __init__(self, job: Job, transport: str) -> None:
        super().__init__(job, transport)
        self.sum = self.transport.accumulator("unit", self.layout, torch.float32, torch.device("cpu"))
        self.gradient = torch.full((self.numel,), float(self.rank + 1), dtype=self.dtype)

    def once(self, index: int) -> float:
        self.transport.begin_backward(reentrant=False)
        self.sum.add(self.gradient, 1.0, index)
        self.transport.end_backward()
        self.transport.await_gradients()
        own = self.sum.own(index)
        return float(own[0] + own[-1])


class TorchReduce(_Unit):
    """`wide`: cast to fp32 and summed in it, as FSDP2 does with `reduce_dtype`."""

    def __init__(self, job: Job, *, wide: bool = False) -> None:
        super().__init__(job)
        self.sum_dtype = torch.float32 if wide else self.dtype
        self.gradient = torch.full((self.numel,), float(self.rank + 1), dtype=self.dtype)
        self.own = torch.empty(self.numel // self.world, dtype=self.sum_dtype)

    def once(self, index: int) -> float:
        dist.reduce_scatter_tensor(self.own, self.gradient.to(self.sum_dtype))
        return float(self.own[0] + self.own[-1])
