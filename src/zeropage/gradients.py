"""Gradients: taken as autograd makes them, added into the owners' sums, seen through `p.grad`.

A *record* is the identity of a parameter, as a page is its storage: it survives `p.data = t`. Autograd's own
`.grad` slot never keeps anything: a hook takes each full gradient at once and gives every owner its slice.
The rule: a record and its hook hold pages, never the parameter, so a dropped model is freed at once.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

import torch

from zeropage.config import Config
from zeropage.errors import GradientError
from zeropage.page import Page, Spec
from zeropage.pager import Pager
from zeropage.steps import over_slice
from zeropage.tensor import Life, PagedTensor, differentiable, new_page_of, over
from zeropage.tensor.agreement import agreed
from zeropage.tensor.slices import same_cut
from zeropage.tensor.trees import plain
from zeropage.transport import Accumulator

__all__ = ["DTYPES", "GradientPage", "Gradients", "Record", "sum_dtype"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # by the names that a config uses
_real_grad: Any = torch.Tensor.grad  # the slot that autograd itself fills


def sum_dtype(dtype: torch.dtype, config: Config) -> torch.dtype:
    """The dtype in which gradients of `dtype` are summed: never narrower than the gradients' own."""
    wanted = DTYPES[config.reduce_dtype]
    return dtype if dtype.is_complex or dtype.itemsize > wanted.itemsize else wanted


class GradientPage(Page):
    """The reduced gradient of one parameter as a page of the parameter's dtype.

    Where the sum has another dtype (fp32 for a 16-bit parameter) the page is a rounded copy, made when an
    operator works on the slices. A write to it goes into the sum as well. A page belongs to one epoch: one that
    was held over `grad = None` answers for its own epoch, or raises.
    """

    __slots__ = ("accumulator", "epoch", "rounded")

    def __init__(self, name: str, spec: Spec, accumulator: Accumulator, epoch: int, pager: Pager, number: int) -> None:
        super().__init__(name, spec, accumulator.store.layout, accumulator.store, pager, number)
        self.accumulator = accumulator
        self.epoch = epoch
        self.rounded: torch.Tensor | None = None

    @property
    def framed(self) -> bool:
        return True  # a sum may be overtaken while it is read: read a copy, then check

    @property
    def rounds(self) -> bool:
        """Whether the sum has another dtype than the page."""
        return self.accumulator.store.dtype != self.dtype

    def own(self) -> torch.Tensor:
        if not self.rounds:
            return self.accumulator.own(self.epoch)
        if self.rounded is None:
            self.rounded = self.accumulator.own(self.epoch).to(self.dtype)
        return self.rounded

    def changed(self) -> None:
        """Somebody wrote to the gradient: the sum follows the rounded copy."""
        if self.rounded is not None:
            self.accumulator.own(self.epoch).copy_(self.rounded)
        super().changed()

    def fill(self, frame: torch.Tensor, in_step: str | None) -> None:
        store, transport = self.store, self.pager.transport
        into = frame if store.dtype == frame.dtype else torch.empty_like(frame, dtype=store.dtype)
        if in_step is not None:
            transport.gather_in_step(store, into, in_step)
        else:
            transport.gather([(store, into)])
        self.accumulator.check(self.epoch)
        if into is not frame:
            frame.copy_(into)

    def replace(self, value: torch.Tensor) -> bool:
        """`p.grad.data = value`: take the values, stay the gradient."""
        with torch.no_grad():
            part = self.slice_of(plain(value.detach()))
            with agreed([self], f"assign {self.name}", [value]):
                self.accumulator.own(self.epoch).copy_(part)
                self.rounded = None
        return True

    def grown(self) -> None:
        """More may have been added to the sum: copies of what it was cannot be made any more."""
        self.rounded = None
        self.version += 1
        self.pager.addresses.outdated(self)
        self.pager.evict(self)


