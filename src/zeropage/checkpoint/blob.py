"""One tensor as the bytes that `torch.load(weights_only=True)` reads, written from where it lies.

`torch.save` would copy a slice first (it saves whole storages). The format is torch's own zip archive: a pickle
that describes the tensor, and its bytes.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Protocol

import torch

__all__ = ["PIECE", "Sink", "pieces", "write_blob"]

PIECE = 64 << 20  # bytes that are looked at, or copied, at once
_UNIX_1980 = (1980, 1, 1, 0, 0, 0)  # the date of every record: the same tensor gives the same bytes


class Sink(Protocol):
    """Where bytes go, one after the other."""

    def write(self, data: Any, /) -> int: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def write_blob(sink: Sink, tensor: torch.Tensor) -> None:
    """Write `tensor` (dense, of any shape and dtype) to `sink`."""
    nbytes = tensor.numel() * tensor.element_size()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo("archive/data.pkl", _UNIX_1980), _description(tensor, nbytes))
        archive.writestr(zipfile.ZipInfo("archive/byteorder", _UNIX_1980), b"little")
        record = zipfile.ZipInfo("archive/data/0", _UNIX_1980)
        record.file_size = nbytes
        with archive.open(record, "w", force_zip64=True) as file:
            for piece in pieces(tensor):
                file.write(piece)
        archive.writestr(zipfile.ZipInfo("archive/version", _UNIX_1980), b"3\n")


def pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of `tensor` in row-major order, at most `PIECE` at a time."""
    if not tensor.numel():
        return
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for part in flat.split(PIECE):
        yield memoryview(part.cpu().numpy())


class _Storage:
    """Stands for the bytes of the tensor in the pickle."""


class _Rebuilt:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _Describer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, nbytes: int) -> None:
        super().__init__(file, protocol=2)
        self._nbytes = nbytes

    def persistent_id(self, obj: Any) -> Any:
        return ("storage", torch.UntypedStorage, "0", "cpu", self._nbytes) if isinstance(obj, _Storage) else None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, _Rebuilt):
            return NotImplemented
        shape, dtype = tuple(obj.tensor.shape), obj.tensor.dtype
        stride = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        rest: tuple[Any, ...] = (False, OrderedDict(), dtype)  # requires no gradient, has no hooks
        return torch._utils._rebuild_tensor_v3, (_Storage(), 0, shape, tuple(stride), *rest)


def _description(tensor: torch.Tensor, nbytes: int) -> bytes:
    buffer = io.BytesIO()
    _Describer(buffer, nbytes).dump(_Rebuilt(tensor))
    return buffer.getvalue()
