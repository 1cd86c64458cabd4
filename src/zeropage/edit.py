"""Full values for code that wants them: `gather`, `full`, `local`, `resident`, `is_paged`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import IO, Any

import numpy as np
import torch
from torch import nn

from zeropage.errors import ConfigError
from zeropage.memory.host import allocate
from zeropage.memory.raw import bytes_of
from zeropage.page import Edits, Page
from zeropage.pager import Pager
from zeropage.tensor import PagedTensor
from zeropage.tensor.trees import plain

__all__ = ["full", "gather", "is_paged", "local", "resident"]


def is_paged(tensor: object) -> bool:
    """Whether `tensor` is a paged tensor (a sharded parameter, a view or a cast of one)."""
    return isinstance(tensor, PagedTensor)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A plain copy of the full values, without gradient; of any shape that `tensor` has."""
    return plain(tensor.detach()).clone()  # type: ignore[no-any-return]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's own flat slice (1-D), live: it changes with the parameter. Meant for reading.

    Raises:
        ConfigError: `tensor` is a view or a cast of a parameter, which has no slice of its own.
    """
    if not isinstance(tensor, PagedTensor):
        return tensor.detach().reshape(-1)
    page = tensor._node
    if not isinstance(page, Page):
        raise ConfigError(f"only a whole parameter has a local slice; this is a view or cast of {page.page.name!r}")
    return page.own().detach()


class gather(Edits):
    """Full values of `params` inside; what rank `writer` changes is kept, on all ranks, at bounded memory.

    Nothing is gathered at entry. A parameter is brought in when the body touches it, private to this
    rank; only one is held at a time. `writer`'s changes reach the owners when the next parameter is touched
    or at the end. Other ranks need not touch anything; their changes are dropped. They see each parameter
    either as it was or as the writer left it.

    Args:
        params: parameters in any iterable (also a mapping's values, a generator), one parameter, or a
            module. Plain tensors among them are left alone.
        writer: the rank whose changes are kept. None: writes inside are ordinary ones, made by all ranks.
        keep: only without `writer`: what was touched stays in memory until the end, beyond `resident_bytes`, so
            that many passes over the parameters (generation) bring each in once.

    Entering and leaving is done by all ranks together, also when the body raises.

    Raises:
        ConfigError: `writer` is not a rank of the group.
    """

    def __init__(self, params: object, writer: int | None = None, *, keep: bool = False) -> None:
        # in an order that all ranks share: a set of parameters has another one in every process
        self._pages = sorted(dict.fromkeys(_pages_of(params)), key=lambda page: (page.number, page.name))
        self._writer = writer
        self._keep = keep
        self._kept = ExitStack()
        if keep and writer is not None:
            raise ConfigError("keep=True cannot take effect with a writer, who holds one parameter at a time")
        self._current: tuple[Page, torch.Tensor] | None = None
        self._dirty = False
        self._edited: set[Page] = set()
        self._spill: dict[Page, int] = {}
        self._file: IO[bytes] | None = None
        for pager in self._pagers():
            if writer is not None and not 0 <= writer < pager.transport.world:
                raise ConfigError(f"writer={writer} is not one of the {pager.transport.world} ranks")

    def __enter__(self) -> gather:
        if self._keep:
            for pager in self._pagers():
                self._kept.enter_context(pager.keeping(page for page in self._pages if page.pager is pager))
        if self._writer is not None:
            self._refuse_other_writer()
            self._pages = [page for page in self._pages if page.edits is None]  # nested: the outer block keeps them
            for pager in self._pagers():
                pager.close_batch()
                if any(not page.written for page in self._pages if page.pager is pager):
                    pager.settle_draws()
            for page in self._pages:
                page.settle_casts()
                self._begin(page)
            for pager in self._pagers():
                # the writer may write where others read: they must have read what came before the block
                pager.before_writes()
                pager.transport.meet(f"gather of {len(self._pages)} parameters, edited by rank {self._writer}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kept.close()
        if self._writer is None:
            return
        self._flush()
        for page in self._pages:
            page.edits = None
            page.drop()
        try:
            for pager in self._pagers():
                self._publish(pager, [page for page in self._pages if page.pager is pager])
        finally:
            if self._file is not None:
                self._file.close()

    def _refuse_other_writer(self) -> None:
        """The outer block would drop what another rank writes inside."""
        for page in self._pages:
            outer = page.edits
            if isinstance(outer, gather) and outer._writer != self._writer:
                raise ConfigError(
                    f"{page.name!r} is edited by rank {outer._writer} in the block around this one, and rank "
                    f"{self._writer} is to edit it here; close the outer block first, or name the same rank"
                )

    def _pagers(self) -> list[Pager]:
        return list(dict.fromkeys(page.pager for page in self._pages))

    def _begin(self, page: Page) -> None:
        page.edits = self
        page.drop()

    # -- the body's view (called by the pager and by writes)

    def frame(self, page: Page) -> torch.Tensor | None:
        if not page.written and page not in self._edited:
            return None
        return self._load(page, values=True)

    def open(self, page: Page) -> torch.Tensor:
        memory = self._load(page, values=page.written or page in self._edited)
        self._dirty = True
        self._edited.add(page)
        return memory

    def close(self, page: Page, value: torch.Tensor) -> None:
        if self._current is None or self._current[0] is not page:  # another one was opened before it was written
            self._flush()
            self._current = (page, value)
        self._dirty = True

    def _load(self, page: Page, *, values: bool) -> torch.Tensor:
        if self._current is not None and self._current[0] is page:
            return self._current[1]
        self._flush()
        memory = allocate(page.layout.numel, page.dtype, page.spec.device)
        with torch.no_grad():
            if page in self._spill:
                assert self._file is not None
                self._file.seek(self._spill[page])
                values_here = memory.cpu()  # on a device a copy
                self._file.readinto(bytes_of(values_here))  # type: ignore[attr-defined]
                memory.copy_(values_here)
            elif values:
                with page.pager.transport.exclusive(page.store):
                    page.fill(memory, None)
        self._current = (page, memory)
        return memory

    def _flush(self) -> None:
        """Let go of the parameter in hand; the writer's changes are passed on."""
        if self._current is None:
            return
        page, memory = self._current
        dirty, self._current, self._dirty = self._dirty, None, False
        page.drop()
        transport = page.pager.transport
        if not dirty or transport.rank != self._writer:
            return
        with torch.no_grad():
            if page.store.whole is not None:
                with transport.exclusive(page.store):
                    page.store.whole.copy_(memory)
            else:
                self._spill_out(page, memory)

    def _spill_out(self, page: Page, memory: torch.Tensor) -> None:
        """Other ranks cannot be reached before the end of the block: the values wait on disk."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="zeropage-")  # noqa: SIM115  (closed at the end of the block)
        if page not in self._spill:
            self._spill[page] = self._file.seek(0, 2)
        self._file.seek(self._spill[page])
        self._file.write(bytes_of(memory.cpu()))

    def _publish(self, pager: Pager, pages: list[Page]) -> None:
        transport = pager.transport
        marks = np.packbits([page in self._edited for page in pages]).tobytes()
        answers = transport.open_writes(f"end of gather of {len(pages)} parameters by rank {self._writer}", marks)
        transport.close_writes()
        assert self._writer is not None
        edits = np.unpackbits(np.frombuffer(answers[self._writer], dtype=np.uint8), count=len(pages))
        for page, edited in zip(pages, edits, strict=True):
            if not edited:
                continue
            if page.store.whole is None:
                memory = None
                if transport.rank == self._writer:
                    memory = self._load(page, values=False)
                    self._current = None
                with torch.no_grad():
                    transport.scatter(page.store, memory, self._writer)
            page.changed()


def _pages_of(params: object) -> Iterator[Page]:
    if isinstance(params, nn.Module):
        params = params.parameters()
    elif isinstance(params, Mapping):
        params = params.values()
    elif isinstance(params, torch.Tensor):
        params = [params]
    if not isinstance(params, Iterable):
        raise ConfigError(f"gather takes parameters, not {type(params).__name__}")
    for parameter in params:
        if isinstance(parameter, PagedTensor):
            yield parameter._node.page
        elif not isinstance(parameter, torch.Tensor):
            raise ConfigError(f"gather takes parameters, not {type(parameter).__name__}")


@contextmanager
def resident(module: nn.Module) -> Iterator[nn.Module]:
    """Plain full parameters in `module` inside, for kernels that take raw pointers, or a compiled region.

    Gradients still go to the sharded parameters. Changes made to the plain ones are lost. All parameters of
    `module` are in memory at once, outside the budget.
    """
    places: list[tuple[nn.Module, str, PagedTensor]] = []
    standing: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in list(child._parameters.items()):
            if parameter is not None and isinstance(parameter, PagedTensor):
                places.append((child, name, parameter))
                if id(parameter) not in standing:
                    standing[id(parameter)] = _plain_parameter(parameter)
                child._parameters[name] = standing[id(parameter)]
    try:
        yield module
    finally:
        for child, name, original in places:
            child._parameters[name] = original  # type: ignore[assignment]  # torch takes it for a Parameter


def _plain_parameter(parameter: PagedTensor) -> nn.Parameter:
    made = nn.Parameter(full(parameter), requires_grad=parameter.requires_grad)
    record = parameter.__dict__["_record"]
    if made.requires_grad:
        made.register_post_accumulate_grad_hook(lambda stand_in: _forward_gradient(record, stand_in))
    return made


def _forward_gradient(record: Any, stand_in: torch.Tensor) -> None:
    gradient, stand_in.grad = stand_in.grad, None
    if gradient is not None:
        record.contribute(gradient)
