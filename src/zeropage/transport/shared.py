"""All ranks on one host: pages stand in memory that everybody maps, so a gather is a view of it.

The slices of a page stand side by side in one mapping. Reading needs no partner: slices are constant until
all ranks have met for a write. Gradients are added straight into the owners' slices.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import IntEnum
from functools import partial

import torch

from zeropage.layout import Layout
from zeropage.memory.disk import DiskSlice
from zeropage.memory.host import Store
from zeropage.memory.nodes import home_node, place
from zeropage.memory.shared import SharedBlock, create, open_of_process
from zeropage.transport.base import accumulate, overtaken
from zeropage.transport.control import BLOCK, Control
from zeropage.transport.courier import Arrival
from zeropage.transport.group import Group
from zeropage.transport.rounds import Rounds

__all__ = ["SharedAccumulator", "SharedTransport"]

_LINE = 64  # bytes: a cache line a rank, so that polling does not disturb the writers
_TURNS_PER_MEETING = 1 << 20
_PART = 1 << 19  # elements: ranks that take turns on one parameter are so far apart


class _Mark(IntEnum):
    """Index of each 64-bit word in a rank's line at the head of an accumulator."""

    TURN = 0  # one more than the number of the last backward in which this rank contributed
    CONTRIBUTED = 1  # one more than the epoch of this rank's last contribution
    CONTENT = 2  # one more than the epoch that this rank's slice holds
    FIRST = 3  # one more than the number of the backward with this rank's first contribution to its epoch
    LATEST = 4  # the same of its latest one, set before anything is added
    PASSED = 5  # elements of the gradient that this rank has added in that backward


class SharedAccumulator:
    """A gradient sum in shared memory. See [Note: gradient epochs] and [Note: turns]."""

    def __init__(self, name: str, store: Store, transport: SharedTransport) -> None:
        self.store = store
        self._name = name
        self._transport = transport
        assert store.whole is not None and isinstance(store.owner, SharedBlock)
        self._slices = [store.whole[slice(*store.layout.bounds(r))] for r in range(store.layout.world)]
        buffer = store.owner.buffer
        self._marks = [(ctypes.c_uint64 * 8).from_buffer(buffer, r * _LINE) for r in range(store.layout.world)]

    def add(self, gradient: torch.Tensor, scale: float, epoch: int) -> None:
        transport = self._transport
        transport.settle()
        turn = transport.await_turn(self._marks, 1)
        mine = self._marks[transport.rank]
        mine[_Mark.PASSED] = 0
        mine[_Mark.LATEST] = turn + 1
        if mine[_Mark.CONTRIBUTED] <= epoch:
            mine[_Mark.FIRST] = turn + 1
        for owner, target in enumerate(self._slices):
            if target.numel():
                low, high = self.store.layout.bounds(owner)
                self._add_to_slice(owner, target, gradient[low:high], scale, epoch)
        mine[_Mark.CONTRIBUTED] = max(mine[_Mark.CONTRIBUTED], epoch + 1)
        if not transport.reentrant:
            mine[_Mark.TURN] = turn + 1

    def _add_to_slice(self, owner: int, target: torch.Tensor, gradient: torch.Tensor, scale: float, epoch: int) -> None:
        """Part by part where ranks take turns: the next rank follows one part behind. Others lock the slice."""
        transport, marks, mine = self._transport, self._marks[owner], self._marks[self._transport.rank]
        start, length = self.store.layout.bounds(owner)[0], target.numel()
        number = self.store.uid * self.store.layout.world + owner
        one_by_one = transport.deterministic and not transport.reentrant
        first: bool | None = None  # once for all parts: the first of them says what the slice holds
        for low in range(0, length, _PART if one_by_one else length):
            high = min(low + _PART, length) if one_by_one else length
            transport.await_turn(self._marks, start + high)
            with nullcontext() if transport.deterministic else transport.lock(number):
                if marks[_Mark.CONTENT] > epoch + 1:
                    return  # this epoch was dropped already: its owner has gone on
                if first is None:
                    first = marks[_Mark.CONTENT] <= epoch
                accumulate(target[low:high], gradient[low:high], scale, first=first)
                marks[_Mark.CONTENT] = max(marks[_Mark.CONTENT], epoch + 1)
            if one_by_one:
                mine[_Mark.PASSED] = start + high

    def present(self, epoch: int) -> bool:
        turn = self._transport.turn
        return any(
            marks[_Mark.CONTRIBUTED] > epoch + 1 or (marks[_Mark.CONTRIBUTED] > epoch and marks[_Mark.FIRST] <= turn)
            for marks in self._marks
        )

    def own(self, epoch: int) -> torch.Tensor:
        marks = self._marks[self._transport.rank]
        self._check_slice(marks, epoch)
        self._check_turns()
        if marks[_Mark.CONTENT] <= epoch:
            self.store.shard.zero_()
            marks[_Mark.CONTENT] = epoch + 1
        return self.store.shard

    def mark(self, epoch: int) -> None:
        mine = self._marks[self._transport.rank]
        mine[_Mark.CONTENT] = epoch + 1
        mine[_Mark.CONTRIBUTED] = epoch + 1
        mine[_Mark.FIRST] = mine[_Mark.LATEST] = 0

    def check(self, epoch: int) -> None:
        for marks, part in zip(self._marks, self._slices, strict=True):
            if part.numel():
                self._check_slice(marks, epoch)
        self._check_turns()

    def _check_slice(self, marks: ctypes.Array[ctypes.c_uint64], epoch: int) -> None:
        if marks[_Mark.CONTENT] > epoch + 1:
            raise overtaken(self._name)

    def _check_turns(self) -> None:
        """Nobody may have added to the sum in a backward later than those that this rank has ended."""
        turn = self._transport.turn
        if any(marks[_Mark.LATEST] > turn for marks in self._marks):
            raise overtaken(self._name)

    def release(self) -> None:
        """Shared memory stays reserved: another rank may be adding to it."""


