"""Pages and the nodes that views of them hang on.

A *page* is the storage of a parameter: its layout, its store, who has written it. A *node* is what a paged
tensor points at: the page itself (a root), a view of it, or a cast of it. Nodes hold no memory of their
own, only `live`: the plain tensor that operators get while the page is resident. The one rule: `live` is
either None or true at this moment, and whoever evicts or writes a page drops every `live` below its root.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import torch

from zeropage.errors import StaleValueError
from zeropage.layout import Box, Layout, boxes

if TYPE_CHECKING:
    from zeropage.memory.host import Store
    from zeropage.pager import Pager
    from zeropage.step_scope import StepScope

__all__ = ["CastNode", "Edits", "Node", "Page", "Residency", "Spec", "ViewNode"]

Make = Callable[[torch.Tensor], torch.Tensor]

_MAX_KIDS = 512


class Residency(Enum):
    """Where the values of a page are."""

    UNWRITTEN = "unwritten"  # nowhere: made on the meta device and not written yet
    SHARDED = "sharded"  # in the owners' slices only
    RESIDENT = "resident"  # also in a frame of this rank


class Spec(NamedTuple):
    """Metadata of a tensor, in the order in which `_make_wrapper_subclass` takes them."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    memory_format: None
    dtype: torch.dtype
    layout: torch.layout
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor, device: torch.device | None = None) -> Spec:
        return Spec(
            tensor.shape, tensor.stride(), int(tensor.storage_offset()), None,
            tensor.dtype, torch.strided, tensor.device if device is None else device,
        )  # fmt: skip

    def meta(self) -> torch.Tensor:
        """A tensor with this metadata and no memory."""
        extent = 1 + self.offset
        if 0 in self.shape:
            extent = self.offset
        else:
            extent += sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        base = torch.empty(extent, dtype=self.dtype, device="meta")
        return base.as_strided(self.shape, self.stride, self.offset)


class Node:
    """What a paged tensor points at. See `Page`, `ViewNode` and `CastNode`.

    `in_order` says that the node runs over the whole page in flat order, so that an elementwise operator
    on it may work on a slice alone; `in_place`, that its values always lie at one place of this rank's memory.
    """

    __slots__ = ("__weakref__", "closed", "in_order", "in_place", "kids", "live", "scope", "spec")

    page: Page

    def __init__(self, spec: Spec, scope: StepScope, *, in_order: bool = False) -> None:
        self.spec = spec
        self.scope = scope  # while an optimizer's step may be running, `live` is asked for through `value`
        self.in_order = in_order
        self.in_place = False
        self.live: torch.Tensor | None = None
        self.kids: dict[Hashable, Node | tuple[Node, ...]] = {}
        self.closed = False

    @property
    def root(self) -> Page | CastNode:
        """The page or the cast that this node is a view of, or is."""
        raise NotImplementedError

    def fault(self) -> torch.Tensor:
        """The plain tensor behind this node, making the page resident if it is not."""
        raise NotImplementedError

    def value(self) -> torch.Tensor:
        """The plain tensor behind this node, at any time."""
        if self.scope.entered:
            self.page.pager.prepare_read_in_step()
        live = self.live
        return self.fault() if live is None else live

    def apply(self, whole: torch.Tensor) -> torch.Tensor:
        """This node's view of `whole`, a plain tensor that stands for the root."""
        return whole

    def keep(self, key: Hashable, kid: Node | tuple[Node, ...]) -> None:
        """Remember `kid` for the next time that the same view is taken.

        [Note: closed nodes] Views beyond a bound, and those of a parameter that is gone, are not remembered.
        Nobody could drop their `live` then, so they are closed: they have none, and ask their parent each time.
        """
        if self.closed or len(self.kids) >= _MAX_KIDS:
            for node in kid if isinstance(kid, tuple) else (kid,):
                node.closed = True
        else:
            self.kids[key] = kid

    def drop(self, *, close: bool = False) -> None:
        """Forget every `live` from here down; `close` also cuts the links between parents and kids for good."""
        if not self.kids and not close:  # the usual case
            self.live = None
            return
        waiting: list[Node] = [self]
        while waiting:
            node = waiting.pop()
            node.live = None
            for kid in node.kids.values():
                if isinstance(kid, tuple):
                    waiting += kid
                else:
                    waiting.append(kid)
            if close:
                node.closed = True
                node.kids.clear()


