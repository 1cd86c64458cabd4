"""Files written past the page cache: every length arrives, sums are right, errors come to whoever writes on."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from zeropage.checkpoint import direct
from zeropage.checkpoint.direct import DirectFile

BLOCK = 4096


def _nothing() -> None: ...


def _write(path: Path, chunks: list[bytes], haste_after: int | None = None) -> DirectFile:
    file = DirectFile(path, _nothing)
    try:
        for index, chunk in enumerate(chunks):
            if index == haste_after:
                file.hasten()
            assert file.write(chunk) == len(chunk)
        file.finish()
    finally:
        file.close()
    return file


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """On a disk, and on a file system in memory, which may know no direct writes."""
    if request.param == "disk":
        return tmp_path
    memory = Path("/dev/shm") / f"zeropage-test-{os.getpid()}"
    memory.mkdir(exist_ok=True)
    request.addfinalizer(lambda: [*(path.unlink() for path in memory.iterdir()), memory.rmdir()])
    return memory


@pytest.mark.parametrize("sizes", [[1], [BLOCK], [BLOCK - 1, 2], [3 * BLOCK + 5, 70_000, 1], [10] * 1000])
@pytest.mark.parametrize("haste_after", [None, 0, 1])
def test_all_bytes_arrive(
    folder: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int], haste_after: int | None
) -> None:
    monkeypatch.setattr(direct, "_BUFFER", 2 * BLOCK)
    chunks = [os.urandom(size) for size in sizes]
    path = folder / "file"
    file = _write(path, chunks, haste_after)
    whole = b"".join(chunks)
    assert path.read_bytes() == whole
    assert (file.nbytes, file.crc32) == (len(whole), zlib.crc32(whole))


def test_the_source_may_change_after_write(tmp_path: Path) -> None:
    source = bytearray(b"a" * 100_000)
    file = DirectFile(tmp_path / "file", _nothing)
    file.write(source)
    source[:] = b"b" * len(source)
    file.finish()
    file.close()
    assert (tmp_path / "file").read_bytes() == b"a" * 100_000


def test_an_existing_file_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        _write(tmp_path / "file", [b"x"])
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_what_is_called_before_each_write_can_stop_it(tmp_path: Path) -> None:
    def stop() -> None:
        raise InterruptedError("stop")

    file = DirectFile(tmp_path / "file", stop)
    with pytest.raises(InterruptedError):
        file.write(b"x")
    file.close()
    assert not (tmp_path / "file").exists()
