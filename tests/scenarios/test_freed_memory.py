"""What a model is made from goes back to the system, also where the C library would keep it for later."""

from __future__ import annotations

import ctypes
from pathlib import Path

from torch import nn

import zeropage as zp
from tests.harness import run

MB = 1 << 20
LAYERS = 60  # of 4 MB each
BOUND = 110 * MB  # what may have been freed and not yet given back (64 MB), a layer, and torch's own
_M_MMAP_THRESHOLD = -3


def _keep_freed_blocks() -> None:
    """As the C library does by itself once a block of this size has been freed."""
    ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, 32 * MB)


def _own_memory() -> int:
    fields = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return 1024 * int(fields["Pss_Anon"].split()[0])


def _build() -> int:
    """Bytes of memory that nobody shares, which this rank has got more of."""
    _keep_freed_blocks()
    nn.Linear(1024, 1024)
    before = _own_memory()
    with zp.init({"transport": "shared"}):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(LAYERS)))
    grown = _own_memory() - before
    del model
    return grown


def test_building() -> None:
    for grown in run(2, _build):
        assert grown < BOUND, f"{grown / MB:.0f} MB"
