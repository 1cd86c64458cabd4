"""The courier: order, bounds, and what is told of errands that fail."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Sequence

import pytest

from zeropage.errors import PeerLostError
from zeropage.transport.courier import Arrival, Courier


class Line:
    """Notes what is carried; nothing passes while it is shut."""

    def __init__(self, capacity: int = 100) -> None:
        self.open = threading.Event()
        self.carried: list[tuple[str, list[str]]] = []
        self.courier: Courier[str, str] = Courier(self.bring, self.take, lambda a, b: a[0] == b[0], capacity)

    def bring(self, what: Sequence[str]) -> None:
        assert self.open.wait(10)
        if "lost" in what:
            raise KeyError("lost")
        self.carried.append(("bring", list(what)))

    def take(self, parcels: Sequence[str]) -> None:
        assert self.open.wait(10)
        if "bad" in parcels:
            raise ValueError("bad")
        self.carried.append(("take", list(parcels)))


def test_what_is_brought_goes_first_and_parcels_together() -> None:
    line = Line()
    line.courier.deliver("a0", 1)
    _until(lambda: line.courier._busy)
    for parcel in ("a1", "a2", "b1"):
        line.courier.deliver(parcel, 1)
    arrival = line.courier.fetch(["x", "y"])
    assert not arrival.over
    line.open.set()
    arrival.wait()
    line.courier.drain()
    assert arrival.here
    assert line.carried == [("take", ["a0"]), ("bring", ["x", "y"]), ("take", ["a1", "a2"]), ("take", ["b1"])]
    line.courier.close()


def test_who_brings_more_than_there_is_room_for_waits() -> None:
    line = Line(capacity=10)
    line.courier.deliver("a large one goes by itself", 1000)
    second = threading.Thread(target=line.courier.deliver, args=("b", 1))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    line.open.set()
    second.join(10)
    assert not second.is_alive()
    line.courier.close()


def test_the_program_goes_before_the_next_errand() -> None:
    line = Line()
    line.open.set()
    with line.courier:
        arrival = line.courier.fetch(["x"])
        time.sleep(0.1)
        assert not arrival.over
    arrival.wait()
    line.courier.close()


def test_a_failed_fetch_is_told_to_who_waits_and_to_nobody_else() -> None:
    line = Line()
    line.open.set()
    lost = line.courier.fetch(["lost"])
    with pytest.raises(KeyError):
        lost.wait()
    assert lost.over and not lost.here
    line.courier.fetch(["x"]).wait()
    line.courier.drain()
    line.courier.close()


def test_a_failed_delivery_is_told_to_everybody() -> None:
    line = Line()
    line.courier.deliver("bad", 1)
    line.courier.deliver("never", 1)
    line.open.set()
    for _ in range(2):
        with pytest.raises(ValueError, match="bad"):
            line.courier.drain()
    with pytest.raises(ValueError, match="bad"):
        line.courier.deliver("c", 1)
    assert line.carried == []
    line.courier.close()


def test_after_the_end_nobody_waits() -> None:
    line = Line()
    line.courier.deliver("a", 1)
    _until(lambda: line.courier._busy)
    waiting = line.courier.fetch(["x"])
    line.courier.close()
    for arrival in (waiting, line.courier.fetch(["y"])):
        with pytest.raises(PeerLostError, match="closed"):
            arrival.wait()
    with pytest.raises(PeerLostError, match="closed"):
        line.courier.deliver("b", 1)
    line.open.set()
    Arrival.at_once().wait()


def test_it_keeps_nothing_that_it_has_carried() -> None:
    class Frame:
        pass

    class Taking:
        def bring(self, what: Sequence[Frame]) -> None:
            raise KeyError(what)

        def take(self, parcels: Sequence[Frame]) -> None: ...

    taking = Taking()
    courier: Courier[Frame, Frame] = Courier(taking.bring, taking.take, lambda a, b: True, 10)
    frames = [Frame(), Frame()]
    seen = [weakref.ref(frame) for frame in frames]
    courier.deliver(frames.pop(), 1)
    arrival = courier.fetch([frames.pop()])
    with pytest.raises(KeyError):
        arrival.wait()
    courier.drain()
    del arrival
    gc.collect()
    assert [frame() for frame in seen] == [None, None]
    courier.close()


def _until(what: object) -> None:
    assert callable(what)
    ends = time.monotonic() + 10
    while not what():
        assert time.monotonic() < ends
        time.sleep(0.001)
