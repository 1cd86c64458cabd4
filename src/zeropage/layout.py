"""Which rank owns which slice of a page.

Pure arithmetic: no tensors, no process group. A page is a flat run of `numel` elements; it is cut in
`world` contiguous slices of equal length, so that every shape and every dtype balances by itself.
The one rule: the cut depends on `numel` and `world` alone, so a parameter, its master copy, its gradient
and its optimizer state are always cut at the same places, whatever their dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ALIGN", "Box", "Layout", "boxes"]

# [Note: alignment] Slices start at multiples of 64 elements: at least 64 bytes for every dtype. Vectorised
# optimizer kernels then treat each element as they would in the whole tensor (their scalar tails stay at the
# end), which keeps fused optimizers equal to the unsharded run to the bit.
ALIGN = 64


@dataclass(frozen=True, slots=True)
class Layout:
    """The cut of `numel` elements over `world` ranks. A rank's slice may be empty."""

    numel: int
    world: int

    @property
    def chunk(self) -> int:
        """Length in elements of every slice but the last ones, a multiple of `ALIGN`."""
        each = -(-self.numel // self.world)
        return -(-each // ALIGN) * ALIGN

    def bounds(self, rank: int) -> tuple[int, int]:
        """The half-open range of elements `[low, high)` that `rank` owns."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is not one of {self.world} ranks")
        low = min(rank * self.chunk, self.numel)
        return low, min(low + self.chunk, self.numel)

    def length(self, rank: int) -> int:
        low, high = self.bounds(rank)
        return high - low


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned part of a tensor: `offset` and `size` have one entry a dimension."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.size)


def boxes(shape: Sequence[int], low: int, high: int) -> list[Box]:
    """Cut the flat range `[low, high)` of a row-major tensor into boxes, in flat order.

    At most `2 * ndim - 1` boxes: a partial row at either end of each dimension and one block of whole rows
    (the form in which `torch.distributed.checkpoint` describes a part of a tensor).
    """
    if high <= low:
        return []
    if not shape:
        return [Box((), ())]
    if len(shape) == 1:
        return [Box((low,), (high - low,))]
    inner = math.prod(shape[1:])
    first, head = divmod(low, inner)
    last, tail = divmod(high, inner)
    if first == last:
        return _inside_row(shape, first, head, tail)
    found = []
    if head:
        found += _inside_row(shape, first, head, inner)
        first += 1
    if last > first:
        found.append(Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])))
    if tail:
        found += _inside_row(shape, last, 0, tail)
    return found


def _inside_row(shape: Sequence[int], row: int, low: int, high: int) -> list[Box]:
    return [Box((row, *box.offset), (1, *box.size)) for box in boxes(shape[1:], low, high)]
