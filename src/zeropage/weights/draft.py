"""The files of an export while they are written: in a folder beside the target, published by renames."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from zeropage.checkpoint.folder import sync, write_durably
from zeropage.checkpoint.parts import Part, write_part
from zeropage.errors import CheckpointError
from zeropage.weights.plan import Plan
from zeropage.weights.source import INDEX, SINGLE

__all__ = ["Draft"]

_OURS = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True, slots=True)
class Draft:
    """One rank creates and publishes it; all ranks write their parts in between."""

    plan: Plan
    folder: Path  # the target
    place: Path  # the temporary folder

    def create(self) -> None:
        """Make all files at their final sizes, heads written: a full disk shows here."""
        if self.folder.exists() and not (self.folder.is_dir() and os.access(self.folder, os.W_OK | os.X_OK)):
            raise CheckpointError(f"{self.folder} is not a folder that can be written; choose another one")
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.place.mkdir()
        for plan in self.plan.files:
            with (self.place / plan.name).open("xb") as file:
                os.posix_fallocate(file.fileno(), 0, plan.nbytes)
                file.write(plan.head)
        if self.plan.index is not None:
            write_durably(self.place / INDEX, self.plan.index)

    def check_in_sight(self) -> None:
        """Every rank must write into the same files.

        Raises:
            CheckpointError: this rank does not see the files that the first one created.
        """
        for plan in self.plan.files:
            path = self.place / plan.name
            if not path.exists() or path.stat().st_size != plan.nbytes:
                raise CheckpointError(
                    f"{path}, created by rank 0, is not to be seen here. Export into a folder that all hosts share."
                )

    def write(self, parts_of: Callable[[str], Iterable[Part]]) -> None:
        """Write the parts of every tensor, file by file, and bring them to the disk."""
        for plan in self.plan.files:
            with (self.place / plan.name).open("r+b", buffering=0) as file:
                for name, entry in plan.entries.items():
                    for part in parts_of(name):
                        try:
                            write_part(file.fileno(), entry.dtype, entry.start, part)
                        except CheckpointError as error:
                            raise CheckpointError(f"{name!r} cannot be exported: {error}") from error
                os.fsync(file.fileno())

    def publish(self) -> None:
        """Rename the files into place, the index last, and remove those of an earlier export.

        An earlier index goes first where names repeat: at no moment does an index name files of both exports.
        """
        if not self.folder.exists():
            self.place.rename(self.folder)
            sync(self.folder.parent)
            return
        names = [plan.name for plan in self.plan.files]
        if self.plan.index is not None:
            (self.folder / INDEX).unlink(missing_ok=True)
        for name in names:
            os.replace(self.place / name, self.folder / name)
        for path in self.folder.iterdir():
            if path.name not in names and (path.name in (SINGLE, INDEX) or _OURS.fullmatch(path.name)):
                path.unlink()
        if self.plan.index is not None:
            os.replace(self.place / INDEX, self.folder / INDEX)
        sync(self.folder)

    def discard(self) -> None:
        """Remove what was not published."""
        shutil.rmtree(self.place, ignore_errors=True)
