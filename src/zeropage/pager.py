"""The pager: brings pages in when they are touched, guesses which come next, evicts under a byte budget.

Only this file changes which pages are resident. A *frame* holds the full copy of one page; frames of
evicted pages are used again. Pages that this rank can address in place (shared memory, one rank) need no
frame and count for nothing. The one rule: what it does in advance or keeps longer is only faster or slower;
an operator gets the same values whatever was predicted.
"""

from __future__ import annotations

import threading
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from zeropage.config import Config
from zeropage.draws import Draws
from zeropage.errors import DivergenceError, OffloadError, UninitializedPageError
from zeropage.layout import Layout
from zeropage.memory.addresses import Addresses
from zeropage.memory.device import HostLane, Lane
from zeropage.memory.disk import Disk, DiskSlice
from zeropage.memory.host import Slack, Store, allocate, holders
from zeropage.page import CastNode, Page, Spec
from zeropage.step_scope import StepScope
from zeropage.trace import Trace
from zeropage.transport import Arrival, Transport

__all__ = ["Counters", "Pager", "frame_budget"]

_Key = tuple[torch.dtype, torch.device, int]
_P = TypeVar("_P", bound=Page)

_FAR = 32
"""How many pages the predictor is asked for."""
_WRITES = 0
"""What stands in the trace, as if it were a page, where slices are written."""


@dataclass(slots=True)
class Counters:
    """What the pager has done since it was made. Bytes are bytes of full pages on this rank."""

    faults: int = 0  # pages brought in because an operator needed them
    hits: int = 0  # pages that were there when an operator came to them (read ahead, or kept)
    readahead_used: int = 0
    readahead_wasted: int = 0  # read ahead and evicted before anybody touched them
    evictions: int = 0
    bytes_moved: int = 0
    peak_resident_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Frame:
    memory: torch.Tensor  # 1-D, the whole page
    touched: bool
    arrival: Arrival | None = None  # of what was read ahead; None: it is here


