"""Collectives of torch.distributed on pages.

Their schemas say nothing of what they write, and they return before the work is done. So they run on
private full copies and are waited for. Only writes that are the same on all ranks can be kept.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch._ops import OpOverload

from zeropage.errors import UnsupportedOperationError
from zeropage.tensor.copies import keep_own, private_copy, stand_in
from zeropage.tensor.trees import paged_in, plain, rebuild

__all__ = ["run"]

_SAME_EVERYWHERE = {"c10d::allreduce_", "c10d::broadcast_", "c10d::allreduce_coalesced_"}


def run(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a collective some of whose tensors are paged."""
    name = func._schema.name
    written = paged_in(args[0]) if name.endswith("_") else []
    if written and name not in _SAME_EVERYWHERE:
        raise UnsupportedOperationError(
            f"{name} would leave different values on different ranks in {written[0]._node.page.name!r}, which is "
            "sharded over them. Run it on zp.full(p) and write the result inside zp.gather([p], writer=rank)."
        )
    if name == "c10d::send":  # its work may be waited for once only, and holds the tensors
        return func([plain(tensor).clone() for tensor in args[0]], *args[1:], **kwargs)
    if not written:
        return _wait(func(*plain(args), **plain(kwargs)))
    pages = list(dict.fromkeys(tensor._node.page for tensor in written))
    copies = {page: private_copy(page, gathers=True) for page in pages}
    ready = rebuild([args, kwargs], partial(stand_in, copies=copies))
    outcome = _wait(func(*ready[0], **ready[1]))
    with pages[0].pager.writing(pages, f"{name} on {pages[0].name}"):
        keep_own(copies)
    return _with_targets(outcome, args[0])


def _wait(outcome: Any) -> Any:
    """Wait for the work among the outputs: its tensors are let go of after this."""
    for part in outcome if isinstance(outcome, (tuple, list)) else [outcome]:
        if isinstance(part, torch.ScriptObject):
            Work.unbox(part).wait()
    return outcome


def _with_targets(outcome: Any, targets: Any) -> Any:
    if isinstance(outcome, tuple) and len(outcome) == 2:
        return targets, outcome[1]
    return outcome