class ViewNode(Node):
    """A view: `make` applied to what `parent` gives. Alive as long as the storage, like any view."""

    __slots__ = ("_seen", "make", "page", "parent")

    def __init__(self, parent: Node, spec: Spec, make: Make, *, in_order: bool = False) -> None:
        super().__init__(spec, parent.scope, in_order=in_order)
        self.page = parent.page
        self.parent = parent
        self.make = make
        self.in_place = parent.in_place
        self._seen: tuple[torch.Tensor, torch.Tensor] | None = None  # what `make` gave, and of what

    @property
    def root(self) -> Page | CastNode:
        return self.parent.root

    def fault(self) -> torch.Tensor:
        live = self.parent.live
        if live is None:
            live = self.parent.fault()
        if self._seen is not None and self._seen[0] is live:
            value = self._seen[1]
        else:
            value = self.make(live)
            if self.in_place and not self.closed:
                self._seen = live, value
        if not self.closed:
            self.live = value
        return value

    def apply(self, whole: torch.Tensor) -> torch.Tensor:
        return self.make(self.parent.apply(whole))


class CastNode(Node):
    """A cast: a copy in meaning, made when it is first needed.

    It is a root for the views taken from it. When the page is written by the user its value is made first;
    when the engine's step writes the page, using it afterwards raises, as torch does for a saved tensor
    that was modified.
    """

    __slots__ = ("convert", "kept", "page", "source", "version")

    def __init__(self, source: Node, spec: Spec, convert: Make) -> None:
        super().__init__(spec, source.scope)
        self.page = source.page
        self.source: Node | None = source
        self.convert = convert
        self.version = source.page.version
        self.kept = False  # the value cannot be made again: it must stay
        self.page.casts.add(self)

    @property
    def root(self) -> CastNode:
        return self

    def fault(self) -> torch.Tensor:
        if self.live is None:
            if self.source is None or self.version != self.page.version:
                raise StaleValueError(
                    f"a {self.spec.dtype} copy of {self.page.name!r} was taken before an optimizer step and is "
                    "used after it; the values that it stood for are gone. Take the copy again (or .clone() it "
                    "before the step); in a backward pass, run the forward pass again."
                )
            live = self.source.live
            value = self.convert(self.source.fault() if live is None else live)
            self.page.pager.hold(self, value)
            self.live = value
        return self.live

    def settle(self) -> None:
        """Make the value now and keep it: the page is about to change."""
        self.fault()
        self.kept = True
        self.source = None
        self.page.pager.release(self)


