"""B1: gathering one unit of parameters, and reducing one unit of gradients, of `job.tokens` bytes."""

from __future__ import annotations

from typing import Any

from benchmarks.competitors.base import Job
from zeropage.bench import moving
from zeropage.bench.settings import DTYPES

__all__ = ["TorchGather", "TorchReduce", "ZeropageGather", "ZeropageReduce"]


def _unit(job: Job) -> moving.Unit:
    return moving.Unit(job.tokens, DTYPES[job.precision], job.rank, job.world)


class _Moving:
    work: moving.Moving

    def prepare(self, index: int) -> None: ...

    def once(self, index: int) -> float:
        return self.work.once(index)

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


class _Zeropage(_Moving):
    def __init__(self, transport: str) -> None:
        self.transport = moving.opened(transport)

    def close(self) -> None:
        self.transport.close()


class ZeropageGather(_Zeropage):
    def __init__(self, job: Job, transport: str) -> None:
        super().__init__(transport)
        self.work = moving.ZeropageGather(_unit(job), self.transport)


class ZeropageReduce(_Zeropage):
    def __init__(self, job: Job, transport: str) -> None:
        super().__init__(transport)
        self.work = moving.ZeropageReduce(_unit(job), self.transport)


class TorchGather(_Moving):
    def __init__(self, job: Job) -> None:
        self.work = moving.TorchGather(_unit(job))


class TorchReduce(_Moving):
    def __init__(self, job: Job, *, wide: bool = False) -> None:
        self.work = moving.TorchReduce(_unit(job), wide=wide)
