"""Messages between devices: begun as one group a round, over connections that all ranks make together.

No device is needed: a stand-in for NCCL takes whatever is no header, and moves it over gloo. Like NCCL at its worst it
comes to an end with one group before it begins the next, it moves nothing before somebody waits, and it knows no
message outside of a group. What all ranks want at once goes by all-gather, and by reduce-scatter where the order of
additions is free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropage as zp
from tests.harness import Failure, run
from zeropage.layout import Layout
from zeropage.transport.group import find_group
from zeropage.transport.rounds import Rounds

STEPS = 3


class _Group:
    """Moves nothing before somebody waits: whoever reads too early sees what was there before."""

    def __init__(self, calls: list[Callable[[], dist.Work]]) -> None:
        self._calls = calls
        self.waited_for = False

    def wait(self, timeout: timedelta) -> None:
        for work in [call() for call in self._calls]:
            work.wait(timeout)
        self.waited_for = True


class _StandIn:
    """As `torch.distributed.ProcessGroupNCCL`."""

    def __init__(self, store: Any, rank: int, world: int, device: torch.device, timeout_s: float) -> None:
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=timeout_s))
        self._group: list[Callable[[], dist.Work]] | None = None
        self._kinds: set[str] = set()
        self._last: _Group | None = None
        self.connected = False
        self.groups = 0
        self.calls: Counter[str] = Counter()

    def eager_connect_single_device(self, device: torch.device) -> None:
        assert not self.connected
        self._gloo.barrier().wait(timedelta(seconds=5))
        self.connected = True

    def _start_coalescing(self) -> None:
        assert self.connected and self._group is None
        self.end_last()
        self._group = []

    def end_last(self) -> None:
        """Let the last group come to its end, which somebody must have waited for already."""
        if self._last is not None:
            assert self._last.waited_for, "a group that nobody has waited for"

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        self._add("message", partial(self._gloo.send, tensors, peer, tag))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        self._add("message", partial(self._gloo.recv, tensors, peer, tag))

    def _allgather_base(self, whole: Tensor, part: Tensor) -> None:
        self._add("all_gather", partial(self._gloo._allgather_base, whole, part))

    def _reduce_scatter_base(self, part: Tensor, whole: Tensor) -> None:
        self._add("reduce_scatter", partial(self._gloo._reduce_scatter_base, part, whole))

    def _add(self, kind: str, call: Callable[[], dist.Work]) -> None:
        assert self._group is not None, "a message by itself: two ranks that both send would wait for each other"
        self._group.append(call)
        self.calls[kind] += 1
        self._kinds.add(kind)

    def _end_coalescing(self) -> Any:
        assert self._group is not None
        assert self._kinds == {"message"} or "message" not in self._kinds, "collectives and messages are never mixed"
        self._last = _Group(self._group)
        self.groups += 1
        self._group = None
        self._kinds.clear()
        return self._last


class _Experts(nn.Module):
    """Rank 0 uses one expert in each step, rank 1 two, rank 2 three."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor, step: int) -> Tensor:
        for i in range(dist.get_rank() + 1):
            x = self.experts[(step + i) % 4](x).tanh()
        return x


