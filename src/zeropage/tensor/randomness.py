"""Random writes give every rank the values that an unsharded model would have got.

All ranks draw the whole page and keep their slices, so they must draw the same numbers. Usually their
generators agree; where they do not (a script that seeds by rank), the first rank's decides.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zeropage.pager import Pager

__all__ = ["of_first_rank"]


@contextmanager
def of_first_rank(pager: Pager, *, enabled: bool) -> Iterator[None]:
    """Draw from the first rank's generator state inside, if `enabled` and the ranks' states differ (collective)."""
    if not enabled or pager.transport.world == 1:
        yield
        return
    state = torch.get_rng_state()
    raw = state.numpy().tobytes()
    marks = pager.transport.meet("compare random states", str(zlib.crc32(raw)).encode())
    if all(mark == marks[0] for mark in marks):
        yield
        return
    first = pager.transport.meet("take the first rank's random state", raw if pager.transport.rank == 0 else b"")[0]
    torch.set_rng_state(torch.frombuffer(bytearray(first), dtype=torch.uint8))
    try:
        yield
    finally:
        if pager.transport.rank != 0:
            torch.set_rng_state(state)