class Record:
    """What zeropage knows of one parameter: its page, its gradient, and which backward they belong to."""

    __slots__ = (
        "__weakref__", "_contributed", "_face", "_gradients", "_seen", "accumulator", "gradient_page", "page",
        "stepped_by",
    )  # fmt: skip

    def __init__(self, page: Page, gradients: Gradients) -> None:
        self.page = page
        self._gradients = gradients
        self._contributed = False
        self.stepped_by: weakref.ref[Any] | None = None  # the engine's optimizer that steps the parameter
        self.accumulator: Accumulator | None = None
        self.gradient_page: GradientPage | None = None
        self._face: PagedTensor | None = None
        self._seen = False  # whether anybody may hold the present gradient
        self._renew()

    @property
    def name(self) -> str:
        return self.page.name

    @property
    def pager(self) -> Pager:
        return self._gradients.pager

    def _renew(self) -> None:
        """Make the accumulator that fits the page (collective)."""
        self.accumulator, self.gradient_page, self._face = None, None, None
        if not differentiable(self.page.dtype):
            return
        page, summed = self.page, sum_dtype(self.page.dtype, self.pager.config)
        self.accumulator = self.pager.transport.accumulator(self.name, page.layout, summed, page.spec.device)
        self._show(self.accumulator, epoch=0)

    def _show(self, accumulator: Accumulator, epoch: int) -> GradientPage:
        """Let `p.grad` be a new page, of this epoch."""
        name, spec, pager = f"{self.name}.grad", self.page.spec, self.pager
        page = pager.register(lambda number: GradientPage(name, spec, accumulator, epoch, pager, number))
        self.gradient_page = page
        self._face = over(page)
        self._seen = False
        return page

    def _next_epoch(self) -> GradientPage:
        """Begin the next gradient. One that somebody may hold stays what it was."""
        page, accumulator = self.gradient_page, self.accumulator
        assert page is not None and accumulator is not None
        self.pager.gradients_dropped += 1
        self._gradients.nonfinite.pop(self, None)
        if self._seen:
            page.settle_casts()
            return self._show(accumulator, page.epoch + 1)
        page.epoch += 1
        return page

    def repoint(self, page: Page) -> None:
        """The parameter stands for another page from now on; a gradient of the same shape stays."""
        old, self.page = self.page, page
        if (old.spec, old.layout) == (page.spec, page.layout):
            return
        kept = self._cut_for(page, old) if self.has_gradient() and old.spec.shape == page.spec.shape else None
        self._renew()
        if kept is not None and self.accumulator is not None and self.gradient_page is not None:
            self.accumulator.mark(self.gradient_page.epoch)
            self.accumulator.own(self.gradient_page.epoch).copy_(kept)

    def _cut_for(self, page: Page, old: Page) -> torch.Tensor:
        """This rank's slice of the gradient, which is cut like `old`, cut like `page` (collective if they differ)."""
        own = self.own_gradient()
        return own.clone() if same_cut(old, page) else page.slice_of(plain(over_slice(own, old, self.name))).clone()

    def take(self, parameter: torch.Tensor) -> None:
        """Autograd has accumulated a gradient in `parameter`: give it to the owners (the hook)."""
        gradient = _real_grad.__get__(parameter)
        if gradient is None:  # a custom Function may return None
            return
        _real_grad.__set__(parameter, None)
        self.contribute(gradient)

    def contribute(self, gradient: torch.Tensor) -> None:
        """Add a full gradient of this rank: averaged over ranks, summed over calls."""
        accumulator, page = self.accumulator, self.gradient_page
        assert accumulator is not None and page is not None
        self._contributed = True
        self._gradients.begin_backward()
        if gradient.requires_grad:
            gradient = gradient.detach()
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        if isinstance(gradient, PagedTensor):
            gradient = plain(gradient)
        self._gradients.inspect(self, gradient)
        scale = self._gradients.weight(self) / self.pager.transport.world
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            with torch.no_grad(), torch.inference_mode(False):
                accumulator.add(self.page.flat(gradient), scale, page.epoch)
        else:  # the usual case: a hook of a backward
            accumulator.add(self.page.flat(gradient), scale, page.epoch)
        if self._seen:
            page.grown()

    # -- p.grad

    def gradient(self) -> PagedTensor | None:
        if self.accumulator is None:
            return None
        self._gradients.settle(self.name)
        if not self.has_gradient():
            return None
        if not self._seen and self.gradient_page is not None:
            self._seen = True
            self._gradients.shown.add(self.gradient_page)
        return self._face

    def assign_gradient(self, value: torch.Tensor | None) -> None:
        accumulator, page = self.accumulator, self.gradient_page
        if accumulator is None or page is None:
            if value is not None:
                raise GradientError(f"{self.name!r} has dtype {self.page.dtype}, which has no gradient")
            return
        if value is self._face:
            return
        if value is not None and value.shape != page.spec.shape:
            raise GradientError(
                f"the gradient given to {self.name!r} has shape {tuple(value.shape)}, it must be "
                f"{tuple(page.spec.shape)}"
            )
        self._gradients.unsettle()
        if value is None:
            self._next_epoch()
            return
        value = value.to_dense() if value.layout != torch.strided else value
        with torch.no_grad():
            part = page.slice_of(plain(value.detach()))
            with agreed([page], f"assign the gradient of {self.name}", [value]):
                epoch = self._next_epoch().epoch
                accumulator.mark(epoch)
                accumulator.own(epoch).copy_(part)

    # -- the engine's own paths

    @property
    def gradient_bytes(self) -> int:
        """Bytes that the own slice of the sum has taken so far."""
        return self.accumulator.store.nbytes if self.accumulator is not None and self._contributed else 0

    def has_gradient(self) -> bool:
        """Whether any rank contributed. To be asked after all ranks have met."""
        return (
            self.accumulator is not None
            and self.gradient_page is not None
            and self.accumulator.present(self.gradient_page.epoch)
        )

    def own_gradient(self) -> torch.Tensor:
        """This rank's slice of the gradient (1-D), in the precision of the sum."""
        assert self.accumulator is not None and self.gradient_page is not None
        return self.accumulator.own(self.gradient_page.epoch)

    def drop_gradient(self) -> None:
        """Begin the next epoch (like `grad = None`), on all ranks at the same point."""
        if self.gradient_page is not None:
            self._next_epoch()
            self._gradients.unsettle()

    def release(self) -> None:
        """Drop the gradient and give back its memory, until the next one comes."""
        self.drop_gradient()
        if self.accumulator is not None:
            self.accumulator.release()


