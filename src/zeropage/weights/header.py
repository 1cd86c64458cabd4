"""The head of a safetensors file: names, dtypes, shapes and byte ranges.

Pure but for `read_header`. The format is described at https://huggingface.co/docs/safetensors: eight bytes
with the length of a JSON object, the object, then the values, row-major, without holes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zeropage.errors import CheckpointError

__all__ = ["DTYPES", "Entry", "encode", "parse", "read_header"]

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MOST = 100_000_000  # bytes of a header: the limit of the format


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor stands in its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte of the file with the first element

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a file, by name. The file must have the length that its header promises.

    Raises:
        CheckpointError: not a safetensors file, or not a whole one; says what is wrong with it.
    """
    try:
        with path.open("rb") as file:
            length = file.seek(0, 2)
            file.seek(0)
            raw = file.read(8)
            count = struct.unpack("<Q", raw)[0] if len(raw) == 8 else 0
            if not 2 <= count <= min(length - 8, _MOST):
                raise CheckpointError(
                    f"{path} is not a whole safetensors file: its {length:,} bytes announce a header of {count:,}. "
                    "Copy or download it again."
                )
            return parse(file.read(count), length, str(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def parse(header: bytes, length: int, path: str) -> dict[str, Entry]:
    """The tensors that `header` (JSON) describes in a file of `length` bytes.

    Raises:
        CheckpointError: it is no header, or its byte ranges are not those of the file.
    """
    try:
        described = json.loads(header, object_pairs_hook=_without_repetition)
        if not isinstance(described, dict):
            raise ValueError("it is not an object")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the header of {path} is damaged: {error}. Copy or download the file again.") from error
    described.pop("__metadata__", None)
    ranges = {name: _range_of(name, about, path) for name, about in described.items()}
    place = 0
    for name, (begin, end) in sorted(ranges.items(), key=lambda item: item[1]):
        if begin != place:
            raise CheckpointError(f"{path}: {name!r} begins at byte {begin:,} of the values and not at {place:,}")
        place = end
    first = 8 + len(header)
    if first + place != length:
        raise CheckpointError(
            f"{path} has {length:,} bytes and its header describes {first + place:,}: it was cut off, or written in "
            "part. Copy or download it again."
        )
    return {
        name: Entry(DTYPES[about["dtype"]], tuple(about["shape"]), first + ranges[name][0])
        for name, about in described.items()
    }


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands there twice")
    return found


def _range_of(name: str, about: Any, path: str) -> tuple[int, int]:
    """The bytes of a tensor, counted from the first value; its description is checked."""
    match about:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]} if all(
            type(number) is int and number >= 0 for number in (*shape, begin, end)
        ):
            pass
        case _:
            raise CheckpointError(f"{path}: the description of {name!r} is damaged: {str(about)[:200]}")
    if dtype not in DTYPES:
        raise CheckpointError(f"{path}: {name!r} has dtype {dtype!r}, and only {', '.join(DTYPES)} are known here")
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != nbytes:
        raise CheckpointError(f"{path}: {name!r} takes {nbytes:,} bytes, and its offsets span {end - begin:,}")
    return begin, end


def encode(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> tuple[bytes, dict[str, Entry]]:
    """The first bytes of a file with these tensors, in this order, and where they stand in it.

    Raises:
        CheckpointError: safetensors has no such dtype.
    """
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, (dtype, shape) in tensors.items():
        if dtype not in _NAMES:
            raise CheckpointError(f"{name!r} is {dtype}, which safetensors files cannot hold; convert it first")
        end = place + math.prod(shape) * dtype.itemsize
        described[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    entries = {
        name: Entry(dtype, shape, 8 + len(text) + described[name]["data_offsets"][0])
        for name, (dtype, shape) in tensors.items()
    }
    return struct.pack("<Q", len(text)) + text, entries
