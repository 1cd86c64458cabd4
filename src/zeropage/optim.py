"""A user's torch optimizer, run on what this rank owns.

During `step` the optimizer's groups hold *working* tensors in place of the parameters: this rank's slices
(fp32 masters where the parameter has 16 bits) for optimizers that treat every element by itself; paged
tensors for the others, and where a hook or a replaced `step` may look at them. Outside of it groups and
state are keyed by the parameters, as the user made them, so schedulers, per-group settings and
`state_dict` know nothing of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn, optim
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from zeropage.errors import ConfigError
from zeropage.gradients import Record
from zeropage.hooks import WeakHook
from zeropage.loss_scale import DynamicLossScale
from zeropage.memory.disk import DiskSlice
from zeropage.page import Page
from zeropage.pieces import bare_step, step_in_pieces
from zeropage.seats import Part, Seat
from zeropage.steps import over_slice, page_state, shard_state
from zeropage.tensor import PagedTensor
from zeropage.transport import accumulate

__all__ = [
    "NARROW", "Master", "ShardedOptimizer", "check_optimizer", "is_elementwise", "is_watched", "record_of",
    "records_of",
]  # fmt: skip

# Exactly these: a subclass may do anything.
_ELEMENTWISE: frozenset[type[optim.Optimizer]] = frozenset({
    optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop, optim.Adadelta, optim.Adamax, optim.NAdam,
    optim.RAdam, optim.ASGD,
})  # fmt: skip
# Parameters of these dtypes have an fp32 master.
NARROW = (torch.bfloat16, torch.float16)
# Those that have all of their state after the first step, and change it in place: they may be stepped in pieces.
_CUT: frozenset[type[optim.Optimizer]] = frozenset({optim.Adam, optim.AdamW})
_PIECE = 1 << 20  # elements: what is done to them one after the other finds them in the cache
# What they keep of a parameter as a whole, and not of each element.
_PER_PARAMETER = frozenset({"step", "eta", "mu", "mu_product"})

_Stepped = tuple[PagedTensor, Record]


@dataclass(slots=True, eq=False)
class Master:
    """The fp32 values behind a 16-bit parameter, on this rank's slice.

    `page` and `version` tell with what it agreed last: a page written by somebody else is taken anew.
    """

    slice: torch.Tensor | DiskSlice
    page: Page
    version: int

    @property
    def values(self) -> torch.Tensor:
        return self.slice if isinstance(self.slice, torch.Tensor) else self.slice.mapped()

    def agrees_with(self, page: Page) -> bool:
        return self.page is page and self.version == page.version


class _MasterRecord:
    """Lets a paged view of a master answer for `.grad` with the sum's own precision."""

    __slots__ = ("_face",)

    def __init__(self, face: PagedTensor | None) -> None:
        self._face = face

    def gradient(self) -> PagedTensor | None:
        return self._face

    def assign_gradient(self, value: torch.Tensor | None) -> None:
        self._face = value if isinstance(value, PagedTensor) else None


def is_elementwise(optimizer: optim.Optimizer) -> bool:
    """Whether it treats every element by itself, so that a part of a parameter can be stepped alone."""
    return type(optimizer) in _ELEMENTWISE


def is_watched(optimizer: optim.Optimizer) -> bool:
    """Whether a program looks into the optimizer's groups in its steps: by hooks, or by a `step` put over its own."""
    everybodys = (*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values())
    step: Any = vars(optimizer).get("step")
    # a scheduler of torch's counts steps by such a function
    counts = getattr(step, "_wrapped_by_lr_sched", False) and step.__wrapped__ is type(optimizer).step
    return (
        bool(optimizer._optimizer_step_pre_hooks)
        or bool(optimizer._optimizer_step_post_hooks)
        or not all(isinstance(hook, WeakHook) for hook in everybodys)
        or (step is not None and not counts)
    )