class Gradients:
    """The gradients of all parameters of one pager: adoption, backwards, and when sums are complete."""

    def __init__(self, pager: Pager) -> None:
        self.pager = pager
        self.shown: weakref.WeakSet[GradientPage] = weakref.WeakSet()  # those that somebody may hold
        self._settled = False
        self._task = -1
        self._outermost: FrameType | None = None
        self.skipping: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers of engines that may skip a step
        self._outside_factor: float | None = 1.0  # the same for a backward that nobody has announced
        self._factor: float | None = 1.0  # times gradients of the present backward
        self._loss_scale = 1.0  # what its loss was scaled by, as far as an engine has said
        self.backwards = 0  # backward passes that brought gradients, since the engine's last step
        # whose gradient was not finite in this rank's backwards, in the order of appearance
        self.nonfinite: weakref.WeakKeyDictionary[Record, None] = weakref.WeakKeyDictionary()
        pager.adopt = self.adopt
        pager.sums_complete = self.refresh

    def adopt(self, parameter: torch.Tensor) -> None:
        """A new parameter stands for a page: give it a record and hook it (collective)."""
        assert isinstance(parameter, PagedTensor)
        if "_record" in parameter.__dict__:
            return
        page = parameter._node
        if not isinstance(page, Page):
            page = self._page_of_view(parameter)
        record = Record(page, self)
        parameter.__dict__["_record"] = record
        parameter.__dict__["_life"] = Life(page)
        if record.accumulator is not None:
            # torch hooks no tensor without gradient, but a frozen parameter may be unfrozen later
            needed = parameter.requires_grad
            parameter.requires_grad_(True)
            parameter.register_post_accumulate_grad_hook(record.take)
            parameter.requires_grad_(needed)

    def _page_of_view(self, parameter: PagedTensor) -> Page:
        """A parameter made from a view or a cast is a parameter of its own, with its own storage."""
        node = parameter._node
        page = new_page_of(plain(parameter.detach()), self.pager, f"a part of {node.page.name}")
        if page.spec != node.spec:
            made = over(page, parameter.requires_grad)
            torch.Tensor.data.__set__(parameter, made)  # type: ignore[attr-defined]
        parameter._node = page
        return page

    def begin_backward(self) -> None:
        """A gradient has come: note the backward that it belongs to.

        [Note: re-entrant backward] Old-style activation checkpointing runs backwards inside backwards, each
        with callbacks of its own. Only the end of the outermost one is the end.
        """
        self._settled = False
        task = torch._C._current_graph_task_id()
        if task == self._task and task != -1:
            return
        self._task = task
        depth, outermost = _backwards_on_stack()
        if self._outermost is not None and self._outermost is not outermost:
            self.end_backward()  # the last one ended in an exception: its callback never came
            self._task = task
        self._outermost = outermost
        self.pager.close_batch()  # a closure may run backward inside a step: see [Note: closures]
        self.backwards += 1
        nested = task != -1 and depth > 1
        self.pager.transport.begin_backward(reentrant=nested)
        if task != -1 and not nested:
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def expect(self, factor: float, *, loss_scale: float) -> None:
        """A backward begins of a loss times `loss_scale`; its gradients are to be multiplied by `factor`."""
        _, outermost = _backwards_on_stack()
        if self._outermost is not None and self._outermost is not outermost:
            self.end_backward()  # the last one ended in an exception
        self._factor, self._loss_scale = factor, loss_scale

    def weigh_others(self, factor: float | None) -> None:
        """Multiply gradients of backwards that nobody has announced by `factor`; None refuses them."""
        self._outside_factor = self._factor = factor

    def weight(self, record: Record) -> float:
        """What a gradient of the present backward is multiplied by.

        Raises:
            GradientError: the loss was not scaled as the engine that steps the parameter takes it to be.
        """
        if self._factor is None:
            raise GradientError(
                f"a gradient of {record.name!r} came from a loss that was not scaled, as fp16 needs it: write "
                "engine.backward(loss), or engine.scale(loss).backward()"
            )
        stepped_by = None if record.stepped_by is None else record.stepped_by()
        if stepped_by is not None and stepped_by.loss_scale != self._loss_scale:
            raise GradientError(
                f"a gradient of {record.name!r} came from a loss scaled by {self._loss_scale:g}, and the engine "
                f"that steps it takes gradients scaled by {stepped_by.loss_scale:g}. Call backward() of that engine; "
                "for one loss of several engines train in bf16, or give all of them one fixed loss scale."
            )
        return self._factor

    def inspect(self, record: Record, gradient: torch.Tensor) -> None:
        """Note which gradients of this rank are not finite, and in which order: sums do not tell who brought it."""
        if self.skipping and record not in self.nonfinite and not _is_finite(gradient):
            self.nonfinite[record] = None

    def end_backward(self) -> None:
        self._task = -1
        self._outermost = None
        self._factor, self._loss_scale = self._outside_factor, 1.0
        self.pager.transport.end_backward()

    def refresh(self) -> None:
        """All ranks have added what they had: nothing that was seen of any sum before holds now."""
        for page in self.shown:
            page.grown()

    def forget_backwards(self) -> None:
        """An engine has stepped: the backwards so far belong to the past."""
        self.backwards = 0

    def settle(self, name: str) -> None:
        """Wait until the sums are complete."""
        if self._settled:
            return
        if self.pager.step.active():
            self.pager.open_batch(self.pager.step.intent)  # all ranks meet there, if they have not yet
            return
        if torch._C._current_graph_task_id() != -1:
            raise GradientError(
                f"the gradient of {name!r} was asked for inside a backward pass, where it is not reduced yet. Read it "
                "after backward, or use a tensor hook (p.register_hook) for this rank's own part."
            )
        self.pager.transport.await_gradients()
        self.refresh()
        self._settled = True

    def unsettle(self) -> None:
        self._settled = False


def _backwards_on_stack() -> tuple[int, FrameType | None]:
    """How many backward passes this thread is in, and the frame of the outermost."""
    found, outermost = 0, None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_engine_run_backward":
            found += 1
            outermost = frame
        frame = frame.f_back
    return found, outermost


def _is_finite(gradient: torch.Tensor) -> bool:
    wide = torch.float32 if gradient.dtype.itemsize == 2 else None  # a sum in 16 bits may overflow by itself
    return bool(torch.isfinite(gradient.sum(dtype=wide)))
