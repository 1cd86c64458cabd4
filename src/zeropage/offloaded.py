"""A torch optimizer whose masters and states are on disk, stepped in pieces.

    prepare   room is taken on the disk for what the first step will make, so that a full disk stops nothing midway
    step      piece k is stepped in memory while piece k+1 is read and k-1 is written (`memory.stream`)

A piece is a part of a large parameter or many small ones. That is right for optimizers that treat every element by
itself; others are refused. What they keep of a parameter as a whole ("step") is in memory, and each piece of the
parameter begins with the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import optim

from zeropage.errors import ConfigError, OffloadError
from zeropage.gradients import Record
from zeropage.loss_scale import DynamicLossScale
from zeropage.memory.disk import BLOCK, DiskSlice, rounded
from zeropage.memory.stream import BUFFERS, Span, Window, stream
from zeropage.optim import NARROW, Master, ShardedOptimizer, is_elementwise, is_watched, record_of
from zeropage.page import Page
from zeropage.pager import Pager
from zeropage.pieces import bare_step, is_cut_like, states_to_be, step_in_pieces
from zeropage.steps import cut_state, over_slice
from zeropage.tensor import PagedTensor

__all__ = ["OffloadedOptimizer"]


@dataclass(slots=True, eq=False)
class _Part:
    """Elements `low` to `high` of this rank's slice of one parameter, and where they are streamed."""

    parameter: PagedTensor
    low: int
    high: int
    group: int  # of the optimizer
    last: bool  # of this parameter
    weights: Span | None = None  # the parameter itself
    master: Span | None = None
    states: dict[str, Span] = field(default_factory=dict)

    def spans(self) -> list[Span]:
        own = [span for span in (self.weights, self.master) if span is not None]
        return [*own, *self.states.values()]