def check_optimizer(optimizer: object, model: nn.Module) -> None:
    """Raise ConfigError unless `optimizer` is one of torch's, over parameters of `model`, and needs no closure."""
    if not isinstance(optimizer, optim.Optimizer):
        raise ConfigError(f"optimizer must be a torch.optim.Optimizer or None, not {type(optimizer).__name__}")
    if isinstance(optimizer, optim.LBFGS):
        raise ConfigError(
            "LBFGS calls a closure several times a step, which an engine's backward() and step() cannot do; run it "
            "directly on model.parameters(): optimizer.step(closure)"
        )
    own = set(map(id, _parameters_of(model)))
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in own:
                raise ConfigError(
                    f"parameter {place} of optimizer group {index} (shape {tuple(parameter.shape)}) does not belong to "
                    "the model. Build the optimizer over the model's own parameters; add a new module to the model "
                    "before its parameters to the optimizer."
                )


class ShardedOptimizer:
    """Steps `optimizer`, whose parameters are paged (see `check_optimizer`), on this rank's slices.

    Args:
        scaler: what the gradients that it steps with are scaled by; None: nothing.
    """

    def __init__(self, optimizer: optim.Optimizer, scaler: DynamicLossScale | None = None) -> None:
        self.optimizer = optimizer
        self._scaler = scaler
        self.masters: dict[Record, Master] = {}
        self._seats: dict[Record, Seat] = {}
        self._elementwise = is_elementwise(optimizer)
        self._sliced = self._elementwise  # whether the present step works on slices
        page_state(optimizer)

    @property
    def loss_scale(self) -> float:
        """What gradients of its parameters have to be scaled by at this moment."""
        return 1.0 if self._scaler is None else self._scaler.scale

    def parameters(self) -> list[PagedTensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def records(self) -> list[Record]:
        return list(dict.fromkeys(record_of(parameter) for parameter in self.parameters()))

    def keep_master(self, record: Record, values: torch.Tensor | DiskSlice) -> None:
        """Use `values` (fp32, this rank's slice) as the exact values behind a 16-bit page."""
        self.masters[record] = Master(values, record.page, record.page.version)

    def room(self, page: Page, dtype: torch.dtype, name: str) -> PagedTensor:
        """A state or a master of `page`, cut like it, whose values are undefined."""
        low, high = page.bounds
        return over_slice(torch.empty(high - low, dtype=dtype, device=page.store.slice.device), page, name)

    def forget(self) -> None:
        """Let go of all state."""
        for parameter in self.parameters():
            self.optimizer.state.pop(parameter, None)
        self.masters.clear()
        self._seats.clear()

    def restored(self) -> None:
        """A checkpoint has been loaded."""

    def require_whole(self) -> None:
        """Raise if a step has failed in the middle, until a checkpoint is loaded."""

    def prepare(self) -> None:
        """What can fail, before anything is changed (collective; all ranks have met)."""
        page_state(self.optimizer)

    def is_one_number(self, key: str) -> bool:
        """Whether that state is one number for a whole parameter, also for one that is a number itself."""
        return self._elementwise and key in _PER_PARAMETER

    def step(self, factor: float) -> None:
        """One step on the gradients times `factor`, inside a write batch of the caller."""
        stepped = [(p, record) for p in self.parameters() if (record := record_of(p)).has_gradient()]
        self._sliced = self._elementwise and not is_watched(self.optimizer)
        with torch.no_grad():
            masters = {record: self._master(record) for _, record in stepped}
            try:
                if self._sliced and type(self.optimizer) in _CUT:
                    self._step_in_pieces(stepped, masters, factor)
                else:
                    self._scale((record for _, record in stepped), factor)
                    with self._working_tensors(stepped, masters):
                        self.optimizer.step()
                    self._write_back(masters)
            except BaseException:
                for _, record in stepped:
                    record.page.changed()  # some slices may have been written
                raise
            for _, record in stepped:
                record.page.changed()
                master = masters[record]
                if master is not None:
                    master.version = record.page.version
            # the slices changed behind autograd's back: a graph that saved a parameter must notice
            torch.autograd.graph.increment_version([parameter for parameter, _ in stepped])

    def _scale(self, records: Iterable[Record], factor: float) -> None:
        if factor != 1.0:
            for record in records:
                record.own_gradient().mul_(factor)

    def _write_back(self, masters: dict[Record, Master | None]) -> None:
        for pager in dict.fromkeys(record.pager for record in masters):
            pager.open_batch("write parameters back")  # an optimizer of paged tensors has closed it at its end
        for record, master in masters.items():
            if master is not None:
                record.page.own().copy_(master.values)

    # -- in pieces

    def _step_in_pieces(self, stepped: list[_Stepped], masters: dict[Record, Master | None], factor: float) -> None:
        """All that is done to an element is done while it is in the cache: scaling, stepping, rounding."""
        optimizer, state = self.optimizer, self.optimizer.state
        groups = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
        seats = []
        for parameter, record in stepped:
            seat = self._seat(parameter, record, masters[record], state.get(parameter))
            seats.append((groups[id(parameter)], record, seat))

        def run() -> None:
            scratch: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
            for piece in _pieces(seats):
                kind, count = _kind(piece[0].seat), sum(part.high - part.low for part in piece)
                if kind not in scratch or scratch[kind].numel() < count:
                    scratch[kind] = torch.empty(count, dtype=kind[0], device=kind[1])
                self._step_piece(piece, factor, scratch[kind])

        try:
            step_in_pieces(optimizer, run)
        finally:
            optimizer.state = state
            for parameter, record in stepped:
                seat = self._seats[record]
                if seat.state:
                    self._outward(parameter, record, seat.tensor, seat.state)

    def _step_piece(self, piece: list[Part], factor: float, scratch: torch.Tensor) -> None:
        optimizer = self.optimizer
        inner: Any = defaultdict(dict)
        optimizer.state = inner
        working, used = [], 0
        for part in piece:
            tensor, given = part.tensor(), part.state()
            gradient = part.record.own_gradient()
            if not part.whole:
                gradient = gradient[part.low : part.high]
            if factor != 1.0 or gradient.dtype != tensor.dtype:
                scaled = scratch[used : used + len(tensor)]
                accumulate(scaled, gradient, factor, first=True)
                gradient = scaled
                used += len(tensor)
            tensor.grad = gradient
            inner[tensor] = given
            optimizer.param_groups[part.group]["params"].append(tensor)
            working.append((part, tensor))
        try:
            bare_step(optimizer)
        finally:
            for part, tensor in working:
                tensor.grad = None
                optimizer.param_groups[part.group]["params"].clear()
        for part, tensor in working:
            if part.seat.master is not None:
                part.seat.page.own()[part.low : part.high].copy_(tensor)

    # -- substitution

    @contextmanager
    def _working_tensors(self, stepped: list[_Stepped], masters: dict[Record, Master | None]) -> Iterator[None]:
        optimizer = self.optimizer
        state: Any = optimizer.state
        # state that belongs to no parameter stays in sight
        inner: Any = defaultdict(dict, {k: v for k, v in state.items() if not isinstance(k, torch.Tensor)})
        working: dict[int, torch.Tensor] = {}
        for parameter, record in stepped:
            known = state.get(parameter)
            tensor, kept = self._working(parameter, record, masters[record], known)
            working[id(parameter)] = tensor
            if known is not None:
                inner[tensor] = kept
        groups = [group["params"] for group in optimizer.param_groups]
        optimizer.state = inner
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [working[id(p)] for p in parameters if id(p) in working]
        try:
            yield
        finally:
            optimizer.state = state
            for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = parameters
            for parameter, record in stepped:
                tensor = working[id(parameter)]
                if self._sliced:
                    tensor.grad = None
                if tensor in inner:
                    self._outward(parameter, record, tensor, inner[tensor])

    def _working(
        self, parameter: PagedTensor, record: Record, master: Master | None, known: dict[str, Any] | None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """What is stepped in place of `parameter`, with its gradient, and its state."""
        if self._sliced:
            seat = self._seat(parameter, record, master, known)
            seat.tensor.grad = record.own_gradient().to(seat.tensor.dtype)
            return seat.tensor, seat.state
        state = {key: self._inward(value, parameter, key) for key, value in (known or {}).items()}
        if master is None:
            return parameter, state
        face = over_slice(master.values, record.page, f"{record.name} in fp32")
        gradient = over_slice(record.own_gradient().to(master.values.dtype), record.page, f"{record.name}.grad in fp32")
        face.__dict__["_record"] = _MasterRecord(gradient)
        return face, state

    def _seat(
        self, parameter: PagedTensor, record: Record, master: Master | None, outer: dict[str, Any] | None
    ) -> Seat:
        seat = self._seats.get(record)
        if seat is not None and seat.fits(record.page, master, outer):
            return seat
        outer = {} if outer is None else outer
        tensor = (record.page.own() if master is None else master.values).detach()
        state = {key: self._inward(value, parameter, key) for key, value in outer.items()}
        known = list(outer.values())
        pages = [value._node.page if isinstance(value, PagedTensor) else None for value in known]
        seat = self._seats[record] = Seat(record.page, master, tensor, outer, known, pages, state)
        return seat

    def _master(self, record: Record) -> Master | None:
        page = record.page
        if page.dtype not in NARROW:
            self.masters.pop(record, None)
            return None
        master = self.masters.get(record)
        if master is None or not master.agrees_with(page):
            master = self.masters[record] = Master(page.own().float(), page, page.version)
        return master

    def _inward(self, value: Any, parameter: PagedTensor, key: str) -> Any:
        """State as the step sees it."""
        page = parameter._node.page
        if isinstance(value, torch.Tensor) and not isinstance(value, PagedTensor):
            whole = value.dim() == 0 and (not self._elementwise or self.is_one_number(key))
            if whole or value.shape != page.spec.shape:
                return value
            value = shard_state(value, page, f"{page.name}.{key}")
        if self._sliced and isinstance(value, PagedTensor):
            return value._node.page.own()
        return value

    def _outward(self, parameter: PagedTensor, record: Record, tensor: torch.Tensor, inner: dict[str, Any]) -> None:
        """State as the user sees it: paged where it has the parameter's shape."""
        seat = self._seats.get(record)
        if seat is not None and inner is seat.state and seat.known and seat.stepped():
            return
        self._seats.pop(record, None)
        page = parameter._node.page
        outer = self.optimizer.state[parameter]
        for key, value in inner.items():
            old = outer.get(key)
            if not self._sliced or not isinstance(value, torch.Tensor) or value.dim() == 0:
                outer[key] = value
            elif isinstance(old, PagedTensor) and old._node.page.own() is value:
                old._node.page.changed()  # somebody may have read it before the step
            elif value.shape == tensor.shape:
                outer[key] = over_slice(value, page, f"{page.name}.{key}")
            else:
                outer[key] = value

    # -- accounting

    def nbytes(self) -> dict[str, int]:
        """Bytes of masters and state on this rank, by where they are."""
        found = {"disk": 0, "memory": 0}
        values: list[object] = [master.slice for master in self.masters.values()]
        values += [v for state in self.optimizer.state.values() if isinstance(state, dict) for v in state.values()]
        for value in values:
            place = value._node.page.store.slice if isinstance(value, PagedTensor) else value
            if isinstance(place, torch.Tensor):
                found["memory"] += place.nbytes
            elif isinstance(place, DiskSlice):
                found["disk"] += place.nbytes
        return found


def _pieces(seats: Iterable[tuple[int, Record, Seat]]) -> Iterator[list[Part]]:
    """Parts that are stepped at a time, alike in kind: several seats or part of one. Those without state stay whole."""
    piece: list[Part] = []
    count = 0
    for group, record, seat in seats:
        length = seat.tensor.numel()
        cut = _PIECE if seat.state else max(length, 1)
        for low in range(0, max(length, 1), cut):
            part = Part(record, seat, group, low, min(low + cut, length))
            more = part.high - part.low
            if piece and (count + more > _PIECE or _kind(piece[0].seat) != _kind(seat)):
                yield piece
                piece, count = [], 0
            piece.append(part)
            count += more
    if piece:
        yield piece


def _kind(seat: Seat) -> tuple[torch.dtype, torch.device]:
    return seat.tensor.dtype, seat.tensor.device


def record_of(parameter: torch.Tensor) -> Record:
    record: Record = parameter.__dict__["_record"]
    return record


def records_of(model: nn.Module) -> list[Record]:
    """Those of the model's paged parameters, each once."""
    return list(dict.fromkeys(record_of(p) for p in _parameters_of(model) if isinstance(p, PagedTensor)))


def _parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """As `model.parameters()`, those that are tied more than once; makes no names, since each step asks for it."""
    found: list[nn.Parameter | None] = []
    modules: list[nn.Module | None] = [model]
    seen: set[nn.Module] = set()
    for module in modules:  # grows meanwhile
        if module is not None and module not in seen:
            seen.add(module)
            found.extend(module._parameters.values())
            modules.extend(module._modules.values())
    return [parameter for parameter in found if parameter is not None]
