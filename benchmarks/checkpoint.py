"""How fast checkpoints are written and read, beside what the disk can do and what torch does with the same state.

    python benchmarks/checkpoint.py [--layers 21] [--tokens 512] [--ranks 2] [--repeats 5] [--folder DIR]

A model of `layers` x 2048 x 2048 fp32 parameters with AdamW (21 layers: 1.06 GB of state). The ways alternate;
medians are printed, and the spread of each.

Saving, until it is on the disk:

    raw          every rank fallocates and writes its share of the bytes, and fsyncs
    save         engine.save
    dcp.save     torch.distributed.checkpoint.save of as much state, sharded as FSDP2 does (DTensors)
    torch.save   torch.save of the full state by one process, and fsync

Saving beside training, whose next step begins at once and computes on `tokens` tokens a rank:

    wait=False   engine.save(wait=False)
    async_save   torch.distributed.checkpoint.async_save

  *held up* is how long the program was stopped: the call, and what the optimizer step waited for the writer (for torch:
  the call, which copies the state). *slower* is what the step took longer than a step alone, for whatever reason:
  on a machine whose cores all compute, writing costs some of their time.

Loading, warm (the files are in the page cache) and cold (they are not):

    load         engine.load, checksums included
    dcp.load     torch.distributed.checkpoint.load, which checks nothing
    torch.load   torch.load of the full state by one process
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import zeropage as zp

WIDTH = 2048


class Bench:
    """One rank's part of all measurements."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.folder = Path(options.folder)
        with zp.init():
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(options.layers)))
        self.engine = zp.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
        self.input = torch.ones(options.tokens, WIDTH)
        self.step()
        self.nbytes = sum(v.numel() * v.element_size() for v in self.state().values())
        self.full = {name: zp.full(value) for name, value in self.state().items()}
        mesh = init_device_mesh("cpu", (options.ranks,))
        self.sharded: dict[str, torch.Tensor] = {
            name: distribute_tensor(value, mesh, [Shard(0)]) if value.dim() else value
            for name, value in self.full.items()
        }
        if dist.get_rank() != 0:
            self.full.clear()
        self.seen: dict[str, list[float]] = {}

    def step(self) -> None:
        self.engine.backward(self.engine(self.input).square().mean())
        self.engine.step()

    def state(self) -> dict[str, torch.Tensor]:
        assert self.engine.optimizer is not None
        state: dict[str, torch.Tensor] = dict(self.engine.module.named_parameters())
        for name, parameter in self.engine.module.named_parameters():
            for key, value in self.engine.optimizer.state[parameter].items():
                state[f"{name}.{key}"] = value
        return {name: value.detach() for name, value in state.items()}

    def timed(self, name: str, work: Callable[[], object]) -> float:
        """Seconds until the last rank is done."""
        dist.barrier()
        began = time.perf_counter()
        work()
        dist.barrier()
        return self.keep(name, time.perf_counter() - began)

    def keep(self, name: str, seconds: float) -> float:
        self.seen.setdefault(name, []).append(seconds)
        return seconds

    def repeat(self) -> None:
        self.timed("step", self.step)
        self.timed("raw", self.raw)
        self.clear("raw")
        self.timed("save", lambda: self.engine.save(self.folder / "zeropage", tag="one"))
        self.timed("dcp.save", lambda: dcp.save(self.sharded, checkpoint_id=self.folder / "dcp"))
        self.timed("torch.save", self.torch_save)
        os.sync()
        for kind in ("cold", "warm"):
            for name, load in self.loads().items():
                self.page_cache(kind)
                self.timed(f"{name}, {kind}", load)
        self.clear("zeropage", "dcp", "full.pt")
        self.beside()
        self.clear("zeropage")
        self.beside_dcp()
        self.clear("dcp")

    def raw(self) -> None:
        data = memoryview(bytearray(os.urandom(1 << 20) * 16))
        (self.folder / "raw").mkdir(exist_ok=True)
        nbytes = self.nbytes // self.options.ranks
        with (self.folder / "raw" / str(dist.get_rank())).open("wb", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            for start in range(0, nbytes, len(data)):
                file.write(data[: nbytes - start])
            os.fsync(file.fileno())

    def torch_save(self) -> None:
        if dist.get_rank() == 0:
            with (self.folder / "full.pt").open("wb") as file:
                torch.save(self.full, file)
                file.flush()
                os.fsync(file.fileno())

    def loads(self) -> dict[str, Callable[[], object]]:
        first = dist.get_rank() == 0
        return {
            "load": lambda: self.engine.load(self.folder / "zeropage", "one"),
            "dcp.load": lambda: dcp.load(self.sharded, checkpoint_id=self.folder / "dcp"),
            "torch.load": lambda: torch.load(self.folder / "full.pt", weights_only=True) if first else None,
        }

    def page_cache(self, kind: str) -> None:
        """Have all files in the page cache, or none of their bytes."""
        dist.barrier()
        if dist.get_rank() == 0:
            for path in self.folder.rglob("*"):
                if path.is_file():
                    with path.open("rb", buffering=0) as file:
                        if kind == "cold":
                            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                        while kind == "warm" and file.read(1 << 20):
                            pass
        dist.barrier()

    def beside(self) -> None:
        folder = self.folder / "zeropage"
        dist.barrier()
        began, clock = time.perf_counter(), time.time()
        self.engine.save(folder, tag="one", wait=False)
        held_up = time.perf_counter() - began
        for pager in self.engine.pagers:
            pager.before_writes = _timing(pager.before_writes, waits := [])
        took = self.timed("step beside wait=False", self.step)
        self.engine._finish_save()
        self.keep("wait=False, until it is there", (folder / "latest").stat().st_mtime - clock)
        self.keep("wait=False, held up", held_up + sum(waits))
        self.keep("wait=False, slower", held_up + took - statistics.median(self.seen["step"]))

    def beside_dcp(self) -> None:
        dist.barrier()
        began = time.perf_counter()
        saving = dcp.async_save(self.sharded, checkpoint_id=self.folder / "dcp")
        held_up = time.perf_counter() - began
        saving.add_done_callback(lambda _: self.keep("async_save, until it is there", time.perf_counter() - began))
        took = self.timed("step beside async_save", self.step)
        saving.result()
        self.keep("async_save, held up", held_up)
        self.keep("async_save, slower", held_up + took - statistics.median(self.seen["step"]))

    def clear(self, *names: str) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            for name in names:
                path = self.folder / name
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()
        dist.barrier()

    def print(self) -> None:
        medians = {name: statistics.median(times) for name, times in self.seen.items()}
        print(f"{self.nbytes:,} bytes of state, {self.options.ranks} ranks, {self.options.repeats} repeats")
        for name, value in medians.items():
            spread = max(self.seen[name]) - min(self.seen[name])
            rate = (
                "" if "step" in name or "held" in name or "slower" in name else f"{self.nbytes / value / 1e9:6.2f} GB/s"
            )
            print(f"{name:30} {value:7.3f} s   spread {spread:.3f} s   {rate}")
        print(f"save: {medians['raw'] / medians['save']:.2f} of the raw rate", end=", ")
        print(f"{medians['dcp.save'] / medians['save']:.2f} x dcp.save", end=", ")
        print(f"{medians['torch.save'] / medians['save']:.2f} x torch.save")
        for name in ("wait=False", "async_save"):
            durable = medians[f"{name}, until it is there"]
            print(f"{name}: held up for {medians[f'{name}, held up'] / durable:.1%} of the time until it is there")
        for kind in ("warm", "cold"):
            load = medians[f"load, {kind}"]
            print(f"load, {kind}: {medians[f'torch.load, {kind}'] / load:.2f} x torch.load", end=", ")
            print(f"{medians[f'dcp.load, {kind}'] / load:.2f} x dcp.load")


def _timing(wait: Callable[[], None], into: list[float]) -> Callable[[], None]:
    def timed() -> None:
        began = time.perf_counter()
        wait()
        into.append(time.perf_counter() - began)

    return timed


def _rank(rank: int, options: argparse.Namespace, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=options.ranks)
    bench = Bench(options)
    for _ in range(2):
        bench.timed("step", bench.step)
    for _ in range(options.repeats):
        bench.repeat()
    if rank == 0:
        bench.print()
    bench.engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=21)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        options.folder = folder
        mp.start_processes(_rank, (options, 20000 + os.getpid() % 20000), nprocs=options.ranks, start_method="spawn")
