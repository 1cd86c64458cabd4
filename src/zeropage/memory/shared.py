"""Memory that all ranks of one host map, without a name that could be left behind.

Rank 0 makes an anonymous file (`memfd_create`), the others open it through `/proc/<pid>/fd/<n>`; once all
have mapped it every descriptor is closed. The kernel frees the memory with the last mapping, also after
a SIGKILL. Pages that nobody has touched cost nothing.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch

__all__ = ["SharedBlock", "create", "open_of_process"]


class SharedBlock:
    """One mapping of an anonymous file, seen as tensors."""

    __slots__ = ("_map", "nbytes")

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._map = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.nbytes = nbytes

    @property
    def buffer(self) -> mmap.mmap:
        """The raw mapping (for words read and written with ctypes)."""
        return self._map

    def tensor(self, dtype: torch.dtype, count: int, offset: int = 0) -> torch.Tensor:
        """`count` elements from byte `offset` as a 1-D tensor that keeps the mapping alive."""
        with torch.inference_mode(False):
            if count == 0:
                return torch.empty(0, dtype=dtype, device="cpu")
            return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset)


def create(nbytes: int) -> int:
    """A descriptor of a new anonymous file of `nbytes` zero bytes. No memory is taken before it is touched."""
    descriptor = os.memfd_create("zeropage", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, nbytes)
    return descriptor


def open_of_process(pid: int, descriptor: int) -> int:
    """A descriptor of this process for the file that process `pid` holds as `descriptor`."""
    return os.open(Path("/proc") / str(pid) / "fd" / str(descriptor), os.O_RDWR | os.O_CLOEXEC)
