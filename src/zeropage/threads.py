"""How many threads of a rank have a core to themselves.

Ranks of one host that have more threads than it has cores wait for each other at the end of every parallel loop, and a
step takes several times as long. torch starts as many threads a process as there are cores, unless a launcher such as
torchrun says otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zeropage.transport import Transport

__all__ = ["fitting_threads", "threads_that_fit"]


def fitting_threads(transport: Transport) -> int:
    """Threads that every rank can have at once: those that it has, or fewer where ranks share a host of fewer cores."""
    # the host's cores, not those that this rank may use: it may be pinned to one of its own
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    if transport.name != "shared" or transport.world * threads <= cores:
        return threads
    return max(1, cores // transport.world)


@contextmanager
def threads_that_fit(transport: Transport) -> Iterator[None]:
    """Inside, the calling thread uses no more threads than fit: for what all ranks do at the same time.

    A thread of the program that computes for the first time meanwhile keeps the lower number, as torch hands it on.
    """
    before, fitting = torch.get_num_threads(), fitting_threads(transport)
    if fitting == before:
        yield
        return
    torch.set_num_threads(fitting)
    try:
        yield
    finally:
        torch.set_num_threads(before)
