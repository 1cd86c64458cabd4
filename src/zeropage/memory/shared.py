"""Memory that all ranks of one host map, without a name that could be left behind.

Rank 0 makes an anonymous file (`memfd_create`), the others open it through `/proc/<pid>/fd/<n>`; once all
have mapped it every descriptor is closed. The kernel frees the memory with the last mapping, also after
a SIGKILL. Pages that nobody has touched cost nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from zeropage.memory.raw import bytes_of

__all__ = ["SharedBlock", "create", "open_of_process"]


class SharedBlock:
    """One mapping of an anonymous file, seen as tensors. It lives as long as any of them, and holds no descriptor."""

    __slots__ = ("storage",)

    def __init__(self, descriptor: int, nbytes: int) -> None:
        # not by Python's `mmap`, which keeps a descriptor a block: models have more pages than a process may open files
        path = str(path_of(descriptor))
        self.storage: torch.UntypedStorage = torch.UntypedStorage.from_file(path, True, nbytes)  # type: ignore[assignment]

    @property
    def buffer(self) -> memoryview:
        """The raw mapping (for words read and written with ctypes)."""
        with torch.inference_mode(False):
            return bytes_of(torch.empty(0, dtype=torch.uint8, device="cpu").set_(self.storage))

    def tensor(self, dtype: torch.dtype, count: int, offset: int = 0) -> torch.Tensor:
        """`count` elements from byte `offset` as a 1-D tensor that keeps the mapping alive.

        It has a storage of its own, of just these elements: who saves it looks at what its storage holds.
        """
        with torch.inference_mode(False):
            if count == 0:
                return torch.empty(0, dtype=dtype, device="cpu")
            return torch.frombuffer(self.buffer, dtype=dtype, count=count, offset=offset)


def create(nbytes: int) -> int:
    """A descriptor of a new anonymous file of `nbytes` zero bytes. No memory is taken before it is touched."""
    descriptor = os.memfd_create("zeropage", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, nbytes)
    return descriptor


def open_of_process(pid: int, descriptor: int) -> int:
    """A descriptor of this process for the file that process `pid` holds as `descriptor`."""
    return os.open(path_of(descriptor, pid), os.O_RDWR | os.O_CLOEXEC)


def path_of(descriptor: int, pid: int | None = None) -> Path:
    """Where the file can be opened that this process, or process `pid`, holds as `descriptor`."""
    return Path("/proc") / ("self" if pid is None else str(pid)) / "fd" / str(descriptor)
