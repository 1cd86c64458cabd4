"""One rank of `zeropage bench`: measures what it is told to, and the first one says what all of them found.

    python -m zeropage.bench.rank    one line of JSON on standard input says what; one on standard output answers

Standard input stays open as long as the command lives. When it ends, so does this process, whatever it is doing.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from zeropage.bench.expect import Move
from zeropage.bench.local import Layers, Matmul, memory_works
from zeropage.bench.moving import (
    Moving,
    TorchGather,
    TorchReduce,
    Unit,
    ZeropageGather,
    ZeropageReduce,
    opened,
)
from zeropage.bench.settings import DTYPES
from zeropage.bench.stepping import WIDTH, Stepping
from zeropage.bench.timing import repeat
from zeropage.errors import DivergenceError
from zeropage.transport import end_group

__all__ = ["main"]

_TIMEOUT_S = 120.0
_MATRICES = 8  # that each rank steps


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_command, daemon=True).start()
    torch.set_num_threads(job["threads"])
    rank, world = job["rank"], job["world"]
    store = TCPStore(job["address"], job["port"], is_master=False, timeout=timedelta(seconds=_TIMEOUT_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=_TIMEOUT_S))
    found = measure(job)
    if rank == 0:
        answers.write(json.dumps(found) + "\n")
        answers.flush()
    dist.barrier()
    end_group()


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Everything that ranks measure (collective); the same on all of them."""
    seconds, dtype = job["seconds"], DTYPES[job["precision"]]
    return {
        "memory": list(_memory(seconds, job["world"])),
        "compute": list(_compute(seconds, dtype, job["tokens"])),
        "optimizer_ns": _optimizer_ns(seconds, job["world"], job["precision"]),
        "moves": [asdict(move) for move in _moves(job, dtype)],
    }


def _memory(seconds: float, world: int) -> Iterator[dict[str, Any]]:
    for what, nbytes, work in memory_works():
        yield {"what": what, "rate": world * nbytes / repeat(work, seconds).seconds}


def _compute(seconds: float, dtype: torch.dtype, tokens: int) -> Iterator[dict[str, Any]]:
    for name, other in DTYPES.items():
        matmul = Matmul(other)
        yield {"what": "matmul", "precision": name, "rate": matmul.flop / repeat(matmul.once, seconds).seconds}
    (name,) = (name for name, other in DTYPES.items() if other is dtype)
    layers = Layers(dtype, tokens)
    yield {"what": "layers", "precision": name, "rate": layers.flop / repeat(layers.once, seconds).seconds}


def _optimizer_ns(seconds: float, world: int, precision: str) -> float:
    with closing(Stepping(_MATRICES * world, {"precision": precision}, {"lr": 1e-4})) as stepping:
        took = repeat(stepping.once, seconds, stepping.prepare).seconds
    return took / (_MATRICES * WIDTH**2) * 1e9


def _moves(job: dict[str, Any], dtype: torch.dtype) -> Iterator[Move]:
    if job["world"] == 1:
        return
    for nbytes in job["sizes"]:
        unit = Unit(nbytes, dtype, job["rank"], job["world"])
        for name in job["transports"]:
            with closing(opened(name, _TIMEOUT_S)) as transport:
                yield _move("gather", name, unit, ZeropageGather(unit, transport), job["seconds"])
                yield _move("reduce", name, unit, ZeropageReduce(unit, transport), job["seconds"])
                transport.meet("all ranks are done")
        yield _move("gather", "torch.distributed", unit, TorchGather(unit), job["seconds"])
        yield _move("reduce", "torch.distributed", unit, TorchReduce(unit), job["seconds"])


def _move(what: str, by: str, unit: Unit, moving: Moving, seconds: float) -> Move:
    def once(index: int) -> None:
        found = moving.once(index)
        if found != moving.expected:
            raise DivergenceError(f"{what} of {unit.nbytes} bytes by {by} gave {found}, not {moving.expected}")

    took = repeat(once, seconds)
    return Move(what, by, unit.numel * unit.dtype.itemsize, took.seconds, took.processor)


def _end_with_the_command() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
