"""A safetensors checkpoint as found on disk: one file, or a folder in Hugging Face's layout."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeropage.errors import CheckpointError
from zeropage.weights.header import Entry, read_header

__all__ = ["INDEX", "SINGLE", "Source", "find_source"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Stamp:
    """Which file it was. Renames put another one under the same name."""

    device: int
    inode: int
    nbytes: int
    changed_ns: int

    @staticmethod
    def of(file: Path | int) -> Stamp:
        about = os.stat(file)
        return Stamp(about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class Source:
    """Where every tensor is: its file and its place there; and which files those were."""

    places: dict[str, tuple[Path, Entry]]
    stamps: dict[Path, Stamp]

    def check_same(self, file: int, path: Path) -> None:
        """Raise CheckpointError unless the open `file` is the one whose header was read."""
        if Stamp.of(file) != self.stamps[path]:
            raise CheckpointError(f"{path} was replaced while it was read; load it again")

    def digest(self) -> str:
        """The same on ranks that found the same files, wherever those are."""
        found = [
            (key, path.name, str(entry.dtype), entry.shape, entry.start)
            for key, (path, entry) in self.places.items()
        ]  # fmt: skip
        return hashlib.sha256(repr(sorted(found)).encode()).hexdigest()


def find_source(path: Path) -> Source:
    """Read the headers behind `path`: a file, or a folder with `model.safetensors` or an index of several files.

    Raises:
        CheckpointError: nothing is there, or a file is missing, damaged or not whole, or was just replaced.
    """
    if not path.is_dir():
        stamps, headers = _read_headers([path])
        return Source({key: (path, entry) for key, entry in headers[path].items()}, stamps)
    if (path / SINGLE).exists():  # as transformers does, it goes before an index
        return find_source(path / SINGLE)
    if not (path / INDEX).exists():
        others = ", ".join(sorted(found.name for found in path.glob("*.safetensors"))[:4])
        raise CheckpointError(
            f"{path} has neither {SINGLE} nor {INDEX}"
            + (f"; it has {others}: name the file itself" if others else "; name the folder or file of the weights")
        )
    index = _stamp(path / INDEX)
    weights = _weight_map(path / INDEX)
    stamps, headers = _read_headers([path / name for name in dict.fromkeys(weights.values())])
    if _stamp(path / INDEX) != index:
        raise CheckpointError(f"{path / INDEX} was replaced while it was read; load it again")
    for key, name in weights.items():
        if key not in headers[path / name]:
            raise CheckpointError(f"{path / INDEX} says that {key!r} is in {name}, but it is not; get both again")
    return Source({key: (path / name, headers[path / name][key]) for key, name in weights.items()}, stamps)


def _read_headers(files: list[Path]) -> tuple[dict[Path, Stamp], dict[Path, dict[str, Entry]]]:
    """The stamps first: a file that is replaced in between does not pass `check_same`."""
    return {file: _stamp(file) for file in files}, {file: read_header(file) for file in files}


def _stamp(file: Path) -> Stamp:
    try:
        return Stamp.of(file)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weights: Any = json.loads(index.read_bytes())["weight_map"]
        named = weights.items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged: no 'weight_map' can be read ({error}); get it again") from error
    for key, name in named:
        if not isinstance(name, str) or Path(name).name != name or Path(name).suffix != ".safetensors":
            raise CheckpointError(f"{index}: {key!r} is said to be in {name!r}; only files beside the index are read")
    return dict(weights)
