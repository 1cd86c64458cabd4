"""One save under way: a thread of each rank writes its parts, the first rank's publishes when all are there.

Ranks tell each other through files beside the data (`.report-*`), so that no collective call is made while
training goes on. Values are read where they lie: whoever is about to change them calls `await_written` first.

Each rank holds a lock: the first one that of the folder, the others one of their own until their report is there, or
all know that they have failed. So the first rank does not wait for one that died.
"""

from __future__ import annotations

import json
import logging
import pickle
import shutil
import threading
import time
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from zeropage.checkpoint.blob import write_blob
from zeropage.checkpoint.contents import Stateful, Training, entries_of
from zeropage.checkpoint.direct import DirectFile
from zeropage.checkpoint.folder import METADATA, FileSum, Lock, Manifest, check_tag, publish, stage, write_durably
from zeropage.checkpoint.parts import Part
from zeropage.checkpoint.verdict import raise_together
from zeropage.errors import CheckpointError

__all__ = ["About", "Save", "begin_save", "end_save"]

_POLL_SECONDS = 0.002
_SPEAK_SECONDS = 5.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class About:
    """What is said about a checkpoint, apart from its tensors."""

    tag: str
    step: int
    world: int
    keep: int | None
    versions: dict[str, str]
    latest: bool = True  # whether the file `latest` is to name it


class _Aborted(Exception):
    """Another rank has failed: what this one writes is of no use."""


def begin_save(
    engine: Training,
    folder: Path,
    tag: str | None,
    client_state: Mapping[str, Any] | None,
    *,
    keep: int | None,
    trainable_only: bool,
    leave_out: Collection[str],
    latest: bool,
    data_loader: Stateful | None,
) -> Save:
    """Begin to write what `Engine.save` says. The values are read while they lie where they are."""
    tag = tag if tag is not None else f"step{engine.global_step}"
    for pager in engine.pagers:
        pager.close_batch()
        pager.transport.meet(f"save {tag}")
    transport = engine.pagers[0].transport
    staging: Path | None = None
    lock: Lock | None = None
    entries: list[tuple[str, Part]] = []
    problem = ""
    try:
        try:
            check_tag(tag)
            if keep is not None and keep < 1:
                raise CheckpointError(f"keep={keep} would leave no checkpoint; keep 1 or more")
            entries = entries_of(
                engine, client_state, trainable_only=trainable_only, leave_out=leave_out, data_loader=data_loader
            )
            if transport.rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
                lock = Lock(folder)
                staging = stage(folder, tag)
        except (CheckpointError, OSError) as error:
            problem = str(error)
        made = transport.meet(f"begin to save {tag}", b"" if staging is None else staging.name.encode())[0].decode()
        if made and not (folder / made).is_dir():
            problem = problem or f"{folder} is another folder there: all ranks must save to one file system"
        elif made and lock is None:
            try:
                lock = Lock(folder / made, _lock_of(transport.rank))
            except OSError as error:
                problem = problem or str(error)
        raise_together(transport, f"save to {folder}", problem)
    except BaseException:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
        if lock is not None:
            lock.release()
        raise
    about = About(tag, engine.global_step, transport.world, keep, {"torch": str(torch.__version__)}, latest)
    assert lock is not None
    return Save(transport.rank, folder / made, entries, about, lock, engine.pagers[0].config.timeout_s)


def end_save(engine: Training, saving: Save) -> None:
    """Wait until the checkpoint is published (all ranks together).

    Raises:
        CheckpointError: a rank could not write its part. What was there before is as it was.
    """
    transport = engine.pagers[0].transport
    saving.await_reported()
    try:
        raise_together(transport, f"write {saving.tag}", saving.problem)
        saving.join()
        raise_together(transport, f"publish {saving.tag}", saving.problem)
    except BaseException:
        saving.abort()
        raise