class SharedTransport:
    """See [Note: turns].

    [Note: turns] Gradients are added in the order (backward, rank): rank r adds its part of a parameter
    after every lower rank has added its own, or has ended the backward of the same number. So sums have
    the same bits in every run, at any world size. It cannot deadlock: a rank waits only for backwards
    that come earlier in that order, and a rank that waits in a collective call counts as having ended.
    A rank follows the one before it a few elements behind, not a whole parameter. Inside a re-entrant
    backward (old-style activation checkpointing) a parameter may get more than one part; there the turn
    passes on only when the whole backward has ended.
    """

    name = "shared"

    def __init__(self, group: Group, timeout_s: float, *, deterministic: bool) -> None:
        self.rank, self.world = group.rank, group.world
        self.reentrant = False
        self.deterministic = deterministic
        self._rounds = Rounds(group, timeout_s, 0, deterministic=deterministic)
        self._uid = 0
        self._node = home_node()
        self._handed_over: int | None = None
        self._turn = 0
        self._in_backward = False
        self._closed = False
        self._lock_file = self._open_control(group)
        self._control = Control(SharedBlock(self._lock_file, BLOCK * self.world), self.rank, self.world, timeout_s)
        self.meet("start")

    def _open_control(self, group: Group) -> int:
        descriptor = create(BLOCK * self.world) if self.rank == 0 else -1
        pid, number = group.broadcast((os.getpid(), descriptor))
        if self.rank != 0:
            descriptor = open_of_process(pid, number)
        group.barrier()
        return descriptor

    # -- memory

    def allocate(self, name: str, layout: Layout, dtype: torch.dtype, device: torch.device) -> Store:
        return self._map(f"page {name} of {layout.numel} x {dtype}", layout, dtype)

    def private(
        self, shard: torch.Tensor | DiskSlice, layout: Layout, parts: Sequence[DiskSlice] | None = None
    ) -> Store:
        store = self._rounds.private(shard, layout)
        store.parts = parts
        return store

    def accumulator(self, name: str, layout: Layout, dtype: torch.dtype, device: torch.device) -> SharedAccumulator:
        store = self._map(f"gradient of {name}: {layout.numel} x {dtype}", layout, dtype, head=_LINE * self.world)
        return SharedAccumulator(name, store, self)

    def _map(self, what: str, layout: Layout, dtype: torch.dtype, head: int = 0) -> Store:
        """New memory for a page, behind `head` bytes for marks."""
        nbytes = max(head + layout.numel * dtype.itemsize, mmap.PAGESIZE)
        descriptor = create(nbytes) if self.rank == 0 else -1
        answers = self.meet(f"allocate {what}", f"{os.getpid()} {descriptor}".encode())
        low, high = layout.bounds(self.rank)
        with self._opened(descriptor, answers[0]) as mine:
            block = SharedBlock(mine, nbytes)
            if self._node is not None:
                place(mine, head + low * dtype.itemsize, head + high * dtype.itemsize, self._node)
        whole = block.tensor(dtype, layout.numel, head)
        self._uid += 1
        return Store(self._uid, 0, layout, whole[low:high], whole, owner=block)

    @contextmanager
    def _opened(self, created: int, told: bytes) -> Iterator[int]:
        """A descriptor of the memory that rank 0 has `created`, and has `told` the others of."""
        if self.rank == 0:
            self._handed_over = created  # closed at the next meeting: by then all have mapped it
            yield created
            return
        mine = open_of_process(*map(int, told.split()))
        try:
            yield mine
        finally:
            os.close(mine)
            self._control.publish_mapped()

    # -- phases

    def meet(self, intent: str, payload: bytes = b"") -> list[bytes]:
        self._before_meeting()
        answers = self._control.meet(intent, payload)
        self._after_meeting()
        return answers

    def open_writes(self, intent: str, payload: bytes = b"") -> list[bytes]:
        self._before_meeting()
        answers = self._control.open_writes(intent, payload)
        self._after_meeting()
        return answers

    def _before_meeting(self) -> None:
        self._in_backward = self.reentrant = False
        self._turn = (self._control.met + 1) * _TURNS_PER_MEETING
        self._control.publish_ended(self._turn)

    def _after_meeting(self) -> None:
        if self._handed_over is not None:
            os.close(self._handed_over)
            self._handed_over = None

    def close_writes(self) -> None:
        self._control.close_writes()

    def settle(self) -> None:
        self._control.settle()

    # -- moving data

    def gather(self, wanted: Sequence[tuple[Store, torch.Tensor]]) -> None:
        self.settle()
        for store, frame in wanted:
            self._read(store, frame)

    def fetch(self, wanted: Sequence[tuple[Store, torch.Tensor]]) -> Arrival:
        self.gather(wanted)
        return Arrival.at_once()

    def gather_in_step(self, store: Store, frame: torch.Tensor, what: str) -> None:
        self.meet(f"read {what} inside the optimizer step")
        self._read(store, frame)
        self.meet(f"go on after reading {what} inside the optimizer step")

    def _read(self, store: Store, frame: torch.Tensor) -> None:
        if store.whole is not None:
            frame.copy_(store.whole)
        elif store.parts is not None:
            store.read_parts(frame)
        else:
            self._rounds.gather([(store, frame)])

    def exclusive(self, store: Store) -> _ByteLock:
        return self.lock(store.uid * self.world)

    def scatter(self, store: Store, full: torch.Tensor | None, source: int) -> None:
        if store.whole is None and store.parts is None:
            self._rounds.scatter(store, full, source)
            return
        self.open_writes(f"scatter page {store.uid} from rank {source}")
        if store.whole is None:
            self._rounds.scatter(store, full, source)
        elif full is not None:
            store.whole.copy_(full)
        self.close_writes()

    # -- gradients

    def begin_backward(self, *, reentrant: bool) -> None:
        self._in_backward = True
        self.reentrant = self.reentrant or reentrant

    @property
    def turn(self) -> int:
        """The number of backwards that this rank has ended; a meeting makes it equal on all ranks."""
        return self._turn

    def end_backward(self) -> None:
        if self._in_backward:
            self._in_backward = self.reentrant = False
            self._turn += 1
            self._control.publish_ended(self._turn)

    def await_turn(self, marks: Sequence[ctypes.Array[ctypes.c_uint64]], count: int) -> int:
        """Wait until this rank may add the first `count` elements to the parameter whose `marks` these are.

        Returns:
            The number of its turn.
        """
        turn, control = self._turn, self._control
        if self.deterministic:
            for peer in range(self.world):
                if peer != self.rank:
                    needed = turn + 1 if peer < self.rank else turn
                    if not self._has_passed(marks[peer], peer, needed, count):
                        control.wait(partial(self._has_passed, marks[peer], peer, needed, count), peer)
        return turn

    def _has_passed(self, line: ctypes.Array[ctypes.c_uint64], peer: int, needed: int, count: int) -> bool:
        return bool(
            line[_Mark.TURN] >= needed
            or (line[_Mark.LATEST] == needed and line[_Mark.PASSED] >= count)
            or self._control.ended(peer) >= needed
        )

    def await_gradients(self) -> None:
        self.end_backward()
        control, number = self._control, self._turn
        for peer in range(self.world):
            if peer != self.rank:
                control.wait(partial(self._has_ended, peer, number), peer)

    def _has_ended(self, peer: int, number: int) -> bool:
        return self._control.ended(peer) >= number

    def lock(self, number: int) -> _ByteLock:
        return _ByteLock(self._lock_file, number)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._handed_over is not None:
                self._control.await_mapped()
            self._control.leave()
            self._after_meeting()
            os.close(self._lock_file)
            self._rounds.close()

    def __del__(self) -> None:
        self.close()


class _ByteLock:
    """A lock on one byte of a file, released by the kernel if this process dies."""

    __slots__ = ("_file", "_number")

    def __init__(self, file: int, number: int) -> None:
        self._file, self._number = file, number

    def __enter__(self) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, self._number)

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._number)
