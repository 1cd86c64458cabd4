"""How fast checkpoints are written and read, beside what the disk can do and what torch does with the same state.

    python benchmarks/checkpoint.py [--layers 20] [--ranks 2] [--repeats 5] [--folder DIR]

A model of `layers` x 2048 x 2048 fp32 parameters with AdamW (20 layers: 1.0 GB of state). The ways to save
alternate, medians are printed:

    raw       every rank fallocates and writes its share of the bytes, and fsyncs
    save      engine.save
    dcp       torch.distributed.checkpoint.save of the same state, sharded the same way
    torch     torch.save of the full state by one process
    stall     engine.save(wait=False): what training loses, that is the call and the wait of the next step

Reading: engine.load (with its checksums), torch.distributed.checkpoint.load, torch.load by one process. Files are in
the page cache then: it is the software that is compared.
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

import zeropage as zp

WIDTH = 2048


def _engine(layers: int) -> zp.Engine:
    with zp.init():
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    engine = zp.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    _step(engine)
    return engine


def _step(engine: zp.Engine) -> None:
    engine.backward(engine(torch.ones(64, WIDTH)).square().mean())
    engine.step()


def _state(engine: zp.Engine) -> dict[str, torch.Tensor]:
    assert engine.optimizer is not None
    state: dict[str, torch.Tensor] = dict(engine.module.named_parameters())
    for name, parameter in engine.module.named_parameters():
        for key, value in engine.optimizer.state[parameter].items():
            state[f"{name}.{key}"] = value
    return {name: value.detach() for name, value in state.items()}


def _timed(work: Callable[[], object]) -> float:
    """Seconds until the last rank is done."""
    dist.barrier()
    began = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - began


def _raw(folder: Path, nbytes: int) -> None:
    data = memoryview(bytearray(os.urandom(1 << 20) * 16))
    with (folder / f"raw{dist.get_rank()}").open("wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        for start in range(0, nbytes, len(data)):
            file.write(data[: nbytes - start])
        os.fsync(file.fileno())


def _full(engine: zp.Engine) -> dict[str, torch.Tensor]:
    return {name: zp.full(value) for name, value in _state(engine).items()}


def _torch_save(full: dict[str, torch.Tensor], path: Path) -> None:
    if dist.get_rank() == 0:
        with path.open("wb") as file:
            torch.save(full, file)
            file.flush()
            os.fsync(file.fileno())


def _stall(engine: zp.Engine, folder: Path, step_s: float) -> tuple[float, float]:
    """Seconds that training loses, and seconds until the checkpoint is there."""
    dist.barrier()
    began = time.perf_counter()
    engine.save(folder, tag="beside", wait=False)
    called = time.perf_counter() - began
    took = _timed(lambda: _step(engine))
    while not (folder / "beside" / "manifest.json").exists():
        time.sleep(0.002)
    durable = time.perf_counter() - began
    engine._finish_save()
    return called + max(0.0, took - step_s), durable


def _rank(rank: int, options: argparse.Namespace, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=options.ranks)
    engine = _engine(options.layers)
    nbytes = sum(v.numel() * v.element_size() for v in _state(engine).values())
    full = _full(engine) if rank == 0 else {}
    dist.barrier()
    step_s = statistics.median(_timed(lambda: _step(engine)) for _ in range(3))
    seen: dict[str, list[float]] = {}
    folder = Path(options.folder)
    ways: dict[str, Callable[[], object]] = {
        "raw": lambda: _raw(folder, nbytes // options.ranks),
        "save": lambda: engine.save(folder / "zeropage", tag="one"),
        "dcp": lambda: dcp.save(_state(engine), checkpoint_id=folder / "dcp"),
        "torch": lambda: _torch_save(full, folder / "full.pt"),
    }
    for _ in range(options.repeats):
        for name, work in ways.items():
            seen.setdefault(name, []).append(_timed(work))
            if name != "save":
                _clear(folder, keep="zeropage")
        stall, durable = _stall(engine, folder / "zeropage", step_s)
        seen.setdefault("stall", []).append(stall)
        seen.setdefault("beside, until it is there", []).append(durable)
        seen.setdefault("load", []).append(_timed(lambda: engine.load(folder / "zeropage", "one")))
        dcp.save(_state(engine), checkpoint_id=folder / "dcp")
        seen.setdefault("dcp.load", []).append(_timed(lambda: dcp.load(_state(engine), checkpoint_id=folder / "dcp")))
        _torch_save(full, folder / "full.pt")
        seen.setdefault("torch.load", []).append(
            _timed(lambda: torch.load(folder / "full.pt", weights_only=True) if rank == 0 else None)
        )
        _clear(folder, keep="")
    if rank == 0:
        _print(seen, nbytes, step_s)
    engine.close()


def _clear(folder: Path, keep: str) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        for path in folder.iterdir():
            if path.name != keep:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        os.sync()
    dist.barrier()


def _print(seen: dict[str, list[float]], nbytes: int, step_s: float) -> None:
    medians = {name: statistics.median(times) for name, times in seen.items()}
    print(f"{nbytes:,} bytes of state; a step takes {step_s:.2f} s")
    for name, value in medians.items():
        spread = max(seen[name]) - min(seen[name])
        print(f"{name:26} {value:7.3f} s   {nbytes / value / 1e9:6.2f} GB/s   spread {spread:.3f} s")
    print(f"save: {medians['raw'] / medians['save']:.2f} of the raw rate, {medians['dcp'] / medians['save']:.2f} x dcp")
    print(f"stall: {medians['stall'] / medians['save']:.1%} of a durable save")
    print(f"load: {medians['torch.load'] / medians['load']:.2f} x torch.load")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        options.folder = folder
        mp.start_processes(_rank, (options, 20000 + os.getpid() % 20000), nprocs=options.ranks, start_method="spawn")
