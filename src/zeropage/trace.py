"""The readahead predictor: remembers which pages were touched in which order, guesses the next ones.

It knows page numbers only: no tensors, no ranks, no torch. Its one rule: a prediction is a hint. A wrong
one costs time, never correctness, so an order that changes needs no handling and nothing to invalidate.

The way it looks for the future is that of a compressor's match finder (LZ77 hash chains). The touches so
far are one long sequence. Where does the longest piece that ends in the present occur earlier in it? What
followed there is expected now. After a whole step was seen once, the match is the step before; where
steps alternate (train, eval, train), the match grows until it tells them apart.

    history   ... 7 8 9 1 2 3 4 5 6 7 8 9 1 2 3
                        ^ ^ ^             ^ ^ ^   the longest earlier piece that ends like the present
                            |
                         cursor: 4 5 6 7 8 9 come next
"""

from __future__ import annotations

__all__ = ["Trace"]

NOWHERE = -1
"""No position: of the cursor when no match is known, in a chain when there is no earlier occurrence."""

MAX_CANDIDATES = 64
"""How many earlier occurrences of the present page a search compares, the latest first."""

MAX_CONTEXT = 64
"""How many touches back a search compares. A cursor that is followed knows more: see `touch`."""

REACH = 8
"""How far `predict` looks ahead, in touches for each page asked for, when pages repeat."""


class Trace:
    """Touches in order, and the pages that are expected after the last of them.

    Bounded memory: about the last `capacity` touches are kept (at most twice as many).
    """

    __slots__ = ("_capacity", "_cursor", "_earlier", "_history", "_latest", "_present")

    def __init__(self, capacity: int = 1 << 16) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self._capacity = capacity
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._history: list[int] = []
        self._earlier: list[int] = []  # for each position, the last one before it with the same page
        self._latest: dict[int, int] = {}  # for each page, its last position
        self._cursor = NOWHERE
        self._present: int | None = None

    def __len__(self) -> int:
        """How many touches are remembered; a page touched again at once counts once."""
        return len(self._history)

    def touch(self, page: int) -> None:
        """Record that `page` was used. Well under a microsecond."""
        if page == self._present:
            return
        self._present = page
        history, cursor = self._history, self._cursor
        # While the present follows the match, the match grows by one: no other piece can have become a
        # longer one, since each of them grows by one at most. So one search lasts until a surprise.
        if cursor >= 0:
            self._cursor = cursor + 1 if history[cursor + 1] == page else NOWHERE
        self._earlier.append(self._latest.get(page, NOWHERE))
        self._latest[page] = len(history)
        history.append(page)
        if len(history) >= 2 * self._capacity:
            self._forget_oldest()

    def predict(self, count: int) -> list[int]:
        """Up to `count` distinct pages, without the present one, in the order in which they are expected.

        Empty when the present page was never seen before, and nothing is known of what may follow it.
        """
        if self._cursor == NOWHERE:
            self._cursor = self._find_longest_match()
        if self._cursor == NOWHERE or count < 1:
            return []
        expected: dict[int, None] = {}
        # The piece from the match to the present is a whole period: beyond it nothing new could come.
        start = self._cursor + 1
        for page in self._history[start : start + REACH * count]:
            if page != self._present:
                expected[page] = None
                if len(expected) == count:
                    break
        return list(expected)

    def _find_longest_match(self) -> int:
        """The earlier position whose past equals the present's for longest; of equals, the latest."""
        if not self._history:
            return NOWHERE
        best, best_length = NOWHERE, 0
        candidate = self._earlier[-1]
        for _ in range(MAX_CANDIDATES):
            if candidate == NOWHERE:
                break
            length = self._match_length(candidate)
            if length > best_length:
                best, best_length = candidate, length
            if length >= MAX_CONTEXT:
                break
            candidate = self._earlier[candidate]
        return best

    def _match_length(self, position: int) -> int:
        """How many touches that end at `position` equal the last ones."""
        history = self._history
        end = len(history) - 1
        longest = min(MAX_CONTEXT, position + 1)
        length = 1  # the chain leads to the same page
        while length < longest and history[position - length] == history[end - length]:
            length += 1
        return length

    def _forget_oldest(self) -> None:
        """Keep the last `capacity` touches; seldom, so that its cost spread over touches is small."""
        dropped = len(self._history) - self._capacity
        del self._history[:dropped]
        self._earlier = [max(i - dropped, NOWHERE) for i in self._earlier[dropped:]]
        self._latest = {page: i - dropped for page, i in self._latest.items() if i >= dropped}
        self._cursor = max(self._cursor - dropped, NOWHERE)
