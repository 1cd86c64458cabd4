"""Memory that belongs to one page by itself, for code that looks at addresses and storages.

[Note: addresses] Frames are used again, so their addresses repeat, and code that takes tensors at one
address for the same tensor would be misled: it would drop weights that it takes for duplicates, or miss
ties. So a page that is asked for its address gets a range of its own, and pages that are pickled together
share the storage that they are pickled from, as they would in torch. Nobody can tell how long a bare
pointer is used, so a range stays filled until its page is written: code that asks for the addresses of a
whole model gets a whole model's memory.
"""

from __future__ import annotations

import mmap
import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from zeropage.memory.host import holders

__all__ = ["AddressRange", "Addresses"]


class AddressRange:
    """A range of addresses, filled with a page's values as of `version`, or empty (None): without memory."""

    __slots__ = ("_map", "base", "version")

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self._map = mmap.mmap(
            -1, max(count * dtype.itemsize, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        self.version: int | None = None
        with torch.inference_mode(False):
            self.base = torch.frombuffer(self._map, dtype=dtype, count=count) if count else torch.empty(0, dtype=dtype)

    def empty(self) -> None:
        """Give the memory back, but not the addresses; not while somebody holds the storage."""
        if self.version is not None and holders(self.base) == 1:
            self._map.madvise(mmap.MADV_DONTNEED)
            self.version = None


class Addresses:
    """The ranges of many pages, and the copies of pages that are being pickled. Both go with their page."""

    def __init__(self) -> None:
        self.used = False  # whether anybody has asked for an address yet
        self._ranges: weakref.WeakKeyDictionary[object, AddressRange] = weakref.WeakKeyDictionary()
        self._copies: weakref.WeakKeyDictionary[object, tuple[int, StorageWeakRef]] = weakref.WeakKeyDictionary()

    def range_of(self, page: object, count: int, dtype: torch.dtype) -> AddressRange:
        found = self._ranges.get(page)
        if found is None:
            self.used = True
            found = self._ranges[page] = AddressRange(count, dtype)
        return found

    def outdated(self, page: object) -> None:
        """The page has other values now: nobody may read the old ones through a pointer any more."""
        if self.used and page in self._ranges:
            self._ranges[page].empty()

    def copy_of(self, page: object, version: int, dtype: torch.dtype) -> torch.Tensor | None:
        """The copy of a page's values (1-D) that was made for pickling, while somebody holds it."""
        known = self._copies.get(page)
        if known is None or known[0] != version:
            return None
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(known[1].cdata)
        if storage is None:
            return None
        with torch.inference_mode(False):
            return torch.empty(0, dtype=dtype).set_(storage)

    def keep_copy(self, page: object, version: int, values: torch.Tensor) -> None:
        self._copies[page] = (version, StorageWeakRef(values.untyped_storage()))
