"""How fast an optimizer step streams what is on disk, beside what the disk itself can do.

    python benchmarks/offload.py [--layers 16] [--ranks 2] [--repeats 5] [--folder DIR] [--what both|optimizer]

A model of `layers` x 2048 x 2048 fp32 parameters with fused AdamW. Each step reads all that is offloaded and writes it
again. The ways alternate; medians are printed, and the spread of each:

    raw      every rank reads a file of its own in order while another thread of it writes another, past the page cache,
             as many bytes as the step moves
    step     engine.step(), from the moment that all ranks begin to the moment that the last is done
    compute  engine.step() of the same model in memory: what the step takes without any disk

The rate of a way is what was read plus what was written, by all ranks, in a second.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import zeropage as zp

WIDTH = 2048
BLOCK = 8 << 20


class Bench:
    """One rank's part of all measurements."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.folder = Path(options.folder)
        where = {"optimizer": "disk"} if options.what == "optimizer" else {"optimizer": "disk", "parameters": "disk"}
        self.engine = self.made({"offload": {**where, "folder": str(self.folder / "run")}})
        self.in_memory = self.made({})
        self.step(self.engine)  # makes the states
        self.step(self.in_memory)
        self.nbytes = self.engine.memory().by_device["disk"]
        self.source = self.folder / f"source-{dist.get_rank()}"
        self.target = self.folder / f"target-{dist.get_rank()}"
        self.move(self.source, self.write)
        self.move(self.target, self.write)
        self.seen: dict[str, list[float]] = {}

    def made(self, config: dict[str, object]) -> zp.Engine:
        with zp.init(config):
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(self.options.layers)))
        return zp.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))

    def step(self, engine: zp.Engine, name: str = "") -> None:
        engine.backward(engine(torch.ones(1, WIDTH)).square().mean())
        self.timed(name, engine.step) if name else engine.step()

    def timed(self, name: str, work: Callable[[], object]) -> None:
        """Seconds until the last rank is done."""
        dist.barrier()
        began = time.perf_counter()
        work()
        dist.barrier()
        self.seen.setdefault(name, []).append(time.perf_counter() - began)

    def repeat(self) -> None:
        self.timed("raw", self.raw)
        self.step(self.engine, "step")
        self.step(self.in_memory, "compute")

    # -- the disk by itself

    def raw(self) -> None:
        ways = [(self.source, self.read), (self.target, self.write)]
        threads = [threading.Thread(target=self.move, args=way) for way in ways]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def move(self, path: Path, way: Callable[[int, mmap.mmap, int], object]) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        buffer = mmap.mmap(-1, BLOCK)
        for place in range(0, self.nbytes, BLOCK):
            way(file, buffer, place)
        os.close(file)

    @staticmethod
    def read(file: int, buffer: mmap.mmap, place: int) -> None:
        os.preadv(file, [buffer], place)

    @staticmethod
    def write(file: int, buffer: mmap.mmap, place: int) -> None:
        os.pwritev(file, [buffer], place)

    def report(self) -> None:
        moved = 2 * self.nbytes * self.options.ranks
        print(f"{moved / 1e9:.2f} GB are moved, {self.options.ranks} ranks")
        for name, seconds in self.seen.items():
            middle = statistics.median(seconds)
            rate = "" if name == "compute" else f"{moved / middle / 1e9:6.2f} GB/s"
            print(f"{name:8} {middle:7.3f} s ({min(seconds):.3f} to {max(seconds):.3f}) {rate}")
        ratios = [raw / step for raw, step in zip(self.seen["raw"], self.seen["step"], strict=True)]
        print(
            f"step / raw: {100 * statistics.median(ratios):.0f} % ({100 * min(ratios):.0f} to {100 * max(ratios):.0f})"
        )


def _rank(rank: int, options: argparse.Namespace, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=options.ranks)
    bench = Bench(options)
    bench.repeat()  # warm-up
    bench.seen.clear()
    for _ in range(options.repeats):
        bench.repeat()
    if rank == 0:
        bench.report()
    bench.engine.close()
    bench.in_memory.close()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", default=None, help="on the disk to be measured; default: a temporary one here")
    parser.add_argument("--what", choices=["both", "optimizer"], default="both")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path(options.folder or ".").resolve()) as folder:
        options.folder = folder
        mp.spawn(_rank, args=(options, f"{folder}/meeting"), nprocs=options.ranks)


if __name__ == "__main__":
    main()