class Pager:
    """The resident set of one sharded model on one rank, and its write batches."""

    def __init__(self, transport: Transport, config: Config, lane: Lane | None = None) -> None:
        self.transport = transport
        self.config = config
        self.lane = HostLane() if lane is None else lane
        self.disk = self._open_disk()
        self.counters = Counters()
        self.step = StepScope()
        self.draws = Draws(transport.meet)
        self.home = _home()
        self.slack = Slack()
        self.adopt: Callable[[torch.Tensor], None] = _adopt_nothing  # called for every new parameter over a page
        self.space: object = None  # what serves this pager; set and cleared by its maker
        self.parameters = 0
        self.sums_complete: Callable[[], None] = _nothing  # called when all ranks have ended their backwards
        self.before_writes: Callable[[], None] = _nothing  # called before slices change: a save may still read them
        self.gradients_dropped = 0  # how often gradients were dropped; the same on all ranks, or sums are mixed
        self.abandoned: Callable[[], None] = self.close  # called when the last parameter has gone
        self.pages: weakref.WeakValueDictionary[int, Page] = weakref.WeakValueDictionary()
        self.addresses = Addresses()
        self._trace = Trace()
        self._frames: OrderedDict[Page, _Frame] = OrderedDict()
        self._flight: Arrival | None = None  # what was read ahead last
        self._untouched = 0  # bytes of frames that were read ahead and not yet touched
        self._casts: OrderedDict[int, tuple[weakref.ref[CastNode], int]] = OrderedDict()
        self._free: dict[_Key, list[torch.Tensor]] = {}
        self._bytes = 0  # frames, casts and free frames
        self._largest = 0
        self._wanted = 0  # bytes of pages that are wanted resident beside the budget
        self._number = 0
        self._batch_open = False
        self._reads_in_batch = False
        self._lock = threading.RLock()

    # -- pages

    def new_page(self, name: str, spec: Spec) -> Page:
        """A page with memory for its slices on all ranks (collective). Its values are undefined."""
        layout = Layout(spec.shape.numel(), self.transport.world)
        if self.config.offload.parameters == "disk":
            own, parts = self._place(name, layout, spec.dtype)
            store = self.transport.private(own, layout, parts)
        else:
            store = self.transport.allocate(name, layout, spec.dtype, spec.device)
        return self.register(lambda number: Page(name, spec, layout, store, self, number))

    def private_page(self, name: str, spec: Spec, shard: torch.Tensor | DiskSlice) -> Page:
        """A page over a slice that this rank holds already; every rank makes it with its own slice."""
        layout = Layout(spec.shape.numel(), self.transport.world)
        store = self.transport.private(shard, layout)
        return self.register(lambda number: Page(name, spec, layout, store, self, number))

    def register(self, make: Callable[[int], _P]) -> _P:
        """Number a new page and keep it in sight."""
        self._number += 1
        page = make(self._number)
        self.pages[self._number] = page
        if page.framed:
            self._largest = max(self._largest, page.nbytes)
        return page

    # -- disk

    def _open_disk(self) -> Disk | None:
        """This rank's file, where anything is offloaded to disk (collective)."""
        offload = self.config.offload
        if "disk" not in (offload.parameters, offload.optimizer):
            return None
        assert offload.folder is not None
        job = self.transport.meet("name the job on the disk", uuid.uuid4().hex[:12].encode())[0].decode()
        made, problem = None, ""
        try:
            made = Disk(offload.folder.absolute(), job, self.transport.rank, offload.buffer_bytes)
        except OffloadError as error:
            problem = str(error)
        self.offload_together("open the offload folder", problem)
        return made

    def place(self, name: str, layout: Layout, dtype: torch.dtype) -> DiskSlice:
        """Room on the disk for this rank's slice of something; its values are undefined (collective).

        Raises:
            OffloadError: the disk of any rank is full. Nothing was changed.
        """
        return self._place(name, layout, dtype)[0]

    def _place(self, name: str, layout: Layout, dtype: torch.dtype) -> tuple[DiskSlice, list[DiskSlice]]:
        """This rank's slice, and those of all ranks as far as files are on one host."""
        disk, rank = self.disk, self.transport.rank
        assert disk is not None
        own, answer = None, b""
        try:
            own = disk.allocate(layout.length(rank), dtype, name)
            answer = b"%d" % own.offset
        except OffloadError as error:
            answer = str(error).encode()
        answers = self.transport.meet(f"place {name} of {layout.numel} x {dtype} on the disk", answer)
        _raise_together([("" if found.isdigit() else found.decode(errors="replace")) for found in answers])
        assert own is not None
        if self.transport.name == "collective":
            return own, []
        return own, [
            own if peer == rank else DiskSlice(disk.of_peer(peer), int(found), layout.length(peer), dtype)
            for peer, found in enumerate(answers)
        ]

    def offload_together(self, what: str, problem: str) -> None:
        """Raise OffloadError on all ranks if any has a problem (collective); "" is none."""
        answers = self.transport.meet(what, problem.encode()[:4000])
        _raise_together([answer.decode(errors="replace") for answer in answers])

    # -- faults

    @property
    def budget(self) -> int:
        """Bytes that frames and casts may take on this rank (the largest page may come on top)."""
        return self._wanted + frame_budget(self.config, self._largest)

    @contextmanager
    def keeping(self, pages: Iterable[Page]) -> Iterator[None]:
        """Inside, `pages` may stay resident beside what the budget allows, once they are touched."""
        nbytes = sum(page.nbytes for page in pages if page.framed)
        self._wanted += nbytes
        try:
            yield
        finally:
            self._wanted -= nbytes
            with self._lock:
                self._make_room(0)

    @property
    def resident_bytes(self) -> int:
        return self._bytes

    def fault(self, page: Page) -> torch.Tensor:
        """The full value of `page`, with its shape and strides."""
        if page.edits is not None:
            edited = page.edits.frame(page)
            if edited is not None:
                return page.shaped(edited)
        if not page.written:
            self.settle_draws()
        if not page.written:
            raise UninitializedPageError(
                f"{page.name!r} has no values yet: it was made on the meta device. Initialise it (for example with "
                "module.reset_parameters() or torch.nn.init) or load a checkpoint before it is read."
            )
        in_step = self._step_phase(page) if self._batch_open else None
        if page.in_place and in_step is None:
            self.counters.faults += 1
            self.transport.settle()
            return page.mapped()
        with self._lock, torch.inference_mode(False), torch.no_grad():
            return page.shaped(self._framed(page, in_step).memory)

    def settle_draws(self) -> None:
        """Make the random writes that wait: a page without values is to be read (collective, if any waits)."""
        with torch.inference_mode(False), torch.no_grad():
            self.draws.settle()

    def prepare_read_in_step(self) -> None:
        """To be called before a page is read while an optimizer's step may be running.

        [Note: reads inside a step] While slices are being written, a rank that is ahead may have written its slice
        already. So such a read is collective: all ranks read before any goes on, whatever each of them had
        resident before. The first one of a batch drops all that is resident, so that all ranks begin alike.
        """
        if self._batch_open and not self._reads_in_batch and self.step.active():
            self._reads_in_batch = True
            self.evict_all()
            for page in list(self.pages.values()):
                page.drop()

    def _step_phase(self, page: Page) -> str | None:
        """What the transport calls this read inside a step, while slices are being written; else None.

        [Note: closures] An optimizer may call a closure that runs the model inside its step. Such reads end
        the write batch; the next write opens another.
        """
        if self.step.active():
            return page.name
        self.close_batch()
        return None

    def _framed(self, page: Page, in_step: str | None) -> _Frame:
        self._trace.touch(page.number)
        frame = self._frames.get(page)
        if frame is not None and self._is_here(page, frame):
            self.counters.hits += 1
            if not frame.touched:
                frame.touched = True
                self._untouched -= page.nbytes
                self.counters.readahead_used += 1
                if in_step is None:
                    self._read_ahead(page)
            return frame
        self.counters.faults += 1
        ahead = self._ahead(page, self._stretch - page.nbytes) if in_step is None else []
        try:
            frame = self._new_frame(page, keep=())
            if ahead:
                self.transport.gather([(page.store, frame.memory), *self._frames_for(ahead, keep=(page, *ahead))])
            else:
                page.fill(frame.memory, in_step)
        except BaseException:
            self._disown(page, *ahead)
            raise
        self.counters.bytes_moved += page.nbytes + sum(other.nbytes for other in ahead)
        if in_step is None:
            self._read_ahead(page, *ahead)
        return frame

    # -- readahead

    @property
    def _stretch(self) -> int:
        """Bytes that are read ahead at a time: as many stay for what is in use."""
        return min(self.config.bucket_bytes, self.budget // 2)

    def _read_ahead(self, *present: Page) -> None:
        """Begin to bring what is expected after `present`, unless enough is on its way or waits to be touched."""
        if self._untouched > self._stretch // 2 or (self._flight is not None and not self._flight.over):
            return
        room = self._stretch - self._untouched
        pages = self._ahead(present[0], room, least=0 if self._untouched else self.budget // 2)
        if not pages:
            return
        try:
            self._flight = self.transport.fetch(self._frames_for(pages, keep=(*present, *pages)))
        except BaseException:
            self._disown(*pages)
            raise
        for page in pages:
            self._frames[page].arrival = self._flight
        self.counters.bytes_moved += sum(page.nbytes for page in pages)

    def _is_here(self, page: Page, frame: _Frame) -> bool:
        """Wait for what was read ahead; False if that failed: who asks for it now will hear why."""
        if frame.arrival is not None:
            try:
                frame.arrival.wait()
            except Exception:
                self._disown(page)
                return False
            frame.arrival = None
        return True

    def _frames_for(self, pages: Sequence[Page], keep: Sequence[Page]) -> list[tuple[Store, torch.Tensor]]:
        return [(page.store, self._new_frame(page, keep, touched=False).memory) for page in pages]

    def _disown(self, *pages: Page) -> None:
        """Forget frames that were not filled. They are not used again: a message may still arrive in them."""
        for page in pages:
            frame = self._frames.pop(page, None)
            if frame is not None:
                self._let_go(frame.memory)
                self._untouched -= 0 if frame.touched else page.nbytes

    def _ahead(self, page: Page, room: int, *, least: int = 0) -> list[Page]:
        """Pages that are expected after `page`, of at most `room` bytes; or one, of at most `least`."""
        if not self.config.readahead or type(page) is not Page:
            return []
        found: list[Page] = []
        for number in self._trace.predict(_FAR):
            if number == _WRITES:
                break  # what is brought before would be dropped there
            other = self.pages.get(number)
            if other is None or type(other) is not Page or not other.framed or other is page:
                continue
            if other in self._frames or not other.written or other.edits is not None:
                continue
            room -= other.nbytes
            if room < 0 and (found or other.nbytes > least):
                break
            found.append(other)
        return found

    def _new_frame(self, page: Page, keep: Sequence[Page], *, touched: bool = True) -> _Frame:
        key = (page.dtype, page.spec.device, page.layout.numel)
        memory = self._make_room(page.nbytes, keep, key)
        if memory is None:
            memory = allocate(page.layout.numel, page.dtype, page.spec.device)
            self._grow(page.nbytes)
        frame = self._frames[page] = _Frame(memory, touched)
        self._untouched += 0 if touched else page.nbytes
        return frame

    # -- eviction

    def _make_room(self, nbytes: int, keep: Iterable[Page] = (), key: _Key | None = None) -> torch.Tensor | None:
        """Evict the oldest until `nbytes` more fit, or until a free frame of kind `key` is there to return."""
        if key is not None and self._free.get(key):
            return self._free[key].pop()
        for page in list(self._frames):
            if self._bytes + nbytes <= self.budget:
                return None
            if page not in keep:
                self.evict(page)
                if key is not None and self._free.get(key):
                    return self._free[key].pop()
                self._free_frames(nbytes)
        for reference, _ in list(self._casts.values()):
            if self._bytes + nbytes <= self.budget:
                return None
            cast = reference()
            if cast is not None and not cast.kept:
                self.release(cast)
                cast.drop()
        self._free_frames(nbytes)
        return None

    def _free_frames(self, nbytes: int) -> None:
        """Give free frames back until `nbytes` more fit."""
        for pool in self._free.values():
            while pool and self._bytes + nbytes > self.budget:
                self._let_go(pool.pop())

    def evict(self, page: Page) -> None:
        """Drop the frame of `page`, if it has one, and every view of it."""
        if page.live is not None or page.kids:
            page.drop()
        if page not in self._frames:  # over memory that all ranks share no page ever is
            return
        with self._lock:
            frame = self._frames.pop(page, None)
            if frame is None:
                return
            self.counters.evictions += 1
            if not frame.touched:
                self._untouched -= page.nbytes
                self.counters.readahead_wasted += 1
            if frame.arrival is None or frame.arrival.here:
                self._recycle(frame.memory)
            else:  # a message may still arrive in it
                self._let_go(frame.memory)

    def evict_all(self) -> None:
        with self._lock:
            for page in list(self._frames):
                self.evict(page)
            for reference, _ in list(self._casts.values()):
                cast = reference()
                if cast is not None and not cast.kept:
                    self.release(cast)
                    cast.drop()
            for pool in self._free.values():
                for memory in pool:
                    self._let_go(memory)
            self._free.clear()

    def _recycle(self, memory: torch.Tensor) -> None:
        """Take a frame back, unless somebody still holds it.

        [Note: storage counts] An operator may keep its argument, or return an alias of it that its schema
        does not declare. The count of a storage's holders tells: a frame with other holders is left to them.
        """
        if holders(memory) > 1:
            self._let_go(memory)
            return
        if self.config.poison_frames:
            _poison(memory)
        self.lane.retire(memory)
        key = (memory.dtype, memory.device, memory.numel())
        self._free.setdefault(key, []).append(memory)

    def _let_go(self, memory: torch.Tensor) -> None:
        """A frame is none any more."""
        self._bytes -= memory.numel() * memory.element_size()
        self.lane.leave(memory)

    def _grow(self, nbytes: int) -> None:
        self._bytes += nbytes
        self.counters.peak_resident_bytes = max(self.counters.peak_resident_bytes, self._bytes)

    # -- casts

    def hold(self, cast: CastNode, value: torch.Tensor) -> None:
        """Count the value of a cast as resident; it may be dropped to make room."""
        nbytes = value.numel() * value.element_size()
        with self._lock:
            self._make_room(nbytes)
            key = id(cast)
            pager = weakref.ref(self)

            def died(_: object) -> None:
                alive = pager()
                if alive is not None:
                    alive._forget_cast(key)

            self._casts[key] = (weakref.ref(cast, died), nbytes)
            self._grow(nbytes)

    def release(self, cast: CastNode) -> None:
        self._forget_cast(id(cast))

    def _forget_cast(self, key: int) -> None:
        entry = self._casts.pop(key, None)
        if entry is not None:
            self._bytes -= entry[1]

    # -- writing

    @contextmanager
    def writing(self, pages: Sequence[Page], intent: str, payload: bytes = b"") -> Iterator[list[bytes]]:
        """A write batch over `pages`: all ranks have ended their reads, each writes its own slices (collective).

        Inside an optimizer step it is part of the step's batch. Yields everybody's payload, by rank.
        """
        stepping = self.step.active()
        if stepping:
            self.open_batch(self.step.intent)
            answers = [payload]
        else:
            self.close_batch()
            for page in pages:
                page.settle_casts()
            answers = self.transport.open_writes(intent, payload)
            self._trace.touch(_WRITES)
            self.before_writes()
        try:
            yield answers
        finally:
            for page in pages:
                page.changed()
            if not stepping:
                self.transport.close_writes()

    def open_batch(self, intent: str) -> None:
        """Begin the writes of an optimizer step: own slices may be written until `close_batch` (collective)."""
        if not self._batch_open:
            self._agree_on_gradients(self.transport.open_writes(intent, self._dropped()))
            self._trace.touch(_WRITES)
            self._batch_open = True
            self._reads_in_batch = False
            self.before_writes()
            self.sums_complete()

    def end_backwards(self, intent: str) -> None:
        """Wait until all ranks have ended their backwards (collective): sums are complete."""
        self.close_batch()
        self._agree_on_gradients(self.transport.meet(intent, self._dropped()))
        self.sums_complete()

    def _dropped(self) -> bytes:
        return str(self.gradients_dropped).encode()

    def _agree_on_gradients(self, answers: list[bytes]) -> None:
        if any(answer != answers[0] for answer in answers):
            told = ", ".join(f"rank {rank}: {int(answer)}" for rank, answer in enumerate(answers))
            raise DivergenceError(
                f"the ranks have dropped gradients different numbers of times ({told}): gradients of different steps "
                "were mixed. Call zero_grad() (or set p.grad) on every rank, or on none."
            )

    def close_batch(self) -> None:
        if self._batch_open:
            self._batch_open = False
            self.transport.close_writes()

    def parameter_left(self) -> None:
        self.parameters -= 1
        if self.parameters == 0:
            self.abandoned()

    def close(self) -> None:
        """Let go of the peers and of everything that refers back to this pager."""
        self.evict_all()
        self.adopt = _adopt_nothing
        self.abandoned = self.sums_complete = self.before_writes = _nothing
        self.transport.close()


def frame_budget(config: Config, largest: int) -> int:
    """Bytes of full pages that a rank keeps of a model whose largest has `largest` bytes; that one may come on top."""
    fixed = config.resident_bytes
    return 2 * max(config.bucket_bytes, largest) if fixed is None else fixed


def _raise_together(problems: list[str]) -> None:
    told = [(rank, problem) for rank, problem in enumerate(problems) if problem]
    if told:
        rank, text = told[0]
        raise OffloadError(text if len(told) == len(problems) else f"rank {rank}: {text}")


def _home() -> torch.device:
    """Where pages go that are made on the meta device: the default device of now, which is not that of then."""
    device = torch.get_default_device()
    return torch.device("cpu") if device.type == "meta" else device


def _nothing() -> None:
    """A closed pager has nobody to tell."""


def _adopt_nothing(parameter: torch.Tensor) -> None:
    """Pages used as plain data have no parameters."""


def _poison(memory: torch.Tensor) -> None:
    if memory.dtype.is_floating_point or memory.dtype.is_complex:
        memory.fill_(float("nan"))
    elif memory.dtype is torch.bool:
        memory.logical_not_()
    else:
        memory.fill_(77)
