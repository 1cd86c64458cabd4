"""A safetensors checkpoint as found on disk: one file, or a folder in Hugging Face's layout."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeropage.errors import CheckpointError
from zeropage.weights.header import Entry, read_header

__all__ = ["INDEX", "SINGLE", "Source", "find_source"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Source:
    """Where every tensor is: its file and its place there."""

    places: dict[str, tuple[Path, Entry]]

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
        CheckpointError: nothing is there, or a file is missing, damaged or not whole.
    """
    if not path.is_dir():
        return Source({key: (path, entry) for key, entry in read_header(path).items()})
    if (path / SINGLE).exists():  # as transformers does, it goes before an index
        return find_source(path / SINGLE)
    if not (path / INDEX).exists():
        others = ", ".join(sorted(found.name for found in path.glob("*.safetensors"))[:4])
        raise CheckpointError(
            f"{path} has neither {SINGLE} nor {INDEX}"
            + (f"; it has {others}: name the file itself" if others else "; name the folder or file of the weights")
        )
    weights = _weight_map(path / INDEX)
    headers = {name: read_header(path / name) for name in dict.fromkeys(weights.values())}
    for key, name in weights.items():
        if key not in headers[name]:
            raise CheckpointError(f"{path / INDEX} says that {key!r} is in {name}, but it is not; get both again")
    return Source({key: (path / name, headers[name][key]) for key, name in weights.items()})


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
