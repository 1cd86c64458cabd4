"""What an elementwise optimizer works on in place of a parameter."""

from __future__ import annotations

from dataclasses import dataclass
from operator import is_
from typing import Any

import torch

from zeropage.gradients import Record
from zeropage.page import Page
from zeropage.pieces import is_cut_like

__all__ = ["Part", "Seat"]


@dataclass(slots=True, eq=False)
class Seat:
    """This rank's slices of a parameter and of its state, kept until somebody changes what they were made from."""

    page: Page
    master: object  # None: the parameter is stepped itself
    tensor: torch.Tensor  # this rank's slice of the parameter or of its master (1-D)
    outer: dict[str, Any]  # the parameter's state as the user sees it
    known: list[Any]  # the values in it
    pages: list[Page | None]  # of those that are paged
    state: dict[str, Any]  # the same as the step sees it

    def fits(self, page: Page, master: object, outer: dict[str, Any] | None) -> bool:
        if self.page is not page or self.master is not master or self.outer is not outer:
            return False
        return (
            len(outer) == len(self.known)
            and all(map(is_, outer.values(), self.known))
            and all(page is None or value._node is page for value, page in zip(self.known, self.pages, strict=True))
        )

    def stepped(self) -> bool:
        """Tell the pages of the state that they have changed; False if the step has made other tensors."""
        if len(self.state) != len(self.known):
            return False
        for value, page, known in zip(self.state.values(), self.pages, self.known, strict=True):
            if page is None:
                if value is not known:
                    return False
            elif page.own() is value:
                page.changed()  # somebody may have read it before the step
            else:
                return False
        return True


@dataclass(slots=True, eq=False)
class Part:
    """The elements `[low, high)` of a seat, which are stepped at a time."""

    record: Record
    seat: Seat
    group: int  # the number of the parameter's group
    low: int
    high: int

    @property
    def whole(self) -> bool:
        return self.low == 0 and self.high == self.seat.tensor.numel()

    def tensor(self) -> torch.Tensor:
        return self.seat.tensor if self.whole else self.seat.tensor[self.low : self.high]

    def state(self) -> dict[str, Any]:
        """As the step sees it. Every part begins with the same numbers, and the last one's are kept."""
        if self.whole:
            return self.seat.state
        last = self.high == self.seat.tensor.numel()
        return {key: self._part_of(value, last) for key, value in self.seat.state.items()}

    def _part_of(self, value: Any, last: bool) -> Any:
        if is_cut_like(value, self.seat.tensor):
            return value[self.low : self.high]
        return value.clone() if isinstance(value, torch.Tensor) and not last else value
