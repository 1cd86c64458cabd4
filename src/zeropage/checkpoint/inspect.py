"""What is inside a checkpoint, without a model: for `zeropage inspect`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from zeropage.checkpoint.contents import read_extra
from zeropage.checkpoint.folder import Manifest, locate
from zeropage.errors import CheckpointError
from zeropage.layout import Layout

__all__ = ["Contents", "Entry", "inspect", "render"]

_OF_TENSORS = ("model.", "master.", "optimizer.")


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a checkpoint; `nbytes` counts all of it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Contents:
    """A checkpoint: where it is, who wrote it, what is inside.

    Attributes:
        verified: whether every byte was read and agrees with its checksum.
        groups: settings and parameters of each group of the optimizer.
        bytes_on_ranks: bytes of weights, masters and optimizer state on the largest of that many ranks.
    """

    path: str
    tag: str
    step: int
    world: int
    format: int
    versions: dict[str, str]
    tensors: list[Entry]
    groups: list[dict[str, Any]]
    left_out: list[str]
    files: dict[str, int]
    verified: bool
    bytes_on_ranks: dict[int, int]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def inspect(checkpoint: Path, *, verify: bool = False, ranks: tuple[int, ...] = (1, 2, 4, 8)) -> Contents:
    """Look into `checkpoint`: the folder of one, or a folder of several (the latest then).

    Raises:
        CheckpointError: it is none, or damaged (the file is named). Without `verify` only sizes are looked at.
    """
    path = locate(checkpoint)
    manifest = Manifest.read(path)
    if manifest is None and verify:
        raise CheckpointError(f"{path} has format 1, which has no checksums; load it and save it again to have some")
    if manifest is not None:
        manifest.check(path, None if verify else ())
    metadata = FileSystemReader(path).read_metadata()
    extra = read_extra(path, metadata)
    tensors = [
        Entry(key, tuple(described.size), str(described.properties.dtype).removeprefix("torch."), _nbytes(described))
        for key, described in metadata.state_dict_metadata.items()
        if isinstance(described, TensorStorageMetadata) and key.startswith(_OF_TENSORS)
    ]
    return Contents(
        path=str(path),
        tag=path.name,
        step=int(extra["progress"]["global_step"]),
        world=0 if manifest is None else manifest.world,
        format=int(extra["version"]),
        versions={} if manifest is None else manifest.versions,
        tensors=sorted(tensors, key=lambda entry: entry.name),
        groups=extra["groups"],
        left_out=list(extra.get("left_out", ())),
        files={file.name: file.stat().st_size for file in sorted(path.iterdir())},
        verified=verify,
        bytes_on_ranks={world: sum(_on_a_rank(entry, world) for entry in tensors) for world in ranks},
    )


def _nbytes(described: TensorStorageMetadata) -> int:
    return described.size.numel() * described.properties.dtype.itemsize


def _on_a_rank(entry: Entry, world: int) -> int:
    """Bytes on the first rank, which has the largest slice; what has no dimensions is everywhere."""
    numel = math.prod(entry.shape)
    return Layout(numel, world).length(0) * entry.nbytes // numel if entry.shape else entry.nbytes


def render(found: Contents) -> Group:
    """As tables for a terminal."""
    head = Table(title=f"{found.path}", show_header=False)
    total = sum(entry.nbytes for entry in found.tensors)
    whole = "every byte agrees with its checksum" if found.verified else "sizes agree (--verify reads every byte)"
    rows = {
        "step": str(found.step),
        "saved by": f"{found.world} ranks" if found.world else "unknown",
        "format": f"{found.format}" + "".join(f", {name} {version}" for name, version in found.versions.items()),
        "tensors": f"{len(found.tensors)}, {total:,} bytes",
        "files": f"{len(found.files)}, {sum(found.files.values()):,} bytes; {whole}",
        "frozen, left out": str(len(found.left_out)),
    }
    for index, group in enumerate(found.groups):
        settings = ", ".join(f"{key}={value}" for key, value in group.items() if key != "params" and value is not None)
        rows[f"group {index}"] = f"{len(group['params'])} parameters; {settings}"
    for world, nbytes in found.bytes_on_ranks.items():
        rows[f"on {world} rank{'s' * (world > 1)}"] = f"{nbytes:,} bytes a rank"
    for key, value in rows.items():
        head.add_row(key, value)
    body = Table("tensor", "shape", "dtype", "bytes")
    for entry in found.tensors:
        body.add_row(entry.name, " x ".join(map(str, entry.shape)) or "-", entry.dtype, f"{entry.nbytes:,}")
    return Group(head, body)
