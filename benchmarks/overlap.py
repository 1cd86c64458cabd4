"""Whether messages travel while the program computes: a step over a network that is slow and costs no processor time.

Two ranks on this host train over `collective`. Every message is held back by a delay per byte, as on a link of that
bandwidth, by sleeping. If nothing overlapped, a step would take its time without delay plus all delays. The bandwidth
is set so that the delays of a step equal its time without.

    python benchmarks/overlap.py [--layers 12] [--width 1024] [--tokens 512] [--repeats 5]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeropage as zp
from zeropage.transport.collective import CollectiveTransport


@dataclass
class SlowLink:
    """Stands before a channel; its messages arrive one after the other, each `seconds_per_byte` a byte later."""

    channel: Any
    seconds_per_byte: float = 0.0
    delayed: float = 0.0  # seconds, of all messages so far
    _free_at: float = field(default=0.0, repr=False)

    def send(self, data: torch.Tensor, peer: int) -> Any:
        return self.channel.send(data, peer)

    def receive(self, into: torch.Tensor, peer: int) -> Any:
        delay = into.numel() * into.element_size() * self.seconds_per_byte
        self.delayed += delay
        self._free_at = max(self._free_at, time.monotonic()) + delay
        return _Late(self.channel.receive(into, peer), self._free_at)


@dataclass
class _Late:
    work: Any
    arrives_at: float

    def wait(self, timeout: timedelta) -> None:
        self.work.wait(timeout)
        time.sleep(max(0.0, self.arrives_at - time.monotonic()))


def rank_of(rank: int, file: str, options: argparse.Namespace, results: Connection) -> None:
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    torch.manual_seed(0)
    layers = [nn.Linear(options.width, options.width) for _ in range(options.layers)]
    model = nn.Sequential(*layers)
    config = {"transport": "collective", "bucket_bytes": 3 * options.width**2 * 4}
    engine = zp.Engine(model, torch.optim.SGD(model.parameters(), lr=1e-3), config)
    transport = engine.pagers[0].transport
    assert isinstance(transport, CollectiveTransport)
    link = SlowLink(transport._rounds._host)
    transport._rounds._host = link  # type: ignore[assignment]
    batch = torch.randn(options.tokens, options.width)

    def step() -> float:
        dist.barrier()
        began = time.monotonic()
        engine.backward(engine(batch).square().mean())
        engine.step()
        return time.monotonic() - began

    for _ in range(3):
        step()
    link.seconds_per_byte, link.delayed = 1e-12, 0.0
    quick = statistics.median(step() for _ in range(options.repeats))
    agreed = torch.tensor([quick * 1e-12 * options.repeats / link.delayed])
    dist.all_reduce(agreed)
    slow_rate = agreed.item() / 2
    found = []
    for _ in range(options.repeats):
        link.seconds_per_byte = 0.0
        without = step()
        link.seconds_per_byte, link.delayed = slow_rate, 0.0
        found.append((without, step(), link.delayed))
    results.send(found)
    engine.close()
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=512, help="of each rank and step")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ends = [context.Pipe(duplex=False) for _ in range(2)]
        ranks = [
            context.Process(target=rank_of, args=(rank, os.path.join(folder, "meet"), options, sender))
            for rank, (_, sender) in enumerate(ends)
        ]
        for process in ranks:
            process.start()
        found = ends[0][0].recv()
        for process in ranks:
            process.join()
    without, slow, delays = (statistics.median(column) for column in zip(*found, strict=True))
    hidden = 1 - (slow - without) / delays
    print(f"step without delays      {without * 1e3:8.1f} ms")
    print(f"delays of its messages   {delays * 1e3:8.1f} ms")
    print(f"step with them           {slow * 1e3:8.1f} ms  ({hidden:.0%} of the delays passed beside the computation)")


if __name__ == "__main__":
    main()
