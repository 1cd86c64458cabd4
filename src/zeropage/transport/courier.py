"""A courier carries messages while the program computes: one thread, which takes errands in their order.

An errand that brings something (`Arrival`) goes before those that take something away. What is taken away is
bounded in bytes; who brings more waits. Whoever has to know that all is done (`drain`) waits until nothing is left.
What could not be brought is told to those who wait for it; what could not be taken away, to everybody who comes.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from zeropage.errors import PeerLostError

__all__ = ["Arrival", "Courier", "closed"]

_F = TypeVar("_F")
_P = TypeVar("_P")


class Arrival:
    """Something that is on its way."""

    def __init__(self) -> None:
        self._here = threading.Event()
        self._error: Exception | None = None

    @classmethod
    def at_once(cls) -> Arrival:
        """Of something that is here already."""
        arrival = cls()
        arrival.came()
        return arrival

    @property
    def over(self) -> bool:
        """Whether there is nothing to wait for any more: it is here, or something went wrong."""
        return self._here.is_set()

    @property
    def here(self) -> bool:
        return self.over and self._error is None

    def wait(self) -> None:
        """Wait until it is here; raises what went wrong."""
        self._here.wait()
        if self._error is not None:
            raise self._error

    def came(self, error: Exception | None = None) -> None:
        self._error = error
        self._here.set()


@dataclass(slots=True)
class _Fetch(Generic[_F]):
    what: Sequence[_F]
    arrival: Arrival


class Courier(Generic[_F, _P]):
    """The errands of one rank.

    Args:
        fetch: a bound method that brings a list of things; kept weakly.
        deliver: a bound method that takes a list of parcels away; kept weakly.
        goes_with: whether the second parcel may go in one delivery with the first.
        capacity: bytes of parcels that may wait (one parcel may be larger, by itself).
    """

    def __init__(
        self,
        fetch: Callable[[Sequence[_F]], None],
        deliver: Callable[[Sequence[_P]], None],
        goes_with: Callable[[_P, _P], bool],
        capacity: int,
    ) -> None:
        self._fetch, self._deliver = weakref.WeakMethod(fetch), weakref.WeakMethod(deliver)
        self._goes_with = goes_with
        self._capacity = capacity
        self._changed = threading.Condition()
        self._fetches: deque[_Fetch[_F]] = deque()
        self._parcels: deque[tuple[_P, int]] = deque()
        self._waiting = 0  # bytes of parcels, those under way too
        self._busy = False
        self._urgent = 0  # calls of the program that want the line for themselves
        self._failed: Exception | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    # -- for the program

    def fetch(self, what: Sequence[_F]) -> Arrival:
        """Bring it; the caller waits for the arrival when it needs it."""
        arrival = Arrival()
        with self._changed:
            if self._closed:
                arrival.came(closed())
            else:
                self._fetches.append(_Fetch(what, arrival))
                self._wake()
        return arrival

    def deliver(self, parcel: _P, nbytes: int) -> None:
        """Take it away; it must not change until `drain`."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._waiting == 0 or self._waiting + nbytes <= self._capacity or self._failed or self._closed
            )
            self._check()
            self._parcels.append((parcel, nbytes))
            self._waiting += nbytes
            self._wake()

    def drain(self) -> None:
        """Wait until every errand is done; raises what went wrong in one."""
        if self._thread is None:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._failed or not (self._busy or self._fetches or self._parcels))
            if self._failed is not None:
                raise self._failed

    def give_way(self) -> None:
        """For an errand that takes long: let the program go first."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._urgent)

    def __enter__(self) -> None:
        """The program needs the line: no new errand begins until it has left."""
        with self._changed:
            self._urgent += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._urgent -= 1
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            for fetch in self._fetches:
                fetch.arrival.came(closed())
            self._fetches.clear()
            self._parcels.clear()
            self._changed.notify_all()

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed
        if self._closed:
            raise closed()

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self,), name="zeropage carries messages", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    # -- in the thread

    def _next(self) -> tuple[_Fetch[_F] | None, list[_P], int] | None:
        """The next errand: a fetch, or parcels with their bytes. None: the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (not self._urgent and (self._fetches or self._parcels)))
            if self._closed:
                return None
            self._busy = True
            if self._fetches:
                return self._fetches.popleft(), [], 0
            first, nbytes = self._parcels.popleft()
            parcels = [first]
            while self._parcels and self._goes_with(first, self._parcels[0][0]):
                parcel, more = self._parcels.popleft()
                parcels.append(parcel)
                nbytes += more
            return None, parcels, nbytes

    def _done(self, nbytes: int, failed: Exception | None) -> None:
        with self._changed:
            self._busy = False
            self._waiting -= nbytes
            if failed is not None:
                self._failed = failed
                self._parcels.clear()
            self._changed.notify_all()


def _work(courier: Courier[_F, _P]) -> None:
    with torch.no_grad():
        while _run_one(courier):
            pass


def _run_one(courier: Courier[_F, _P]) -> bool:
    """One errand. Nothing of it is held when it is over: frames are counted by their holders."""
    errand = courier._next()
    if errand is None:
        return False
    fetch, parcels, nbytes = errand
    del errand
    if fetch is None:
        courier._done(nbytes, _attempt(courier._deliver(), parcels))
    else:
        what, fetch.what = fetch.what, []
        failed = _attempt(courier._fetch(), what)
        del what
        fetch.arrival.came(failed)
        courier._done(0, None)
    return True


def _attempt(method: Callable[[Any], None] | None, what: Any) -> Exception | None:
    """Call it; what went wrong, without the frames of the calls, which hold what was carried."""
    if method is None:
        return closed()
    try:
        method(what)
    except Exception as error:
        return error.with_traceback(None)
    finally:
        if isinstance(what, list):
            what.clear()
    return None


def closed() -> PeerLostError:
    """What is said to who still wants something of an engine that was closed."""
    return PeerLostError("this process has closed the engine that served these parameters")
