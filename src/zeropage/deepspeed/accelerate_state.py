"""What Accelerate has to be told when it asks for a process group on a host without an accelerator.

[Note: accelerate without an accelerator] `accelerate.PartialState` lets DeepSpeed start the group and then looks at
`self.backend` only, which it has set from the devices that it found. On a host with CPUs alone that is None, so it
takes itself for a single process although N ranks were started: data is not sharded, every rank trains on all of it.
While it is being built (it has no `num_processes` yet), and only then, the backend that is really there is put where
it looks. Its classes stay as they are, and where it found a device nothing is touched.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch.distributed as dist

from zeropage.deepspeed import comm

__all__ = ["init_distributed", "is_initialized"]


@functools.wraps(comm.init_distributed)
def init_distributed(*arguments: Any, **options: Any) -> None:
    comm.init_distributed(*arguments, **options)
    _tell_accelerate()


@functools.wraps(comm.is_initialized)
def is_initialized() -> bool:
    started = comm.is_initialized()
    if started:
        _tell_accelerate()  # it asks this first, and nothing more if the answer is yes
    return started


def _tell_accelerate() -> None:
    module = sys.modules.get("accelerate.state")
    if module is None:
        return
    state = module.PartialState._shared_state
    if "backend" in state and state["backend"] is None and "num_processes" not in state:
        state["backend"] = dist.get_backend()
