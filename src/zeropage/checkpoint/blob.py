"""One tensor as the bytes that `torch.load(weights_only=True)` reads, written from where it lies.

`torch.save` would copy a slice first (it saves whole storages). The format is torch's own zip archive: a pickle that
describes the tensor, and its values. Here the values come last, after a head that dtype and shape determine: whoever
finds that head knows where the values are (`checkpoint/reading.py`). The archive is the large form of zip throughout,
so that no length depends on the values.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from zlib_ng import zlib_ng

__all__ = ["PIECE", "Blob", "Sink", "pieces", "write_blob"]

PIECE = 1 << 20  # bytes that are looked at, or copied, at once: they stay in the cache between the two

_LOCAL = struct.Struct("<4s5H3L2H")
_LARGE = struct.Struct("<2H2Q")
_DESCRIPTOR = struct.Struct("<4sL2Q")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LARGER = struct.Struct("<2H3Q")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
_VERSION = 45  # the first one with the large form
_NEW_YEAR_1980 = 0x21  # the date of every record: the same tensor gives the same bytes
_SUM_FOLLOWS = 0x08
_ELSEWHERE = 0xFFFFFFFF  # the number is in the record's field for the large form


class Sink(Protocol):
    """Where bytes go, one after the other."""

    def write(self, data: Any, /) -> int: ...


class Blob:
    """The archive of a tensor of this shape and dtype.

    Attributes:
        head: its bytes before the values.
        nbytes: bytes of the values.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.nbytes = math.prod(shape) * dtype.itemsize
        small = {
            b"archive/data.pkl": _description(tuple(shape), dtype, self.nbytes),
            b"archive/byteorder": b"little",
            b"archive/version": b"3\n",
        }
        self._directory = head = b""
        for name, data in small.items():
            crc32 = zlib.crc32(data)
            self._directory += _central(name, len(data), crc32, len(head), flags=0)
            head += _local(name, len(data), crc32, flags=0) + data
        self._start = len(head)
        self.head = head + _local(_VALUES, self.nbytes, 0, flags=_SUM_FOLLOWS)

    def tail(self, crc32: int) -> bytes:
        """Its bytes after the values, whose checksum is given."""
        summed = _DESCRIPTOR.pack(b"PK\7\10", crc32, self.nbytes, self.nbytes)
        directory = self._directory + _central(_VALUES, self.nbytes, crc32, self._start, flags=_SUM_FOLLOWS)
        start = len(self.head) + self.nbytes + len(summed)
        rest = _END64.size - 12  # as counted after this field
        end = _END64.pack(b"PK\6\6", rest, _VERSION, _VERSION, 0, 0, 4, 4, len(directory), start)
        end += _LOCATOR.pack(b"PK\6\7", 0, start + len(directory), 1)
        end += _END.pack(b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, _ELSEWHERE, _ELSEWHERE, 0)
        return summed + directory + end


_VALUES = b"archive/data/0"


def write_blob(sink: Sink, tensor: torch.Tensor) -> int:
    """Write `tensor` (dense, of any shape and dtype) to `sink`; the number of bytes."""
    blob = Blob(tensor.shape, tensor.dtype)
    sink.write(blob.head)
    crc32 = 0
    for piece in pieces(tensor):
        crc32 = zlib_ng.crc32(piece, crc32)
        sink.write(piece)
    tail = blob.tail(crc32)
    sink.write(tail)
    return len(blob.head) + blob.nbytes + len(tail)


def pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of `tensor` in row-major order, at most `PIECE` at a time."""
    if not tensor.numel():
        return
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for part in flat.split(PIECE):
        yield memoryview(part.cpu().numpy())


def _local(name: bytes, nbytes: int, crc32: int, flags: int) -> bytes:
    extra = _LARGE.pack(1, _LARGE.size - 4, nbytes, nbytes)
    sizes = (_ELSEWHERE, _ELSEWHERE)
    return _LOCAL.pack(
        b"PK\3\4", _VERSION, flags, 0, 0, _NEW_YEAR_1980, crc32, *sizes, len(name), len(extra)
    ) + name + extra  # fmt: skip


def _central(name: bytes, nbytes: int, crc32: int, start: int, flags: int) -> bytes:
    extra = _LARGER.pack(1, _LARGER.size - 4, nbytes, nbytes, start)
    sizes = (_ELSEWHERE, _ELSEWHERE)
    return _CENTRAL.pack(
        b"PK\1\2", _VERSION, _VERSION, flags, 0, 0, _NEW_YEAR_1980, crc32, *sizes, len(name), len(extra), 0, 0, 0, 0,
        _ELSEWHERE,
    ) + name + extra  # fmt: skip


class _Storage:
    """Stands for the bytes of the tensor in the pickle."""


class _Rebuilt:
    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype


class _Describer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, nbytes: int) -> None:
        super().__init__(file, protocol=2)
        self._nbytes = nbytes

    def persistent_id(self, obj: Any) -> Any:
        return ("storage", torch.UntypedStorage, "0", "cpu", self._nbytes) if isinstance(obj, _Storage) else None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, _Rebuilt):
            return NotImplemented
        stride = [math.prod(obj.shape[d + 1 :]) for d in range(len(obj.shape))]
        rest: tuple[Any, ...] = (False, OrderedDict(), obj.dtype)  # requires no gradient, has no hooks
        return torch._utils._rebuild_tensor_v3, (_Storage(), 0, obj.shape, tuple(stride), *rest)


def _description(shape: tuple[int, ...], dtype: torch.dtype, nbytes: int) -> bytes:
    buffer = io.BytesIO()
    _Describer(buffer, nbytes).dump(_Rebuilt(shape, dtype))
    return buffer.getvalue()
