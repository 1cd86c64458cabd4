"""Random values that wait: those of parameters made on the meta device inside `init()` are drawn when it ends.

Torch draws nothing on the meta device, and loaders count on that: they build a model there, and then set every
parameter anew. So a random write to a page without values is remembered, and made at the end of the context (or when
the page is read) unless something else has been written over all of it by then, or it is gone. The one rule: what is
drawn has the values that it would have had at once, as long as nothing but `torch.manual_seed` comes in between.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from zeropage.page import Page

__all__ = ["Draws"]

_TOLD = 32_768
"""How many writes one meeting tells of: a bit each."""


@dataclass(frozen=True, slots=True, eq=False)
class _Write:
    page: weakref.ref[Page]
    number: int  # of the page
    make: Callable[[Page], None]
    skip: Callable[[], None] | None  # None: it is a later write to a part of the page, which draws nothing
    state: torch.Tensor | None  # of the generator where the program had seeded it before this write, else None


class Draws:
    """The writes that wait, in the order in which the program made them; the same on all ranks.

    Args:
        meet: how the ranks meet (`Transport.meet`).
    """

    def __init__(self, meet: Callable[[str, bytes], list[bytes]]) -> None:
        self._meet = meet
        self._open = False
        self._waiting: list[_Write] = []
        self._numbers: set[int] = set()  # of the pages that those write to
        self._seen: torch.Tensor | None = None  # the generator's state at the latest draw
        self._mixed = False  # something else has drawn in between

    def open(self) -> None:
        """From now on random writes wait."""
        self._open = True

    def close(self) -> None:
        """From now on they do not; those that wait still are forgotten."""
        self._open = False
        self._forget()

    def put_off(self, page: Page, make: Callable[[Page], None], skip: Callable[[], None]) -> bool:
        """Let a write of random values to all of `page` wait; False if it is to be made at once.

        Args:
            make: makes it (collective).
            skip: moves the generators as `make` would (collective).
        """
        if not self._open:
            return False
        state = torch.get_rng_state()
        start = state if self._seen is None or self._seeded_since(state) else None
        self._seen = state
        self._numbers.add(page.number)
        self._waiting.append(_Write(weakref.ref(page), page.number, make, skip, start))
        return True

    def put_off_part(self, page: Page, make: Callable[[Page], None]) -> bool:
        """Let a write to a part of `page`, which has a draw waiting, wait too; False if it has none."""
        if page.number not in self._numbers:
            return False
        self._waiting.append(_Write(weakref.ref(page), page.number, make, None, None))
        return True

    def settle(self) -> None:
        """Make the writes that wait and are still wanted (collective, if any waits)."""
        wanted = self._wanted(self._waiting)
        while wanted and wanted[-1] is None:
            wanted.pop()  # nobody would see what those draw
        waiting = self._waiting[: len(wanted)]
        now = torch.get_rng_state()
        seeded = bool(waiting) and self._seeded_since(now)
        mixed = self._mixed
        self._forget()
        for write, page in zip(waiting, wanted, strict=True):
            if write.state is not None and not mixed:
                torch.set_rng_state(write.state)
            if page is not None:
                write.make(page)
            elif write.skip is not None:
                write.skip()
        if seeded and not mixed:
            torch.set_rng_state(now)

    def _forget(self) -> None:
        self._waiting, self._numbers, self._seen, self._mixed = [], set(), None, False

    def _seeded_since(self, state: torch.Tensor) -> bool:
        """Whether the generator, now in `state`, was seeded since the latest draw. Notes whether it was used instead.

        [Note: what draws in between] Numbers that others drew meanwhile came from where those that wait should have
        come from. They must not be used twice, so all that waits is drawn after them.
        """
        assert self._seen is not None
        if torch.equal(state, self._seen):
            return False
        seeded = torch.equal(state, torch.Generator(device="cpu").manual_seed(torch.initial_seed()).get_state())
        self._mixed = self._mixed or not seeded
        return seeded

    def _wanted(self, waiting: Sequence[_Write]) -> list[Page | None]:
        """The page of each write that is to be made, else None.

        [Note: garbage] A module that the program has dropped may live on, on some ranks, until its garbage is
        collected. So a write is made only where all ranks hold the page.
        """
        latest = {write.number: index for index, write in enumerate(waiting) if write.skip is not None}
        pages = [write.page() if latest[write.number] <= index else None for index, write in enumerate(waiting)]
        found = [None if page is None or page.written else page for page in pages]
        for low in range(0, len(found), _TOLD):
            part = found[low : low + _TOLD]
            bits = int("".join("10"[page is None] for page in part), 2)
            answers = self._meet("draw the values that waited", f"{bits:x}".encode())
            everywhere = [int(answer, 16) for answer in answers]
            for place in range(len(part)):
                if not all(told >> (len(part) - 1 - place) & 1 for told in everywhere):
                    found[low + place] = None
        return found
