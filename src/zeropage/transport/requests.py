"""What a rank can want in a round (see `rounds`), as the others are told it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import zip_longest

__all__ = ["Kind", "Part", "Request", "Round", "Wish", "wanted_by_all"]

PageKey = tuple[int, int]
"""The number of a page, and a checksum of its name."""
Part = tuple[int, float, int]
"""What is added to a sum: its epoch, scale, and the number of its dtype."""
Wish = tuple[PageKey, Part | None]
"""A page, and what is added to it, if anything is."""


class Kind(IntEnum):
    MEET = 0  # wait until all ranks have come here; serve meanwhile
    GATHER = 1  # send me these pages
    ADD = 2  # take my parts of these gradients
    AWAIT = 3  # wait until all have ended as many backwards as I; serve meanwhile
    IDLE = 4  # I want nothing: my program is elsewhere


@dataclass(frozen=True, slots=True)
class Request:
    """What one rank wants in one round. Everything in it is the same on all ranks once exchanged."""

    kind: Kind
    intent: str = ""
    payload: bytes = b""
    pages: tuple[PageKey, ...] = ()  # those asked for, or added to
    parts: tuple[Part, ...] = ()  # what is added to each
    reentrant: bool = False  # the backward that adds runs inside another one
    ended: int = 0  # backwards that the sender has ended
    made: int = 0  # stores that the sender has made

    @property
    def turn(self) -> int:
        """The number of the backward that adds."""
        return self.ended + 1

    @property
    def asks(self) -> bool:
        """Whether the others must answer wherever their programs are."""
        return self.kind in (Kind.GATHER, Kind.ADD)


@dataclass(frozen=True, slots=True)
class Round:
    """What all ranks wanted in a round, by rank, and whose wishes have to wait for another one."""

    requests: list[Request]
    deferred: set[int]

    @property
    def moved(self) -> bool:
        """Whether any rank's program got on with its work."""
        return any(request.asks and rank not in self.deferred for rank, request in enumerate(self.requests))


def wanted_by_all(requests: Sequence[Request]) -> set[Wish]:
    """What these requests want alike, for the same end. Nothing, if one of them names a page twice."""
    named = [request.pages for request in requests]
    if len({request.kind for request in requests}) != 1 or any(len(set(pages)) < len(pages) for pages in named):
        return set()
    return set.intersection(*(set(zip_longest(request.pages, request.parts)) for request in requests))
