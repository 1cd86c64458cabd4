"""What every way of moving pages between ranks can do.

Two kinds of calls. *Collective* ones (`allocate`, `accumulator`, `meet`, `open_writes`) are made by all ranks
in the same order, and say what they are for: ranks that meet with different intents all get the same
`DivergenceError`. *One-sided* ones (`gather`, `Accumulator.add`, `await_gradients`) need no partner that
makes the same call: ranks may read different pages, or none, and add different gradients.

The order of calls in one optimizer step, on each rank:

    gather ...                              forward and backward touch pages (one-sided)
    begin_backward, add ..., end_backward   gradients go to their owners (one-sided)
    open_writes("step")                     all ranks have ended their reads and their backwards
    ... own slices are written ...
    close_writes()
    gather ...                              waits until every owner has closed its writes
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from zeropage.errors import GradientError
from zeropage.layout import Layout
from zeropage.memory.disk import DiskSlice
from zeropage.memory.host import Store
from zeropage.transport.courier import Arrival

__all__ = ["Accumulator", "Transport", "accumulate", "overtaken"]


_PIECE = 1 << 18  # elements


def accumulate(target: torch.Tensor, gradient: torch.Tensor, scale: float, *, first: bool) -> None:
    """Add `scale * gradient` to `target`, or put it there; in the precision of `target`. All are 1-D.

    [Note: pieces that fit the cache] An operator over two dtypes converts one of its arguments as a whole first. So
    it is called on pieces, whose conversion is still in the cache when it is used.
    """
    if gradient.dtype == target.dtype:
        if first and scale == 1.0:
            target.copy_(gradient)
        elif first:
            torch.mul(gradient, scale, out=target)
        else:
            target.add_(gradient, alpha=scale)
        return
    for into, piece in zip(target.split(_PIECE), gradient.split(_PIECE), strict=True):
        if not first:
            into.add_(piece, alpha=scale)
            continue
        into.copy_(piece)
        if scale != 1.0:
            into.mul_(scale)


def overtaken(name: str) -> GradientError:
    return GradientError(
        f"the gradient of {name!r} was read after another rank had gone on and added more to it. Read gradients on "
        "every rank before any rank calls backward() again."
    )


class Accumulator(Protocol):
    """The sum of one parameter's gradient over ranks and micro-batches, each rank holding its own slice.

    [Note: gradient epochs] Nothing is ever zeroed. Each parameter counts its *epochs*: `grad = None` starts
    the next one. The first contribution of an epoch overwrites a slice, later ones are added. So a rank
    that is quick to start the next step cannot have its gradient wiped by one that is slow to end the last.
    """

    store: Store

    def add(self, gradient: torch.Tensor, scale: float, epoch: int) -> None:
        """Add `scale * gradient` (1-D, `layout.numel` elements, flat order) into the owners' slices."""

    def present(self, epoch: int) -> bool:
        """Whether any rank contributed to `epoch` in a backward that this rank has ended too.

        Right after `await_gradients` or a collective call.
        """

    def own(self, epoch: int) -> torch.Tensor:
        """This rank's slice of the sum of `epoch`.

        Raises:
            GradientError: another rank has gone on to a later epoch, or to a backward that this rank has not run.
        """

    def mark(self, epoch: int) -> None:
        """Say that this rank has written its slice itself (an assignment to `grad`)."""

    def check(self, epoch: int) -> None:
        """Raise GradientError if any slice holds more than the sum of `epoch` so far (after a copy of them)."""

    def release(self) -> None:
        """Give the memory back where the transport can (a frozen parameter); the sum is lost."""


class Transport(Protocol):
    name: str
    rank: int
    world: int

    def allocate(self, name: str, layout: Layout, dtype: torch.dtype, device: torch.device) -> Store:
        """Memory for one page, seen by all ranks as far as the transport can (collective)."""

    def private(
        self, shard: torch.Tensor | DiskSlice, layout: Layout, parts: Sequence[DiskSlice] | None = None
    ) -> Store:
        """A store over memory, or a part of a file, that this rank already has (made by all ranks in the same order).

        `parts`: the slices of all ranks, if this rank can read them all.
        """

    def accumulator(self, name: str, layout: Layout, dtype: torch.dtype, device: torch.device) -> Accumulator:
        """An empty accumulator (collective)."""

    def settle(self) -> None:
        """Wait until every rank has closed the write batches that this rank knows of."""

    def gather(self, wanted: Sequence[tuple[Store, torch.Tensor]]) -> None:
        """Fill each frame (1-D, `layout.numel` elements) with the full content of its store (one-sided)."""

    def fetch(self, wanted: Sequence[tuple[Store, torch.Tensor]]) -> Arrival:
        """Like `gather`, beside the program where the transport can. Every collective call waits for it first."""

    def gather_in_step(self, store: Store, frame: torch.Tensor, what: str) -> None:
        """Like `gather`, while slices are being written: all ranks read at the same point of their program."""

    def exclusive(self, store: Store) -> AbstractContextManager[None]:
        """No other rank copies or replaces the whole page inside (for edits outside of write batches)."""

    def scatter(self, store: Store, full: torch.Tensor | None, source: int) -> None:
        """Rank `source` gives its `full` values (1-D) to the owners of the slices (collective)."""

    def meet(self, intent: str, payload: bytes = b"") -> list[bytes]:
        """Wait for all ranks to come with the same intent; everybody's payload, by rank (collective).

        Raises:
            DivergenceError: ranks came with different intents (raised on all of them).
            PeerLostError, PeerTimeoutError: a rank died, left, or did not come within `timeout_s`.
        """

    def open_writes(self, intent: str, payload: bytes = b"") -> list[bytes]:
        """`meet`, after which this rank may write its own slices until `close_writes`."""

    def close_writes(self) -> None: ...

    def begin_backward(self, *, reentrant: bool) -> None:
        """Gradients follow. `reentrant`: this backward runs inside another one, which is not over with it."""

    def end_backward(self) -> None: ...

    def await_gradients(self) -> None:
        """Wait until every rank has ended as many backwards as this one, or waits in a collective call."""

    def close(self) -> None:
        """Let go of everything. Later calls raise."""
