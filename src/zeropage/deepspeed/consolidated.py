"""The whole state dict of a sharded model on the first rank, one tensor at a time."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn

from zeropage.checkpoint.named import first_names, tensors_of
from zeropage.checkpoint.verdict import one_verdict
from zeropage.construct import pagers_of
from zeropage.edit import full
from zeropage.transport import Transport

__all__ = ["consolidated_state_dict", "save_consolidated"]


def consolidated_state_dict(
    module: nn.Module, *, exclude_frozen_parameters: bool = False
) -> OrderedDict[str, torch.Tensor] | None:
    """Full plain tensors in host memory on rank 0, None on the others (all ranks together). Tied names share one.

    The first rank reads; the others wait at the end, so that nobody changes a parameter meanwhile.
    """
    transport = _ready(module)
    found = _collect(module, exclude_frozen_parameters) if transport.rank == 0 else None
    transport.meet("consolidate the state dict")
    return found


def save_consolidated(module: nn.Module, path: Path, *, exclude_frozen_parameters: bool = False) -> None:
    """`torch.save` it on rank 0 (all ranks together).

    Raises:
        CheckpointError: on all ranks, if it cannot be written.
    """
    transport = _ready(module)
    with one_verdict(transport, f"save {path.name}"):
        if transport.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(_collect(module, exclude_frozen_parameters), path)


def _ready(module: nn.Module) -> Transport:
    pagers = pagers_of(module)
    for pager in pagers:
        pager.close_batch()
    return pagers[0].transport


def _collect(module: nn.Module, exclude_frozen: bool) -> OrderedDict[str, torch.Tensor]:
    named = tensors_of(module)
    frozen = {name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
    found: OrderedDict[str, torch.Tensor] = OrderedDict()
    for name, first in first_names(named).items():
        if exclude_frozen and name in frozen:
            continue
        found[name] = found[first] if first in found else full(named[name]).cpu()
    return found