class Page(Node):
    """The storage of a parameter (or of a gradient, or of an optimizer state)."""

    __slots__ = (
        "_mapped",
        "casts",
        "edits",
        "layout",
        "name",
        "number",
        "pager",
        "physical_order",
        "row_major",
        "store",
        "users",
        "version",
        "written",
    )

    def __init__(self, name: str, spec: Spec, layout: Layout, store: Store, pager: Pager, number: int) -> None:
        super().__init__(spec, pager.step, in_order=True)
        self.name = name
        self.layout = layout
        self.physical_order = _physical_order(spec)
        self.row_major = self.physical_order == sorted(self.physical_order)
        self.store = store
        self.in_place = not self.framed
        self._mapped: torch.Tensor | None = None
        self.pager = pager
        self.number = number  # what the trace knows it by
        self.version = 0
        self.written = True
        self.users = 0  # parameters that stand for this page
        self.casts: weakref.WeakSet[CastNode] = weakref.WeakSet()
        self.edits: Edits | None = None

    @property
    def page(self) -> Page:  # type: ignore[override]
        return self

    @property
    def root(self) -> Page:
        return self

    def fault(self) -> torch.Tensor:
        value = self.pager.fault(self)
        if not self.closed:
            self.live = value
        return value

    @property
    def dtype(self) -> torch.dtype:
        return self.spec.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole page."""
        return self.layout.numel * self.dtype.itemsize

    @property
    def residency(self) -> Residency:
        if not self.written:
            return Residency.UNWRITTEN
        return Residency.SHARDED if self.live is None else Residency.RESIDENT

    @property
    def bounds(self) -> tuple[int, int]:
        """The half-open range of flat elements that this rank owns."""
        return self.layout.bounds(self.pager.transport.rank)

    def own(self) -> torch.Tensor:
        """This rank's slice (1-D), current, and writable inside a write batch."""
        return self.store.shard

    @property
    def framed(self) -> bool:
        """Whether reading it needs a frame (otherwise this rank can address the whole page in place)."""
        return self.store.whole is None

    def mapped(self) -> torch.Tensor:
        """The full value where this rank can address it, with its shape and strides."""
        if self._mapped is None:
            assert self.store.whole is not None
            with torch.inference_mode(False), torch.no_grad():
                self._mapped = self.shaped(self.store.whole)
        return self._mapped

    def fill(self, frame: torch.Tensor, in_step: str | None) -> None:
        """Bring the full content into `frame` (1-D)."""
        transport = self.pager.transport
        if in_step is not None:
            transport.gather_in_step(self.store, frame, in_step)
        else:
            transport.gather([(self.store, frame)])

    def replace(self, value: torch.Tensor) -> bool:
        """Take `value` in place of another page being made for it; False where a new page is the right thing."""
        return False

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """The flat run (1-D) seen with the page's shape and strides."""
        return flat.as_strided(self.spec.shape, self.spec.stride, flat.storage_offset())

    def flat(self, full: torch.Tensor) -> torch.Tensor:
        """A tensor that broadcasts to the page's shape, as 1-D in the page's flat order (a view if it can be)."""
        if full.shape != self.spec.shape:
            full = full.expand(self.spec.shape)
        return full.reshape(-1) if self.row_major else full.permute(self.physical_order).reshape(-1)

    def slice_of(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor that broadcasts to the page's shape (1-D)."""
        low, high = self.bounds
        return self.flat(full)[low:high]

    def boxes(self) -> list[tuple[Box, torch.Tensor]]:
        """This rank's slice as boxes of the full tensor, each with the values in it (views of the shard)."""
        order = self.physical_order
        back = [order.index(d) for d in range(len(order))]
        found, start, own = [], 0, self.own()
        for box in boxes([self.spec.shape[d] for d in order], *self.bounds):
            part = own[start : start + box.numel].view(box.size).permute(back)
            start += box.numel
            found.append((Box(tuple(box.offset[d] for d in back), tuple(box.size[d] for d in back)), part))
        return found

    def settle_casts(self) -> None:
        for cast in list(self.casts):
            if cast.source is not None and cast.version == self.version:
                cast.settle()

    def changed(self) -> None:
        """The page has been written: whatever was seen of it is out of date."""
        self.version += 1
        self.written = True
        pager = self.pager
        if pager.addresses.used:
            pager.addresses.outdated(self)
        pager.evict(self)

    def enter(self) -> None:
        """A parameter stands for this page."""
        self.users += 1
        self.pager.parameters += 1

    def leave(self) -> None:
        """A parameter has stopped to stand for this page."""
        self.users -= 1
        if self.users == 0:
            self.pager.evict(self)
            self.drop(close=True)
        self.pager.parameter_left()


def _physical_order(spec: Spec) -> list[int]:
    """The dimensions from the one with the largest stride to the smallest."""
    return sorted(range(len(spec.shape)), key=lambda d: (-spec.stride[d], spec.shape[d] == 1, d))


class Edits:
    """What a `gather` block does with the writes of one rank; see `edit.gather`."""

    __slots__ = ()

    def frame(self, page: Page) -> torch.Tensor | None:
        """The private full value of `page` if this rank has edited it (flat), else None."""
        raise NotImplementedError

    def open(self, page: Page) -> torch.Tensor:
        """A private full value that this rank may write (flat)."""
        raise NotImplementedError

    def close(self, page: Page, value: torch.Tensor) -> None:
        """What `open` gave has been written."""
        raise NotImplementedError
