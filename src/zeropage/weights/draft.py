"""The files of an export while they are written: in a temporary folder, published by renames.

Whoever reads the target finds the whole old export or the whole new one, also after a program that was killed
at any point of `publish`; what such a program left is removed by the next export to the same folder.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from zeropage.checkpoint.folder import sync, write_durably
from zeropage.checkpoint.parts import Part, write_part
from zeropage.errors import CheckpointError
from zeropage.weights.plan import Plan
from zeropage.weights.source import INDEX, SINGLE

__all__ = ["Draft", "place_for"]

_OURS = re.compile(r"model-\d{5}-of-\d{5}(\.new-[0-9a-f]{8})?\.safetensors")
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)

_log = logging.getLogger(__name__)


def place_for(target: Path) -> Path:
    """A new temporary folder for an export to `target`: in it, or beside it while it does not exist."""
    inside = target if target.is_dir() else target.parent
    return inside / f".{target.name}.{secrets.token_hex(4)}.partial"


@dataclass(frozen=True, slots=True)
class Draft:
    """One rank creates and publishes it; all ranks write their parts in between."""

    plan: Plan
    folder: Path  # the target
    place: Path  # the temporary folder

    @contextmanager
    def made(self) -> Iterator[None]:
        """The temporary folder, with all files at their final sizes, heads written: a full disk shows here.

        At the end it is removed, with what was not published.
        """
        if self.folder.exists() and not (self.folder.is_dir() and os.access(self.folder, os.W_OK | os.X_OK)):
            raise CheckpointError(f"{self.folder} is not a folder that can be written; choose another one")
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        self.place.mkdir()
        held = os.open(self.place, os.O_RDONLY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)  # the kernel lets go of it if this process dies
            for plan in self.plan.files:
                with (self.place / plan.name).open("xb") as file:
                    os.posix_fallocate(file.fileno(), 0, plan.nbytes)
                    file.write(plan.head)
            yield
        finally:
            shutil.rmtree(self.place, ignore_errors=True)
            os.close(held)

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
        """Rename the files into place, and remove those of an earlier export.

        [Note: one moment] Readers take `model.safetensors` if it is there, else what the index names. So the new
        export is there from one call on: the rename of `model.safetensors`, or that of the index, or (where a single
        file is followed by several) the removal of the single file. Where the old index names files that the new
        export has too, an index of other names for the new files comes first; a file system without hard links
        has no index for that moment instead.
        """
        names = [plan.name for plan in self.plan.files]
        if self.plan.index is not None:
            write_durably(self.place / INDEX, self.plan.index)
        sync(self.place)
        if not self.folder.exists():
            self.place.rename(self.folder)
            sync(self.folder.parent)
            return
        if self.plan.index is not None and (self.folder / INDEX).exists():
            self._lead_elsewhere([name for name in names if (self.folder / name).exists()])
        for name in names:
            os.replace(self.place / name, self.folder / name)
        sync(self.folder)
        if self.plan.index is not None:
            os.replace(self.place / INDEX, self.folder / INDEX)
            sync(self.folder)
        stale = [path for path in self.folder.iterdir() if path.name not in names and _OURS.fullmatch(path.name)]
        other = self.folder / (INDEX if self.plan.index is None else SINGLE)
        for path in [other, *stale]:
            path.unlink(missing_ok=True)
        sync(self.folder)

    def _lead_elsewhere(self, names: list[str]) -> None:
        """Let readers find the new files while those of `names` in the target are replaced."""
        if not names:
            return
        assert self.plan.index is not None
        index = json.loads(self.plan.index)
        mark = f".new-{secrets.token_hex(4)}"
        aside = {plan.name: plan.name.removesuffix(".safetensors") + f"{mark}.safetensors" for plan in self.plan.files}
        index["weight_map"] = {key: aside[name] for key, name in index["weight_map"].items()}
        passing = self.place / f"{INDEX}{mark}"
        write_durably(passing, json.dumps(index).encode())
        try:
            for name, other in aside.items():
                os.link(self.place / name, self.folder / other)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            (self.folder / INDEX).unlink()
        else:
            sync(self.folder)
            os.replace(passing, self.folder / INDEX)
        sync(self.folder)

    def _remove_leftovers(self) -> None:
        """Remove temporary folders of exports to this target whose programs are gone."""
        pattern = re.compile(re.escape(f".{self.folder.name}.") + r"[0-9a-f]{8}\.partial")
        for parent in (self.folder.parent, self.folder):
            for left in parent.iterdir() if parent.is_dir() else ():
                if pattern.fullmatch(left.name) and left.is_dir() and not _in_use(left):
                    _log.warning("%s was left by a program that died; it is removed", left)
                    shutil.rmtree(left, ignore_errors=True)


def _in_use(place: Path) -> bool:
    descriptor = os.open(place, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # somebody has it, or the file system has no locks
        return True
    finally:
        os.close(descriptor)
    return False
