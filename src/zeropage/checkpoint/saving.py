"""One save under way: a thread of each rank writes its parts, the first rank's publishes when all are there.

Ranks tell each other through files beside the data (`.report-*`), so that no collective call is made while
training goes on. Values are read where they lie: whoever is about to change them calls `await_written` first.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import threading
import time
import zlib
from collections.abc import Sequence
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
from zeropage.checkpoint.folder import METADATA, FileSum, Lock, Manifest, publish, write_durably
from zeropage.errors import CheckpointError

__all__ = ["About", "Part", "Save"]

_POLL_SECONDS = 0.005
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor that this rank writes."""

    key: str
    size: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]
    values: torch.Tensor  # of the box


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


class _File:
    """A file that knows the checksum of what was written to it."""

    def __init__(self, path: Path, ends: threading.Event) -> None:
        self._file = path.open("wb", buffering=0)
        self._ends = ends
        self.nbytes = self.crc32 = 0

    def write(self, data: Any, /) -> int:
        if self._ends.is_set():
            raise _Aborted
        view = memoryview(data).cast("B")
        self.crc32 = zlib.crc32(view, self.crc32)
        self.nbytes += len(view)
        rest = view
        while rest:
            rest = rest[self._file.write(rest) :]
        return len(view)

    def flush(self) -> None:
        """Nothing is held back."""

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class Save:
    """Writes `parts` into `staging`; on the first rank, which holds the `lock`, publishes the whole."""

    def __init__(
        self, rank: int, staging: Path, parts: Sequence[Part], about: About, lock: Lock | None, timeout_s: float
    ) -> None:
        self._rank, self._staging, self._parts, self._about = rank, staging, list(parts), about
        self._lock, self._timeout_s = lock, timeout_s
        self._began = time.monotonic()
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
        self._written.wait()

    def await_reported(self) -> None:
        """Wait until this rank's part is on the disk, or has failed."""
        self._reported.wait()

    def join(self) -> None:
        """Wait for the end; on the first rank that is when the checkpoint is published."""
        self._thread.join()

    def abort(self) -> None:
        """Give up, because another rank has failed."""
        self._ends.set()
        self._thread.join()

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
            self.problem = f"saving {self.tag} failed: {error}"
            _log.error("rank %d: %s", self._rank, self.problem)
        finally:
            self._parts.clear()
            self._written.set()
            self._reported.set()
            if self._lock is not None:
                shutil.rmtree(self._staging, ignore_errors=True)  # where it was published it has another name
                self._lock.release()

    def _write(self) -> dict[str, Any]:
        name = f"__{self._rank}_0.distcp"
        file = _File(self._staging / name, self._ends)
        try:
            entries = []
            for part in self._parts:
                start = file.nbytes
                write_blob(file, part.values)
                dtype = str(part.values.dtype).removeprefix("torch.")
                shape = list(part.values.shape)
                entries.append([part.key, part.size, part.offset, shape, dtype, start, file.nbytes - start])
            self._parts.clear()
            self._written.set()
            file.sync()
        except OSError as error:
            raise CheckpointError(
                f"{self._staging / name}, after {file.nbytes:,} bytes: {error.strerror or error}. Earlier "
                "checkpoints are as they were; make room and save again."
            ) from error
        finally:
            file.close()
        report = {"file": name, "nbytes": file.nbytes, "crc32": file.crc32, "entries": entries}
        if self._rank != 0:
            temporary = self._staging / f".writing-{self._rank}"
            write_durably(temporary, json.dumps(report).encode())
            temporary.rename(_report(self._staging, self._rank))
        return report

    def _others(self) -> list[dict[str, Any]]:
        ends = time.monotonic() + self._timeout_s
        found = []
        for rank in range(1, self._about.world):
            path = _report(self._staging, rank)
            while not path.exists():
                if self._ends.wait(_POLL_SECONDS):
                    raise _Aborted
                if time.monotonic() > ends:
                    raise CheckpointError(f"rank {rank} has not written its part within {self._timeout_s:g} s")
            found.append(json.loads(path.read_bytes()))
            path.unlink()
        return found

    def _publish(self, reports: list[dict[str, Any]]) -> None:
        metadata = pickle.dumps(_metadata(reports))
        write_durably(self._staging / METADATA, metadata)
        files = {report["file"]: FileSum(report["nbytes"], report["crc32"]) for report in reports}
        files[METADATA] = FileSum(len(metadata), zlib.crc32(metadata))
        about = self._about
        manifest = Manifest(about.tag, about.step, about.world, files, about.versions)
        publish(self._staging, manifest, about.keep, latest=about.latest)


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