class _Alike(nn.Module):
    """All ranks use all of it. Its weights are cut evenly over two and over three ranks, its biases are not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(3))

    def forward(self, x: Tensor, step: int) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


@dataclass
class _Seen:
    losses: list[float]
    full: list[Tensor]
    groups: int = 0
    calls: Counter[str] = field(default_factory=Counter)


def _train(make: type[nn.Module], dtype: torch.dtype, *, on_devices: bool, **settings: Any) -> _Seen:
    backends: list[_StandIn] = []

    def stand_in(*settings: Any) -> _StandIn:
        backends.append(_StandIn(*settings))
        return backends[-1]

    away = mock.patch("zeropage.transport.rounds.in_host_memory", lambda data: False)
    nccl = mock.patch("zeropage.transport.channel.open_nccl", stand_in)
    with away if on_devices else nullcontext(), nccl:
        torch.manual_seed(0)
        model = make().to(dtype)
        config = {"transport": "collective", "resident_bytes": 0, "timeout_s": 20} | settings
        engine = zp.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config)
        inputs = torch.randn(STEPS, 5, next(iter(model.parameters())).shape[1], dtype=dtype)
        losses = []
        for step in range(STEPS):
            loss = engine(inputs[step], step).square().mean()
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        full = [zp.full(parameter) for parameter in model.parameters()]
        dist.barrier()
        engine.close()
    for backend in backends:
        backend.end_last()
    assert len(backends) == int(on_devices)
    return _Seen(losses, full, backends[0].groups, backends[0].calls) if backends else _Seen(losses, full)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("make", [_Experts, _Alike])
def test_training_is_that_over_the_host(make: type[nn.Module], world: int) -> None:
    for seen, expected in zip(
        run(world, _train, make, torch.float32, on_devices=True),
        run(world, _train, make, torch.float32, on_devices=False),
        strict=True,
    ):
        assert seen.losses == expected.losses
        assert all(map(torch.equal, seen.full, expected.full))
        assert 0 < seen.groups < seen.calls.total()
        assert seen.calls["reduce_scatter"] == 0
        assert make is _Experts or seen.calls["all_gather"] > 0


@pytest.mark.parametrize("world", [2, 3])
def test_where_the_order_is_free_sums_are_reduced(world: int) -> None:
    settings = (world, _train, _Alike, torch.float32)
    expected, *_ = run(*settings, on_devices=False)
    for seen in run(*settings, on_devices=True, deterministic=False):
        assert seen.calls["reduce_scatter"] > 0
        assert seen.losses == pytest.approx(expected.losses, rel=1e-5)
        for parameter, other in zip(seen.full, expected.full, strict=True):
            torch.testing.assert_close(parameter, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "sums", "reduced"),
    [(torch.bfloat16, "fp32", False), (torch.bfloat16, "bf16", True), (torch.float16, "fp16", False)],
    ids=["into fp32", "bf16", "fp16, which might overflow"],
)
def test_what_would_lose_by_it_is_not_reduced(dtype: torch.dtype, sums: str, reduced: bool) -> None:
    for seen in run(2, _train, _Alike, dtype, on_devices=True, deterministic=False, reduce_dtype=sums):
        assert seen.calls["all_gather"] > 0
        assert (seen.calls["reduce_scatter"] > 0) is reduced


def _gather_in_other_orders(times: int) -> int:
    """Rank 1 names the pages in the other order; returns how often both went by all-gather."""
    backends: list[_StandIn] = []

    def stand_in(*settings: Any) -> _StandIn:
        backends.append(_StandIn(*settings))
        return backends[-1]

    rank = dist.get_rank()
    away = mock.patch("zeropage.transport.rounds.in_host_memory", lambda data: False)
    with away, mock.patch("zeropage.transport.channel.open_nccl", stand_in):
        rounds = Rounds(find_group(None, 20), 20, 0, deterministic=True)
        layouts = Layout(128, 2), Layout(256, 2)
        stores = [rounds.private(torch.full((layout.length(rank),), 1.0 + rank), layout) for layout in layouts]
        for _ in range(times):
            frames = [torch.zeros(layout.numel) for layout in layouts]
            wanted = list(zip(stores, frames, strict=True))
            dist.barrier()
            rounds.gather(wanted if rank == 0 else wanted[::-1])
            for frame in frames:
                first, second = frame.chunk(2)
                assert (first == 1.0).all() and (second == 2.0).all()
        dist.barrier()
        rounds.close()
    return backends[0].calls["all_gather"] // 2


def test_collectives_come_in_one_order_whatever_the_programs_ask_first() -> None:
    first, second = run(2, _gather_in_other_orders, 20)
    assert first == second > 0


def _need_a_device() -> None:
    with mock.patch("zeropage.transport.rounds.in_host_memory", lambda data: False):
        model = _Experts()
        zp.shard(model, {"transport": "collective", "timeout_s": 20})
        zp.full(next(iter(model.parameters())))


def test_without_nccl_it_is_refused_on_all_ranks() -> None:
    for failure in run(2, _need_a_device, expect_errors=True):
        assert isinstance(failure, Failure)
        assert failure.is_a("TransportUnavailableError") and "over NCCL" in failure.message
