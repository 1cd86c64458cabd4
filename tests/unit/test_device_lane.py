"""The order in which a CUDA lane makes streams wait for each other, seen on streams that only write down what they do.

No device is needed, and none is tried: `scripts/gpu_check.py` does that where there is one.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from zeropage.memory.device import CudaLane, HostLane, map_memory, open_lane

DEVICE = torch.device("cpu")


@dataclass(eq=False)
class Event:
    """After everything that its stream had got when it was recorded."""

    stream: Stream
    after: set[str]
    synchronized: bool = False

    def query(self) -> bool:
        return self.synchronized

    def synchronize(self) -> None:
        self.synchronized = True


@dataclass(eq=False)
class Stream:
    """`after` is everything that has run when what it gets next runs: its own work, and what it has waited for."""

    name: str
    cuda_stream: int
    after: set[str] = field(default_factory=set)

    def record_event(self) -> Event:
        return Event(self, set(self.after))

    def wait_event(self, event: Event) -> None:
        self.after |= event.after

    def wait_stream(self, other: Stream) -> None:
        self.after |= other.after


@dataclass(eq=False)
class Memory:
    """A frame, or memory of the host."""

    cuda: Cuda
    address: int
    streams: list[str] = field(default_factory=list)
    nbytes: int = 4
    dtype: torch.dtype = torch.float32
    device: torch.device = DEVICE

    def numel(self) -> int:
        return 1

    def data_ptr(self) -> int:
        return self.address

    def record_stream(self, stream: Stream) -> None:
        self.streams.append(stream.name)

    def copy_(self, source: Memory, non_blocking: bool) -> None:
        assert non_blocking
        self.cuda.run(f"copy {source.address} to {self.address}")


class Cuda:
    """What `torch.cuda` is for a lane."""

    def __init__(self) -> None:
        self.default = Stream("default", 0)
        self.current = self.default
        self.made: list[Stream] = []
        self.ran: dict[str, set[str]] = {}  # by what ran: everything that is sure to have run before

    def run(self, what: str) -> None:
        self.ran[what] = set(self.current.after)
        self.current.after.add(what)

    def make(self, device: torch.device) -> Stream:
        self.made.append(Stream(f"side {len(self.made)}", 100 + len(self.made)))
        return self.made[-1]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def frame(self, address: int) -> Memory:
        return Memory(self, address)


class Lane(CudaLane):
    """Takes the memory of these tests for that of a device."""

    def serves(self, device: torch.device) -> bool:
        return True

    def staging(self, count: int, dtype: torch.dtype) -> Memory:  # type: ignore[override]
        return Memory(self.cuda, 500)

    cuda: Cuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.current)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: made.default)
    monkeypatch.setattr(torch.cuda, "Stream", made.make)
    monkeypatch.setattr(torch.cuda, "stream", made.on)
    return made


@pytest.fixture
def lane(cuda: Cuda) -> Lane:
    made = Lane(DEVICE)
    made.cuda = cuda
    return made


def test_a_frame_is_filled_again_after_the_kernels_that_read_it(cuda: Cuda, lane: Lane) -> None:
    """And not after those that were launched since: that is what lets copies run beside them."""
    frame = cuda.frame(1)
    lane.ready(lane.fill([(frame, cuda.frame(10))]))
    cuda.run("read 1")
    assert "copy 10 to 1" in cuda.ran["read 1"]
    lane.retire(frame)
    cuda.run("later kernel")
    lane.fill([(frame, cuda.frame(11))])
    assert "read 1" in cuda.ran["copy 11 to 1"]
    assert "later kernel" not in cuda.ran["copy 11 to 1"]


def test_a_fresh_frame_waits_for_what_had_its_memory_before(cuda: Cuda, lane: Lane) -> None:
    cuda.run("kernel on freed memory")
    lane.fill([(cuda.frame(1), cuda.frame(10))])
    assert "kernel on freed memory" in cuda.ran["copy 10 to 1"]


def test_a_copy_that_nobody_asks_for_holds_nobody_up(cuda: Cuda, lane: Lane) -> None:
    flight = lane.fill([(cuda.frame(1), cuda.frame(10)), (cuda.frame(2), cuda.frame(20))])
    cuda.run("unrelated")
    assert not {"copy 10 to 1", "copy 20 to 2"} & cuda.ran["unrelated"]
    lane.ready(flight)
    cuda.run("related")
    assert {"copy 10 to 1", "copy 20 to 2"} <= cuda.ran["related"]


def test_readers_on_several_streams_are_all_waited_for(cuda: Cuda, lane: Lane) -> None:
    frame, other = cuda.frame(1), Stream("the program's second", 7)
    flight = lane.fill([(frame, cuda.frame(10))])
    lane.ready(flight)
    cuda.run("read on default")
    with cuda.on(other):
        lane.ready(flight)
        cuda.run("read on second")
    assert "copy 10 to 1" in cuda.ran["read on second"]
    lane.retire(frame)
    lane.fill([(frame, cuda.frame(11))])
    assert {"read on default", "read on second"} <= cuda.ran["copy 11 to 1"]


def test_a_frame_that_leaves_is_kept_from_the_allocator_until_copies_have_ended(cuda: Cuda, lane: Lane) -> None:
    frame = cuda.frame(1)
    lane.fill([(frame, cuda.frame(10))])
    lane.leave(frame)
    assert {"default", "side 0"} <= set(frame.streams)
    again = cuda.frame(1)  # the same address, from the allocator
    cuda.run("kernel since")
    lane.fill([(again, cuda.frame(11))])
    assert "kernel since" in cuda.ran["copy 11 to 1"], "what was noted of the frame that left is forgotten"


def test_gradients_go_out_on_a_stream_of_their_own_after_what_made_them(cuda: Cuda, lane: Lane) -> None:
    cuda.run("make gradient")
    host, flight = lane.fetch(cuda.frame(1))  # type: ignore[arg-type]
    assert "make gradient" in cuda.ran["copy 1 to 500"]
    lane.fill([(cuda.frame(2), cuda.frame(20))])
    assert "copy 1 to 500" not in cuda.ran["copy 20 to 2"], "both directions at once"
    assert host.data_ptr() == 500
    flight.wait()
    assert flight.events[DEVICE].synchronized


def test_drain_waits_for_what_reads_the_host(cuda: Cuda, lane: Lane) -> None:
    flights = [lane.fill([(cuda.frame(n), cuda.frame(10 * n))]) for n in (1, 2)]
    lane.drain()
    assert all(flight.events[DEVICE].synchronized for flight in flights)


def test_threads_of_a_transport_work_after_the_program_and_before_it(cuda: Cuda, lane: Lane) -> None:
    """A program that computes on a stream of its own."""
    own, gradient = Stream("the program's own", 7), cuda.frame(1)
    with cuda.on(own):
        cuda.run("make gradient")
        lane.hand_over([gradient])
    cuda.run("send")  # a thread of the transport, on the default stream
    assert "make gradient" in cuda.ran["send"]
    assert "default" in gradient.streams, "its memory is not used again before it is sent"
    with cuda.on(own):
        cuda.run("before")
        lane.take_over()
        cuda.run("after")
    assert "send" not in cuda.ran["before"] and "send" in cuda.ran["after"]


def test_pinning_that_fails_is_said_once(
    lane: Lane, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def refuse(address: int, nbytes: int, flags: int) -> int:
        asked.append(nbytes)
        return 2

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=refuse))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            lane.pin(torch.frombuffer(map_memory(5000), dtype=torch.uint8).untyped_storage())
    assert len(caplog.messages) == 1 and "cannot be pinned" in caplog.messages[0]
    assert len(asked) == 1


def test_pinned_memory_is_let_go_before_it_is_unmapped(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: dict[int, int] = {}

    def register(address: int, nbytes: int, flags: int) -> int:
        assert address % mmap.PAGESIZE == 0
        pinned[address] = nbytes
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=pinned.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    tensor = torch.frombuffer(map_memory(5000), dtype=torch.float32, count=1250)
    lane.pin(tensor.untyped_storage())
    assert list(pinned.values()) == [5000], "what is asked for, and no power of two"
    view = tensor[:1]
    del tensor
    assert pinned, "the view holds it"
    del view
    assert not pinned


def test_a_host_has_nothing_to_wait_for() -> None:
    lane = open_lane(DEVICE)
    assert isinstance(lane, HostLane) and not lane.serves(DEVICE) and lane.memory() == {}
    frame, source = torch.zeros(3), torch.ones(3)
    lane.ready(lane.fill([(frame, source)]))
    assert frame.tolist() == [1, 1, 1]
    host, flight = lane.fetch(source)
    flight.wait()
    assert host.tolist() == [1, 1, 1]
