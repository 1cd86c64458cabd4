"""Parts of tensors, to and from the bytes of files, in pieces of bounded size.

A *part* is a box of a row-major tensor and the values in it. The slice of a page that is row-major itself is
one run of bytes; a page with other strides (`channels_last`) gives boxes of several runs.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from zeropage.errors import CheckpointError
from zeropage.layout import Box
from zeropage.memory.raw import bytes_of
from zeropage.page import Page

__all__ = ["PIECE", "Part", "announce_part", "own_parts", "read_part", "runs", "split", "whole_part", "write_part"]

PIECE = 64 << 20
"""Bytes that are read, or converted and written, at a time."""


@dataclass(frozen=True, slots=True)
class Part:
    """The values of `box` in a row-major tensor of `shape`."""

    shape: tuple[int, ...]
    box: Box
    values: torch.Tensor

    def pieces(self, itemsize: int) -> Iterator[Part]:
        """The part in parts of at most `PIECE` bytes."""
        for box in split(self.box, PIECE // itemsize):
            values = self.values
            for dim, (low, origin, size) in enumerate(zip(box.offset, self.box.offset, box.size, strict=True)):
                values = values.narrow(dim, low - origin, size)
            yield Part(self.shape, box, values)


def whole_part(tensor: torch.Tensor) -> Part:
    return Part(tuple(tensor.shape), Box((0,) * tensor.dim(), tuple(tensor.shape)), tensor)


def own_parts(page: Page) -> list[Part]:
    """This rank's slice of `page`: views of the shard."""
    if not page.row_major:
        return [Part(tuple(page.spec.shape), box, values) for box, values in page.boxes()]
    low, high = page.bounds
    return [Part((page.layout.numel,), Box((low,), (high - low,)), page.own())]


def split(box: Box, most: int) -> Iterator[Box]:
    """Cut `box` into boxes of at most `most` elements, in row-major order; nothing if it is empty."""
    if box.numel <= most:
        if box.numel:
            yield box
        return
    dim = next(d for d, size in enumerate(box.size) if size > 1)
    step = max(1, most * box.size[dim] // box.numel)
    for low in range(0, box.size[dim], step):
        offset, size = list(box.offset), list(box.size)
        offset[dim] += low
        size[dim] = min(step, box.size[dim] - low)
        yield from split(Box(tuple(offset), tuple(size)), most)


def runs(shape: Sequence[int], box: Box) -> Iterator[tuple[int, int]]:
    """The contiguous runs of `box` in a row-major tensor of `shape`: first element and number of elements."""
    inner = len(shape)  # dimensions from here on are covered in full
    while inner and box.size[inner - 1] == shape[inner - 1]:
        inner -= 1
    lead = max(inner - 1, 0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    length = math.prod(box.size[lead:])
    outer = [range(low, low + size) for low, size in zip(box.offset[:lead], box.size[:lead], strict=True)]
    start = box.offset[lead] * strides[lead] if shape else 0
    for index in itertools.product(*outer):
        yield start + sum(i * stride for i, stride in zip(index, strides[:lead], strict=True)), length


def read_part(file: int, dtype: torch.dtype, start: int, part: Part) -> None:
    """Fill `part.values`, converted to their dtype, from a file that holds the tensor from byte `start` on.

    Raises:
        CheckpointError: the file ends too early.
        OSError: it cannot be read.
    """
    size = dtype.itemsize
    for piece in part.pieces(max(size, part.values.element_size())):
        values = piece.values
        here = values.dtype is dtype and values.device.type == "cpu" and values.is_contiguous()
        buffer = values if here else torch.empty(piece.box.size, dtype=dtype)
        room, place = bytes_of(buffer), 0
        for first, numel in runs(piece.shape, piece.box):
            _read(file, room[place : place + numel * size], start + first * size)
            place += numel * size
        if not here:
            values.copy_(buffer)


def announce_part(file: int, dtype: torch.dtype, start: int, part: Part) -> None:
    """Let the kernel begin to bring a part of one run from the disk, ahead of `read_part`. A hint: nothing waits."""
    if sys.platform == "linux" and part.box.numel and len(part.shape) == 1:
        (first, numel) = next(runs(part.shape, part.box))
        os.posix_fadvise(file, start + first * dtype.itemsize, numel * dtype.itemsize, os.POSIX_FADV_WILLNEED)


def write_part(file: int, dtype: torch.dtype, start: int, part: Part) -> None:
    """Write `part.values`, converted to `dtype`, at their places in a file that holds the tensor from `start` on.

    Raises:
        CheckpointError: a finite value is beyond `dtype`.
        OSError: it cannot be written.
    """
    size = dtype.itemsize
    for piece in part.pieces(max(size, part.values.element_size())):
        values = piece.values.detach().resolve_conj().resolve_neg()
        buffer = values.to("cpu", dtype).contiguous()
        narrowed = buffer.dtype is torch.float16 and values.dtype is not torch.float16
        if narrowed and not torch.equal(buffer.isinf(), values.cpu().isinf()):
            raise CheckpointError(f"values up to {float(values.abs().max()):g} are beyond float16; use bf16")
        data, place = bytes_of(buffer), 0
        for first, numel in runs(piece.shape, piece.box):
            _write(file, data[place : place + numel * size], start + first * size)
            place += numel * size


def _read(file: int, room: memoryview, offset: int) -> None:
    while room:
        count = os.preadv(file, [room], offset)
        if count == 0:
            raise CheckpointError(f"the file ends at byte {offset:,}: it was cut off while it was read")
        room, offset = room[count:], offset + count


def _write(file: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(file, data, offset)
        data, offset = data[count:], offset + count