class OffloadedOptimizer(ShardedOptimizer):
    """Steps `optimizer` with its masters and states in the file of `pager`'s disk.

    Raises:
        ConfigError: the optimizer needs whole tensors.
    """

    def __init__(self, optimizer: optim.Optimizer, pager: Pager, scaler: DynamicLossScale | None = None) -> None:
        if not is_elementwise(optimizer):
            raise ConfigError(
                f"offload.optimizer='disk' steps parameters in pieces, which {type(optimizer).__name__} may not take: "
                "it is none of torch's elementwise optimizers. Use one of those, or offload.optimizer='none'."
            )
        super().__init__(optimizer, scaler)
        self._pager = pager
        self._reserved: dict[PagedTensor, dict[str, DiskSlice]] = {}  # for states that the next step will make
        self._damage = ""

    # -- what lies where

    def keep_master(self, record: Record, values: torch.Tensor | DiskSlice) -> None:
        page = record.page
        if isinstance(values, torch.Tensor):
            place = self._pager.place(f"{page.name} in fp32", page.layout, values.dtype)
            self._put(place, values)
            values = place
        super().keep_master(record, values)

    def room(self, page: Page, dtype: torch.dtype, name: str) -> PagedTensor:
        return over_slice(self._pager.place(name, page.layout, dtype), page, name)

    def forget(self) -> None:
        super().forget()
        self._reserved.clear()
        self._damage = "Loading a checkpoint has failed in the middle: the optimizer has no state."

    def restored(self) -> None:
        self._damage = ""

    def require_whole(self) -> None:
        if self._damage:
            raise OffloadError(f"{self._damage} Load a checkpoint before anything else.")

    def prepare(self) -> None:
        """Bring to the disk what is in memory, and take room for what the next step will make (collective).

        Raises:
            OffloadError: the disk of any rank is full, or fails. Nothing was changed.
        """
        self.require_whole()
        if is_watched(self.optimizer):
            raise ConfigError(
                "the optimizer has step hooks or another step() than its class, which would find no parameters: with "
                "offload.optimizer='disk' it is stepped in pieces. Do before or after engine.step() what they do, or "
                "set offload.optimizer='none'."
            )
        probed: dict[tuple[int, torch.dtype], dict[str, torch.dtype]] = {}
        for index, parameter in self._stepped():
            record = record_of(parameter)
            page = record.page
            dtype = self._prepare_master(record)
            known = self.optimizer.state.get(parameter)
            if known:
                cut_state(known, page)
                for key, value in list(known.items()):
                    self._bring_to_disk(parameter, key, value)
                continue
            if (index, dtype) not in probed:
                probed[index, dtype] = states_to_be(self.optimizer, index, dtype)
            reserved = self._reserved.setdefault(parameter, {})
            for key, kind in probed[index, dtype].items():
                if key not in reserved:
                    reserved[key] = self._pager.place(f"{page.name}.{key}", page.layout, kind)

    def _stepped(self) -> list[tuple[int, PagedTensor]]:
        """The parameters that have a gradient, with the number of their group."""
        groups = self.optimizer.param_groups
        return [(i, p) for i, group in enumerate(groups) for p in group["params"] if record_of(p).has_gradient()]

    def _prepare_master(self, record: Record) -> torch.dtype:
        """Make sure that there is room for a master, if one is needed; the dtype in which the parameter is stepped."""
        page = record.page
        if page.dtype not in NARROW:
            self.masters.pop(record, None)
            return page.dtype
        master = self.masters.get(record)
        if master is None or master.page.layout != page.layout:
            place = self._pager.place(f"{page.name} in fp32", page.layout, torch.float32)
            self.masters[record] = Master(place, page, -1)  # agrees with no version
        return torch.float32

    def _bring_to_disk(self, parameter: PagedTensor, key: str, value: Any) -> None:
        """State that was made, assigned or loaded in memory."""
        if _slice_of(value) is not None or self.is_one_number(key):
            return
        page = record_of(parameter).page
        own = self._inward(value, parameter, key)
        if isinstance(own, torch.Tensor) and own.shape == (_length(page),):
            place = self._pager.place(f"{page.name}.{key}", page.layout, own.dtype)
            self._put(place, own)
            self.optimizer.state[parameter][key] = over_slice(place, page, f"{page.name}.{key}")

    def _put(self, place: DiskSlice, values: torch.Tensor) -> None:
        """Write to the disk; a failure is raised on all ranks (collective)."""
        problem = ""
        try:
            place.write(values)
        except OffloadError as error:
            problem = str(error)
        self._pager.offload_together("write to the disk", problem)

    # -- the step

    def step(self, factor: float) -> None:
        """One step on the gradients times `factor`, inside a write batch of the caller (collective).

        Raises:
            OffloadError: the disk of any rank failed. Parameters and states are partly new; load a checkpoint.
        """
        stepped = self._stepped()
        parameters = [parameter for _, parameter in stepped]
        with torch.no_grad():
            self._scale(map(record_of, parameters), factor)
            problem = ""
            try:
                self._step_from_disk(stepped)
            except OffloadError as error:
                problem = str(error)
            except BaseException as error:
                self._damage = f"A step has failed in the middle ({type(error).__name__}: {error})."
                raise
            finally:
                self._tell_changes(parameters)
        try:
            self._pager.offload_together("end of a step on disk", problem)
        except OffloadError as error:
            self._damage = f"A step has failed in the middle: {error}."
            raise OffloadError(f"{self._damage} Parameters and states are partly new: load a checkpoint.") from error

    def _tell_changes(self, parameters: list[PagedTensor]) -> None:
        for parameter in parameters:
            record = record_of(parameter)
            record.page.changed()
            if record in self.masters:
                master = self.masters[record]
                master.page, master.version = record.page, record.page.version
            for value in self.optimizer.state.get(parameter, {}).values():
                if isinstance(value, PagedTensor):
                    value._node.page.changed()
            torch.autograd.graph.increment_version(parameter)

    def _step_from_disk(self, stepped: list[tuple[int, PagedTensor]]) -> None:
        pieces = dict(self._pieces(stepped))

        def run() -> None:
            with closing(stream(list(pieces))) as filled:
                for window, buffer in filled:
                    self._step_parts(pieces[window], window, buffer)

        step_in_pieces(self.optimizer, run)

    def _pieces(self, stepped: list[tuple[int, PagedTensor]]) -> Iterator[tuple[Window, list[_Part]]]:
        """What is in memory at a time: parts of one parameter, or several parameters."""
        disk = self._pager.disk
        assert disk is not None
        limit = disk.buffer_bytes // BUFFERS
        parts: list[_Part] = []
        nbytes = 0
        for index, parameter in stepped:
            for part in self._parts(index, parameter, limit):
                more = sum(span.nbytes for span in part.spans())
                if parts and nbytes + more > limit:
                    yield Window([span for each in parts for span in each.spans()]), parts
                    parts, nbytes = [], 0
                parts.append(part)
                nbytes += more
        if parts:
            yield Window([span for each in parts for span in each.spans()]), parts

    def _parts(self, index: int, parameter: PagedTensor, limit: int) -> Iterator[_Part]:
        record = record_of(parameter)
        page, master = record.page, self.masters.get(record)
        weights = page.store.slice if isinstance(page.store.slice, DiskSlice) else None
        kept = master.slice if master is not None else None
        assert kept is None or isinstance(kept, DiskSlice)
        known = self.optimizer.state.get(parameter) or {}
        states = {key: found for key, value in known.items() if (found := _slice_of(value)) is not None}
        fresh = self._reserved.get(parameter, {})
        slices = [each for each in (weights, kept, *states.values(), *fresh.values()) if each is not None]
        length, chunk = _length(page), 0
        if sum(rounded(each.nbytes) for each in slices) > limit:
            chunk = max(BLOCK, limit // sum(each.dtype.itemsize for each in slices) // BLOCK * BLOCK)
        agrees = master is not None and master.agrees_with(page)
        for low in range(0, length, chunk) if chunk else (0,):
            high = min(low + chunk, length) if chunk else length
            part = _Part(parameter, low, high, index, last=high == length)
            if weights is not None:
                part.weights = Span(weights, low, high, reads=not agrees, writes=True)
            if kept is not None:
                part.master = Span(kept, low, high, reads=agrees, writes=True)
            for key, place in states.items():
                part.states[key] = Span(place, low, high, reads=True, writes=True)
            for key, place in fresh.items():
                part.states[key] = Span(place, low, high, reads=False, writes=True)
            yield part

    # -- one piece

    def _step_parts(self, parts: list[_Part], window: Window, buffer: memoryview) -> None:
        """Step `parts`, whose values on disk are in `buffer`, and leave there what is to be written."""
        optimizer, outer = self.optimizer, self.optimizer.state
        inner: Any = defaultdict(dict)
        working = [(part, self._values(part, window, buffer)) for part in parts]
        for part, tensor in working:
            known = outer.get(part.parameter)
            if known:
                inner[tensor] = {
                    key: window.values(buffer, part.states[key]) if key in part.states else _own_copy(value)
                    for key, value in known.items()
                }
            optimizer.param_groups[part.group]["params"].append(tensor)
        optimizer.state = inner
        try:
            bare_step(optimizer)
        finally:
            optimizer.state = outer
            for group in optimizer.param_groups:
                group["params"] = []
        for part, tensor in working:
            tensor.grad = None
            self._take_back(part, tensor, inner.get(tensor, {}), window, buffer)

    def _values(self, part: _Part, window: Window, buffer: memoryview) -> torch.Tensor:
        """What the optimizer steps: part of the master, or of the parameter itself, with its gradient."""
        own = self._weights(part, window, buffer)
        tensor = own.detach()
        if part.master is not None:
            tensor = window.values(buffer, part.master)
            if not part.master.reads:
                tensor.copy_(own)
        tensor.grad = record_of(part.parameter).own_gradient()[part.low : part.high].to(tensor.dtype)
        return tensor

    def _weights(self, part: _Part, window: Window, buffer: memoryview) -> torch.Tensor:
        """The part of the parameter itself, in memory or in the buffer."""
        if part.weights is not None:
            return window.values(buffer, part.weights)
        return record_of(part.parameter).page.own()[part.low : part.high]

    def _take_back(
        self, part: _Part, tensor: torch.Tensor, state: dict[str, Any], window: Window, buffer: memoryview
    ) -> None:
        """After the step: put what it made in the buffer; the last part gives what belongs to the whole parameter."""
        record = record_of(part.parameter)
        if part.master is not None:
            self._weights(part, window, buffer).copy_(tensor)
        for key, value in state.items():
            if key in part.states:
                place = window.values(buffer, part.states[key])
                if value.data_ptr() != place.data_ptr():
                    place.copy_(value)
            elif is_cut_like(value, tensor):
                raise OffloadError(f"{record.name}: the optimizer made a state {key!r} in the middle of a step")
        if part.last and state:
            outer = self.optimizer.state[part.parameter]
            for key, value in state.items():
                if key not in part.states:
                    outer[key] = value
                elif key not in outer:
                    made = self._reserved[part.parameter].pop(key)
                    outer[key] = over_slice(made, record.page, f"{record.name}.{key}")


def _own_copy(value: Any) -> Any:
    """Each part of a parameter begins with the same numbers."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _length(page: Page) -> int:
    """Elements of this rank's slice."""
    low, high = page.bounds
    return high - low


def _slice_of(value: object) -> DiskSlice | None:
    """Where a state is on the disk, if it is there."""
    if not isinstance(value, PagedTensor) or not isinstance(value._node, Page):
        return None
    found = value._node.store.slice
    return found if isinstance(found, DiskSlice) else None
