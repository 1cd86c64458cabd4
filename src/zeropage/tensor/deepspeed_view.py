"""What programs written for DeepSpeed ask of a parameter: its `ds_*` attributes, as views of what is there anyway.

Nothing is kept for them. Shapes are logical, also of a parameter that is sharded at the moment.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch
from torch import nn

from zeropage.page import Node, Residency
from zeropage.tensor import identity
from zeropage.tensor.base import Paged

__all__ = ["DeepSpeedView", "Gathered", "ZeroParamStatus", "ZeroParamType"]


class ZeroParamStatus(Enum):
    """Where the full values of a parameter are."""

    AVAILABLE = 1  # in memory of this rank
    NOT_AVAILABLE = 2  # in slices; whoever touches the parameter brings them in
    INFLIGHT = 3  # on the way: never so here, since an operator waits for what it touches


class ZeroParamType(Enum):
    """How a parameter is kept; all are `PARTITIONED` here."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class Gathered:
    """What `all_gather(async_op=True)` gives: nothing is left to wait for."""

    def wait(self, **options: Any) -> None:
        """Return at once."""


class DeepSpeedView:
    """The DeepSpeed-facing attributes of a `PagedTensor`."""

    _node: Node

    @property
    def ds_id(self) -> int:
        """A number of its own among the parameters that were sharded together; the same on all ranks."""
        return self._node.page.number

    @property
    def ds_shape(self) -> torch.Size:
        return self._node.spec.shape

    @property
    def ds_numel(self) -> int:
        return self._node.spec.shape.numel()

    @property
    def ds_tensor(self) -> torch.Tensor:
        """This rank's slice (1-D), live, for reading. It has no padding, so ranks may have different lengths."""
        page = self._node.page
        own: Any = page.own().detach()
        own.ds_numel = own.numel()
        own.status = self.ds_status
        own.final_location = None
        return own  # type: ignore[no-any-return]

    @property
    def ds_status(self) -> ZeroParamStatus:
        resident = self._node.page.residency is Residency.RESIDENT
        return ZeroParamStatus.AVAILABLE if resident else ZeroParamStatus.NOT_AVAILABLE

    @property
    def ds_persist(self) -> bool:
        """False: which parameters stay gathered is decided from one touch to the next."""
        return False

    @property
    def ds_process_group(self) -> Any:
        """The `torch.distributed` group that the parameter is cut over; None for one process by itself."""
        space: Any = self._node.page.pager.space
        return None if space is None else space.group.handle

    @property
    def ds_active_sub_modules(self) -> set[int]:
        """Empty: no module has to be inside its forward for a parameter to be there."""
        return set()

    @property
    def is_external_param(self) -> bool:
        """False: any module may use any parameter."""
        return False

    def ds_summary(self, slice_shape: Any = None, use_debug_name: bool = False) -> dict[str, Any]:
        """The attributes in one dict, for logs."""
        return {
            "id": self._node.page.name if use_debug_name else self.ds_id,
            "status": self.ds_status.name,
            "numel": self.ds_numel,
            "ds_numel": self.ds_numel,
            "shape": tuple(self.ds_shape),
            "ds_shape": tuple(self.ds_shape),
            "requires_grad": self.requires_grad,  # type: ignore[attr-defined]
            "grad_shape": None,
            "persist": self.ds_persist,
            "active_sub_modules": self.ds_active_sub_modules,
            "ds_tensor.shape": self.ds_tensor.shape,
        }

    def all_gather(
        self, param_list: Iterable[Any] | None = None, async_op: bool = False, hierarchy: int = 0
    ) -> Gathered | None:
        """Bring the full values in now (of `param_list` if given). They stay as long as the budget allows."""
        for parameter in [self] if param_list is None else param_list:
            if isinstance(parameter, Paged):
                parameter._node.value()
        return Gathered() if async_op else None

    def partition(
        self, param_list: Iterable[Any] | None = None, hierarchy: int = 0, has_been_updated: bool = False
    ) -> None:
        """Let go of the full values now."""
        for parameter in [self] if param_list is None else param_list:
            if isinstance(parameter, Paged):
                page = parameter._node.page
                page.pager.evict(page)

    def partition_numel(self) -> int:
        """How many elements this rank owns."""
        page = self._node.page
        return page.layout.length(page.pager.transport.rank)

    def padding_size(self) -> int:
        """0: the last slices are shorter, nothing is padded."""
        return 0

    def aligned_size(self) -> int:
        return self.ds_numel + self.padding_size()

    def convert_to_zero_parameters(self, param_list: Iterable[nn.Parameter]) -> None:
        """Shard plain parameters along with this one (all ranks together)."""
        page = self._node.page
        for parameter in param_list:
            if not isinstance(parameter, Paged):
                identity.page_in_place(parameter, page.pager, f"beside {page.name}", _paged_class(self))


def _paged_class(tensor: Any) -> type[Paged]:
    """`PagedTensor`, also for a parameter of a class derived from it."""
    *_, found = [cls for cls in type(tensor).__mro__ if DeepSpeedView in cls.__bases__]
    assert issubclass(found, Paged)
    return found
