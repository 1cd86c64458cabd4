"""A folder of checkpoints: how one is begun, published, found, checked and removed.

    folder/latest                   the tag that `load` takes by default
    folder/step100/manifest.json    every file of the checkpoint with its size and checksum
    folder/step100/.metadata, ...   the checkpoint itself
    folder/.saving-step100-...      one that is being written, or was when its program died

A checkpoint gets its name by one rename when all its files are on the disk, and `latest` follows by another. So a
reader sees a whole checkpoint or none.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from zlib_ng import zlib_ng

from zeropage.errors import CheckpointError

__all__ = [
    "LATEST", "METADATA", "FileSum", "Lock", "Manifest", "check_tag", "find", "locate", "publish", "stage", "sync",
    "tags", "write_durably",
]  # fmt: skip

LATEST = "latest"
METADATA = ".metadata"
_MANIFEST = "manifest.json"
_STAGING = ".saving-"
_REMOVING = ".removing-"
_PIECE = 1 << 20  # bytes that are checked at once: they stay in the cache
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FileSum:
    """What a file must be: its length in bytes, and the CRC-32 of all of them."""

    nbytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of. Written last: where it is, everything is."""

    tag: str
    step: int
    world: int
    files: dict[str, FileSum]
    versions: dict[str, str]
    format: int = 2
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def write(self, path: Path) -> None:
        write_durably(path / _MANIFEST, json.dumps(asdict(self), indent=1).encode())

    @staticmethod
    def read(path: Path) -> Manifest | None:
        """The manifest of the checkpoint at `path`; None for one of format 1, which had none.

        Raises:
            CheckpointError: it is damaged, or names files outside of the checkpoint.
        """
        file = path / _MANIFEST
        if not file.exists():
            return None
        try:
            values = json.loads(file.read_text())
            files = {str(name): FileSum(int(s["nbytes"]), int(s["crc32"])) for name, s in values.pop("files").items()}
            manifest = Manifest(files=files, **values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{file} is damaged ({error}); load another tag") from error
        for name in files:
            if not name or Path(name).name != name or name == "..":
                raise CheckpointError(f"{file} names {name!r}, which is not a file of this checkpoint; it is refused")
        return manifest

    def check(self, path: Path, names: Iterable[str] | None = None) -> None:
        """Raise CheckpointError unless the files are as they were written; reads those of `names` to the end."""
        for name, wanted in self.files.items():
            file = path / name
            if not file.exists():
                raise CheckpointError(f"{file} is missing; load another tag, or fetch the file")
            if file.stat().st_size != wanted.nbytes:
                raise CheckpointError(
                    f"{file} has {file.stat().st_size:,} bytes and should have {wanted.nbytes:,}; load another tag"
                )
        for name in self.files if names is None else names:
            if _crc32(path / name) != self.files[name].crc32:
                raise CheckpointError(f"{path / name} is damaged: its checksum is wrong; load another tag")


def _crc32(path: Path) -> int:
    found = 0
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        buffer = bytearray(_PIECE)
        while count := file.readinto(buffer):
            found = zlib_ng.crc32(memoryview(buffer)[:count], found)
    return found


class Lock:
    """Who holds it saves to the folder; the kernel lets go of it if the process dies.

    Raises:
        CheckpointError: somebody else is saving there.
    """

    def __init__(self, folder: Path, name: str = ".lock") -> None:
        self._file: IO[bytes] = (folder / name).open("wb")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise CheckpointError(
                f"another job is saving to {folder} at this moment; give each job a folder of its own"
            ) from None

    def release(self) -> None:
        self._file.close()


def check_tag(tag: str) -> None:
    if not tag or tag.startswith(".") or "/" in tag or "\0" in tag or tag == LATEST:
        raise CheckpointError(f"tag {tag!r} cannot name a checkpoint; use letters and digits")


def stage(folder: Path, tag: str) -> Path:
    """A new empty folder to write a checkpoint in; what dead programs left is removed. The lock must be held."""
    for left in [*folder.glob(f"{_STAGING}*"), *folder.glob(f"{_REMOVING}*")]:
        _log.warning("%s was left by a program that died; it is removed", left)
        shutil.rmtree(left, ignore_errors=True)
    staging = folder / f"{_STAGING}{tag}-{uuid.uuid4().hex[:8]}"
    staging.mkdir()
    return staging


def publish(staging: Path, manifest: Manifest, keep: int | None, *, latest: bool = True) -> None:
    """Give the checkpoint in `staging` its name, point `latest` at it, then remove all but the newest `keep`."""
    folder, tag = staging.parent, manifest.tag
    manifest.write(staging)
    sync(staging)
    pointer = folder / f".{LATEST}.new"
    if latest:
        try:
            write_durably(pointer, tag.encode())  # the last thing that needs room, before anything is renamed
        except OSError:
            pointer.unlink(missing_ok=True)
            raise
    target = folder / tag
    if target.exists():
        _exchange(staging, target)
        _remove(staging)
    else:
        staging.rename(target)
    sync(folder)
    if latest:
        pointer.rename(folder / LATEST)
        sync(folder)
    if keep is not None:
        for old in tags(folder)[:-keep]:
            if old != tag:
                _remove(folder / old)


def tags(folder: Path) -> list[str]:
    """The tags of all whole checkpoints in `folder`, oldest first."""
    found = [path.parent for path in folder.glob(f"*/{METADATA}") if not path.parent.name.startswith(".")]
    return [path.name for path in sorted(found, key=lambda path: ((path / METADATA).stat().st_mtime_ns, path.name))]


def find(folder: Path, tag: str | None) -> Path:
    """The checkpoint of that tag, or the latest one.

    Raises:
        CheckpointError: it is not there; names those that are.
    """
    if tag is None:
        pointer = folder / LATEST
        if not pointer.exists():
            raise CheckpointError(f"{folder} holds no checkpoint: there is no file {LATEST!r}{_others(folder)}")
        tag = pointer.read_text().strip()
    check_tag(tag)
    path = folder / tag
    if not (path / METADATA).exists():
        raise CheckpointError(f"{path} is not a checkpoint: it has no {METADATA} file{_others(folder)}")
    return path


def locate(path: Path) -> Path:
    """`path` itself if it is a checkpoint, else the latest one in it. Raises as `find` does."""
    return path if (path / METADATA).exists() else find(path, None)


def _others(folder: Path) -> str:
    found = tags(folder)
    return f"; tags that are there: {', '.join(found[-8:])}" if found else "; name a folder that engine.save wrote"


def write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    """In one step as far as readers see, then the files."""
    hidden = path.with_name(f"{_REMOVING}{path.name}-{uuid.uuid4().hex[:8]}")
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _exchange(one: Path, other: Path) -> None:
    """Let two folders change names in one step (Linux); two steps where the system has no such call."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        failed = True
    else:
        failed = rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) != 0
    if failed:
        aside = one.with_name(f"{_REMOVING}{other.name}-{uuid.uuid4().hex[:8]}")
        other.rename(aside)
        one.rename(other)
        aside.rename(one)


def sync(folder: Path) -> None:
    """Bring the names in `folder` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
