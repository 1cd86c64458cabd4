"""Which tensor goes where in the files of an export. Pure: from names, dtypes and shapes alone.

So every rank has the same plan without a message, and any number of ranks writes the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from zeropage.errors import ConfigError
from zeropage.weights.header import Entry, encode
from zeropage.weights.source import SINGLE

__all__ = ["Described", "FilePlan", "Plan", "dtype_of", "plan_files", "size_of"]

Described = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_DTYPES = {
    "fp32": torch.float32, "float32": torch.float32, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
    "fp16": torch.float16, "float16": torch.float16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file: its head, and the places of its tensors."""

    name: str
    head: bytes
    entries: dict[str, Entry]

    @property
    def nbytes(self) -> int:
        return len(self.head) + sum(entry.nbytes for entry in self.entries.values())


@dataclass(frozen=True, slots=True)
class Plan:
    """All files of an export; `index` is the content of the index file, None where one file holds everything."""

    files: list[FilePlan]
    index: bytes | None

    def digest(self) -> str:
        return hashlib.sha256(b"".join(file.name.encode() + file.head for file in self.files)).hexdigest()


def plan_files(tensors: Described, limit: int) -> Plan:
    """Fill files of at most `limit` bytes of values with the tensors in the order of their names.

    A larger tensor has a file to itself. Inside a file wide dtypes come first, so that all values are aligned.

    Raises:
        CheckpointError: a dtype that safetensors does not have.
    """
    groups: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = [{}]
    total = filled = 0
    for name in sorted(tensors):
        dtype, shape = tensors[name]
        nbytes = math.prod(shape) * dtype.itemsize
        if groups[-1] and filled + nbytes > limit:
            groups.append({})
            filled = 0
        groups[-1][name] = dtype, shape
        filled += nbytes
        total += nbytes
    files = []
    for number, group in enumerate(groups, 1):
        name = SINGLE if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
        order = sorted(group, key=lambda key: (-group[key][0].itemsize, key))
        files.append(FilePlan(name, *encode({key: group[key] for key in order})))
    return Plan(files, _index(files, total) if len(files) > 1 else None)


def _index(files: list[FilePlan], total: int) -> bytes:
    weight_map = {key: file.name for file in files for key in file.entries}
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def size_of(size: int | str, name: str = "max_shard_size") -> int:
    """Bytes of "5GB" (10^9), "512MiB" (2^20) or a number; `name` is what errors call it.

    Raises:
        ConfigError: it cannot be read, or is not positive.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?B)?", str(size).strip().upper())
    if found is None or (found[2] or "").removesuffix("B") in ("I", "TI"):
        raise ConfigError(f'{name}={size!r} cannot be read; write a number of bytes, or "5GB", "512MiB"')
    unit = found[2] or ""
    nbytes = int(float(found[1]) * _UNITS["" if unit == "B" else unit])
    if nbytes < 1:
        raise ConfigError(f"{name}={size!r} must be at least one byte")
    return nbytes


def dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype that floating-point tensors are converted to.

    Raises:
        ConfigError: it is not the name of one, or not a floating-point one.
    """
    found = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if (found is None and dtype is not None) or (found is not None and not found.is_floating_point):
        raise ConfigError(f'dtype={dtype!r} cannot be exported; use "fp32", "bf16", "fp16" or None (as they are)')
    return found