class Save:
    """Writes `entries` (key and values) into `staging`; the first rank publishes the whole. Lets go of `lock`."""

    def __init__(
        self,
        rank: int,
        staging: Path,
        entries: Sequence[tuple[str, Part]],
        about: About,
        lock: Lock,
        timeout_s: float,
    ) -> None:
        self._rank, self._staging, self._entries, self._about = rank, staging, list(entries), about
        self._lock, self._timeout_s = lock, timeout_s
        self._nbytes = sum(part.values.numel() * part.values.element_size() for _, part in entries)
        self._path = staging / f"__{rank}_0.distcp"
        self._file = DirectFile(self._path, self._look)
        self._began = time.monotonic()
        self._speaks = self._began + _SPEAK_SECONDS
        self._ends = threading.Event()
        self._written, self._reported = threading.Event(), threading.Event()
        self.problem = ""
        self._thread = threading.Thread(target=self._run, name=f"zeropage saves {about.tag}")
        self._thread.start()

    @property
    def tag(self) -> str:
        return self._about.tag

    def await_written(self) -> None:
        """Wait until this rank's values have been read; they may change from then on."""
        self._file.hasten()
        self._written.wait()

    def await_reported(self) -> None:
        """Wait until this rank's part is on the disk, or has failed."""
        self._reported.wait()

    def join(self) -> None:
        """Wait for the end; on the first rank that is when the checkpoint is published."""
        self._thread.join()

    def abort(self) -> None:
        """Give up, because a rank has failed."""
        self._ends.set()
        self._thread.join()
        self._lock.release()

    # -- in the thread

    def _run(self) -> None:
        try:
            report = self._write()
            self._reported.set()
            if self._rank == 0:
                self._publish([report, *self._others()])
                _log.info("saved %s in %.2f s", self.tag, time.monotonic() - self._began)
        except _Aborted:
            pass
        except Exception as error:
            self.problem = f"saving {self.tag} failed: {_told(error, self._staging)}"
            _log.error("rank %d: %s", self._rank, self.problem)
        finally:
            self._entries.clear()
            self._written.set()
            self._reported.set()
            self._file.close()
            if self._rank == 0:
                shutil.rmtree(self._staging, ignore_errors=True)  # where it was published it has another name
                self._lock.release()

    def _look(self) -> None:
        """Called before each write: stop if that is of no use, and say how far this is."""
        if self._ends.is_set():
            raise _Aborted
        if time.monotonic() > self._speaks:
            self._speaks += _SPEAK_SECONDS
            done = self._file.nbytes / self._nbytes
            _log.info("saving %s: rank %d has written %.0f %% of its part", self.tag, self._rank, 100 * done)

    def _write(self) -> dict[str, Any]:
        name = self._path.name
        try:
            written = []
            start = 0
            for key, part in self._entries:
                length = write_blob(self._file, part.values)
                dtype = str(part.values.dtype).removeprefix("torch.")
                written.append([key, part.shape, part.box.offset, part.box.size, dtype, start, length])
                start += length
            self._entries.clear()
            self._written.set()
            self._file.finish()
        except OSError as error:
            raise CheckpointError(_told(error, f"{self._path}, after {self._file.nbytes:,} bytes")) from error
        report = {"file": name, "nbytes": self._file.nbytes, "crc32": self._file.crc32, "entries": written}
        if self._rank != 0:
            temporary = self._staging / f".writing-{self._rank}"
            write_durably(temporary, json.dumps(report).encode())
            temporary.rename(_report(self._staging, self._rank))
            self._lock.release()
        return report

    def _others(self) -> list[dict[str, Any]]:
        ends = time.monotonic() + self._timeout_s
        found = []
        for rank in range(1, self._about.world):
            path = _report(self._staging, rank)
            while not path.exists():
                if self._ends.wait(_POLL_SECONDS):
                    raise _Aborted
                if not _is_held(self._staging, rank) and not path.exists():
                    raise CheckpointError(f"rank {rank} died, or gave up, before its part was on the disk")
                if time.monotonic() > ends:
                    raise CheckpointError(f"rank {rank} has not written its part within {self._timeout_s:g} s")
            found.append(json.loads(path.read_bytes()))
            path.unlink()
            (self._staging / _lock_of(rank)).unlink()
        return found

    def _publish(self, reports: list[dict[str, Any]]) -> None:
        metadata = pickle.dumps(_metadata(reports))
        write_durably(self._staging / METADATA, metadata)
        files = {report["file"]: FileSum(report["nbytes"], report["crc32"]) for report in reports}
        files[METADATA] = FileSum(len(metadata), zlib.crc32(metadata))
        about = self._about
        manifest = Manifest(about.tag, about.step, about.world, files, about.versions)
        publish(self._staging, manifest, about.keep, latest=about.latest)


def _told(error: Exception, where: object) -> str:
    if not isinstance(error, OSError):
        return str(error)
    what = f"{error.filename or where}: {error.strerror or error}"
    return f"{what}. Earlier checkpoints are as they were; make room and save again."


def _lock_of(rank: int) -> str:
    return f".alive-{rank}"


def _is_held(staging: Path, rank: int) -> bool:
    try:
        Lock(staging, _lock_of(rank)).release()
    except CheckpointError:
        return True
    return False


def _report(staging: Path, rank: int) -> Path:
    return staging / f".report-{rank}"


def _metadata(reports: list[dict[str, Any]]) -> Metadata:
    """What torch.distributed.checkpoint reads first: where each part of each tensor is."""
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for report in reports:
        for key, size, offset, shape, dtype, start, length in report["entries"]:
            described = tensors.setdefault(
                key, TensorStorageMetadata(TensorProperties(dtype=getattr(torch, dtype)), torch.Size(size), [])
            )
            index = MetadataIndex(key, torch.Size(offset), len(described.chunks))
            described.chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)))
            places[index] = _StorageInfo(report["file"], start, length)
    return Metadata(dict(tensors), planner_data={key: (key,) for key in tensors}, storage_data=places)
