"""What ends a message halfway ends a rank's messages: leftovers are never taken for the next one."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeropage as zp
from tests.harness import run
from tests.harness.models import build_mlp
from tests.scenarios.beside import plain_copy
from zeropage.transport.channel import HostChannel, Message


class _Alarm(Exception):
    """What a program's signal handler raises."""


def _raise(number: int, frame: FrameType | None) -> None:
    raise _Alarm


class _InterruptedChannel:
    """The signal comes when the first message to receive has begun."""

    def __init__(self, channel: HostChannel) -> None:
        self._channel = channel
        self._came = False

    def begin(self, messages: Sequence[Message]) -> list[dist.Work]:
        works = self._channel.begin(messages)
        if not self._came and messages[0].kind == "receive":
            self._came = True
            signal.raise_signal(signal.SIGUSR2)
        return works


def _interrupted() -> None:
    model = plain_copy(build_mlp)
    engine = zp.Engine(model, None, {"transport": "collective", "readahead": False, "timeout_s": 3})
    weights = list(model.parameters())
    for weight in weights:
        zp.full(weight)
    dist.barrier()
    engine.pagers[0].evict_all()
    if dist.get_rank() == 0:
        signal.signal(signal.SIGUSR2, _raise)
        rounds: Any = engine.pagers[0].transport._rounds
        rounds._host = _InterruptedChannel(rounds._host)
        with pytest.raises(_Alarm):
            zp.full(weights[0])
        for weight in weights:
            with pytest.raises(zp.errors.PeerLostError, match=r"rank 0 broke off a message .*_Alarm.*checkpoint"):
                zp.full(weight)
    else:
        with pytest.raises(zp.errors.PeerLostError, match="rank 0 "):  # late, or gone
            for _ in range(1_000_000):
                zp.full(weights[1])
                engine.pagers[0].evict_all()
    dist.barrier()


def _late() -> None:
    """The last rank answers nobody for a while; the others give it up, and say so whenever they are asked."""
    model = plain_copy(lambda: torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(8))))
    engine = zp.Engine(model, None, {"transport": "collective", "readahead": False, "timeout_s": 1})
    weights = list(model.parameters())
    expected = [zp.full(weight).clone() for weight in weights]
    dist.barrier()
    engine.pagers[0].evict_all()
    if dist.get_rank() == dist.get_world_size() - 1:
        rounds: Any = engine.pagers[0].transport._rounds
        with rounds._lock:
            time.sleep(4)
        for weight, values in zip(weights, expected, strict=True):
            with contextlib.suppress(zp.errors.PeerLostError):
                assert torch.equal(zp.full(weight), values)
    else:
        with pytest.raises(zp.errors.PeerLostError) as first:
            zp.full(weights[0])
        for weight in weights:
            with pytest.raises(zp.errors.PeerLostError) as later:
                zp.full(weight)
            assert str(later.value) == str(first.value)
    dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_late(world: int) -> None:
    run(world, _late)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_interrupted(world: int) -> None:
    run(world, _interrupted)
