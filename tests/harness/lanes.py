"""A lane that stands in for a device: copies are made as late as they may be, and misuse of frames raises.

Host memory is "the device" as well. A copy happens only when somebody asks for what it brings, and until then its
target holds NaN; so who reads a frame before it has asked the lane reads NaN, and who changes a slice while a copy may
read it is told. A frame is in one of three states, and only these changes are allowed:

    free      -> filling    fill
    filling   -> in use     ready (the copy is made now)
    any       -> free       retire, leave

A frame that is filled while it is in use would be overwritten under operators that still read it: `Hazard`.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor

from zeropage.memory.device import Copies, Flight

__all__ = ["Hazard", "StandInLane", "standing_in"]


class Hazard(AssertionError):
    """On a device this would have been a wrong number, now and then."""


@dataclass(eq=False)
class _Copy:
    target: weakref.ref[Tensor]
    kept: Tensor | None  # the target of a copy to the host
    source: Tensor
    seen: Tensor  # what the source held when the copy began
    made: bool = False

    def make(self) -> None:
        if self.made:
            return
        self.made = True
        if not torch.equal(_bits(self.source), _bits(self.seen)):
            raise Hazard("memory was changed while a copy was reading it")
        target = self.target()
        if target is not None:
            target.copy_(self.source)


@dataclass(eq=False)
class _Flight:
    copies: list[_Copy]

    def wait(self) -> None:
        for copy in self.copies:
            copy.make()


@dataclass(eq=False)
class StandInLane:
    """See the module. `calls` counts them by name; `pinned` are the bytes of each mapping."""

    calls: Counter[str] = field(default_factory=Counter)
    pinned: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._states: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._inward: list[_Copy] = []

    def serves(self, device: torch.device) -> bool:
        return True

    def pin(self, memory: torch.UntypedStorage) -> None:
        self.pinned.append(memory.nbytes())

    def staging(self, count: int, dtype: torch.dtype) -> Tensor:
        self.calls["staging"] += 1
        return _spoil(torch.empty(count, dtype=dtype))

    def retire(self, frame: Tensor) -> None:
        self.calls["retire"] += 1
        self._states.pop(id(frame), None)

    def leave(self, frame: Tensor) -> None:
        self.calls["leave"] += 1
        self._states.pop(id(frame), None)

    def state(self, frame: Tensor) -> str:
        known, state = self._states.get(id(frame), (None, "free"))
        return state if known is not None and known() is frame else "free"

    def fill(self, copies: Copies) -> Flight:
        self.calls["fill"] += 1
        begun = []
        for frame, source in copies:
            if self.state(frame) == "in use":
                raise Hazard("a frame is filled that operators may still read")
            self._states[id(frame)] = (weakref.ref(frame), "filling")
            _spoil(frame)
            begun.append(_Copy(weakref.ref(frame), None, source, source.clone()))
        self._inward += begun
        return _Flight(begun)

    def ready(self, flight: Flight) -> None:
        self.calls["ready"] += 1
        flight.wait()
        assert isinstance(flight, _Flight)
        for copy in flight.copies:
            frame = copy.target()
            if frame is not None and self.state(frame) == "filling":
                self._states[id(frame)] = (copy.target, "in use")

    def fetch(self, source: Tensor) -> tuple[Tensor, Flight]:
        self.calls["fetch"] += 1
        host = _spoil(torch.empty_like(source))
        return host, _Flight([_Copy(weakref.ref(host), host, source, source.clone())])

    def drain(self) -> None:
        self.calls["drain"] += 1
        for copy in self._inward:
            copy.make()
        self._inward.clear()

    def hand_over(self, tensors: Iterable[Tensor]) -> None:
        self.calls["hand_over"] += 1

    def take_over(self) -> None:
        self.calls["take_over"] += 1

    def memory(self) -> dict[str, int]:
        return {"stand-in allocated": 1}


@contextmanager
def standing_in(lanes: Sequence[StandInLane] = ()) -> Iterator[list[StandInLane]]:
    """What is sharded inside gets stand-in lanes: those given, then new ones; all that were used are in the list."""
    given, used = list(lanes), []

    def open_lane(device: torch.device) -> StandInLane:
        used.append(given.pop(0) if given else StandInLane())
        return used[-1]

    with mock.patch("zeropage.construct.open_lane", open_lane):
        yield used


def _spoil(memory: Tensor) -> Tensor:
    if memory.dtype.is_floating_point:
        with torch.no_grad():
            memory.detach().fill_(float("nan"))
    return memory


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)
