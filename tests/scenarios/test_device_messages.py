"""Messages between devices: begun as one group a round, over connections that all ranks make together.

No device is needed: a stand-in for NCCL takes whatever is no header, and moves it over gloo. Like NCCL at its worst it
comes to an end with one group before it begins the next, and it knows no message outside of a group.
"""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropage as zp
from tests.harness import Failure, run

STEPS = 3


class _StandIn:
    """As `torch.distributed.ProcessGroupNCCL`."""

    def __init__(self, store: Any, rank: int, world: int, device: torch.device, timeout_s: float) -> None:
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=timeout_s))
        self._group: list[tuple[Any, list[Tensor], int, int]] | None = None
        self.connected = False
        self.groups = self.messages = 0

    def eager_connect_single_device(self, device: torch.device) -> None:
        assert not self.connected
        self._gloo.barrier().wait(timedelta(seconds=5))
        self.connected = True

    def _start_coalescing(self) -> None:
        assert self.connected and self._group is None
        self._group = []

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        self._add(self._gloo.send, tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        self._add(self._gloo.recv, tensors, peer, tag)

    def _add(self, move: Any, tensors: list[Tensor], peer: int, tag: int) -> None:
        assert self._group is not None, "a message by itself: two ranks that both send would wait for each other"
        self._group.append((move, tensors, peer, tag))

    def _end_coalescing(self) -> Any:
        assert self._group is not None
        works = [move(tensors, peer, tag) for move, tensors, peer, tag in self._group]
        for work in works:
            work.wait(timedelta(seconds=5))
        self.groups += 1
        self.messages += len(works)
        self._group = None
        return mock.Mock()  # there is nothing to wait for


class _Experts(nn.Module):
    """Rank 0 uses one expert in each step, rank 1 two, rank 2 three."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor, step: int) -> Tensor:
        for i in range(dist.get_rank() + 1):
            x = self.experts[(step + i) % 4](x).tanh()
        return x


def _train(*, on_devices: bool) -> tuple[list[float], list[Tensor], tuple[int, int]]:
    backends: list[_StandIn] = []

    def stand_in(*settings: Any) -> _StandIn:
        backends.append(_StandIn(*settings))
        return backends[-1]

    away = mock.patch("zeropage.transport.rounds.in_host_memory", lambda data: data.dtype is torch.uint8)
    nccl = mock.patch("zeropage.transport.channel.open_nccl", stand_in)
    with away if on_devices else nullcontext(), nccl:
        torch.manual_seed(0)
        model = _Experts()
        config = {"transport": "collective", "resident_bytes": 0, "timeout_s": 20}
        engine = zp.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config)
        inputs = torch.randn(STEPS, 5, 32)
        losses = []
        for step in range(STEPS):
            loss = engine(inputs[step], step).square().mean()
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        full = [zp.full(parameter) for parameter in model.parameters()]
        dist.barrier()
        engine.close()
    assert len(backends) == int(on_devices)
    return losses, full, (backends[0].groups, backends[0].messages) if backends else (0, 0)


@pytest.mark.parametrize("world", [2, 3])
def test_training_is_that_over_the_host(world: int) -> None:
    for (losses, full, (groups, messages)), (expected, whole, _) in zip(
        run(world, _train, on_devices=True), run(world, _train, on_devices=False), strict=True
    ):
        assert losses == expected
        assert all(map(torch.equal, full, whole))
        assert 0 < groups < messages


def _need_a_device() -> None:
    with mock.patch("zeropage.transport.rounds.in_host_memory", lambda data: data.dtype is torch.uint8):
        model = _Experts()
        zp.shard(model, {"transport": "collective", "timeout_s": 20})
        zp.full(next(iter(model.parameters())))


def test_without_nccl_it_is_refused_on_all_ranks() -> None:
    for failure in run(2, _need_a_device, expect_errors=True):
        assert isinstance(failure, Failure)
        assert failure.is_a("TransportUnavailableError") and "over NCCL" in failure.message
