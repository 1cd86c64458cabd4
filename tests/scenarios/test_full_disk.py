"""A disk that is really full: a small tmpfs, on which a save fails at some byte of some file."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import zeropage as zp
from tests.harness import run
from zeropage.checkpoint.folder import tags
from zeropage.errors import CheckpointError

WIDTH = 32
DISK = 16 << 20
PAGE = 4096  # what a tmpfs counts in
MOST = 48  # pages: with so many left a save succeeds, also beside the one that it replaces

ALL = list(range(MOST + 1))
FAST = random.Random("full").sample(ALL[:24], 8)


@dataclass
class Told:
    """What happened with so many pages left."""

    room: int
    error: str
    whole: list[str]  # tags, while the disk was full
    resumed: int  # steps when the last save was made


@contextmanager
def _small_disk(place: Path) -> Iterator[Path]:
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(place)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def _leave(disk: Path, pages: int) -> None:
    """Fill the disk but for so many pages."""
    about = os.statvfs(disk)
    with (disk / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, about.f_bavail * about.f_frsize - pages * PAGE)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def _engine(transport: str) -> zp.Engine:
    model = _model()
    return zp.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), {"transport": transport, "timeout_s": 10})


def _train(engine: zp.Engine, steps: int = 1) -> None:
    for _ in range(steps):
        generator = torch.Generator().manual_seed(engine.global_step)
        engine.backward(engine(torch.randn(4, WIDTH, generator=generator)).square().mean())
        engine.step()


def _fills_up(transport: str, disk: Path, rooms: list[int], wait: bool) -> list[Told]:
    engine = _engine(transport)
    first = dist.get_rank() == 0
    found = []
    for room in rooms:
        folder = disk / str(room)
        _train(engine)
        engine.save(folder, tag="old")
        if first:
            _leave(disk, room)
        dist.barrier()
        _train(engine)
        error = ""
        try:
            engine.save(folder, tag="new", wait=wait)
            _train(engine, 2)
            engine.save(folder, tag="new")  # what failed beside training is told here at the latest
        except CheckpointError as raised:
            error = str(raised)
        dist.barrier()
        whole = tags(folder)
        _train(engine)
        if first:
            (disk / "filler").unlink()
        dist.barrier()
        engine.save(folder, tag="after")
        found.append(Told(room, error, whole, engine.global_step))
    engine.close()
    return found


def _trajectory(steps: int) -> list[list[torch.Tensor]]:
    engine = _engine("local")
    found = []
    for _ in range(steps + 1):
        found.append([zp.full(parameter) for parameter in engine.module.parameters()])
        _train(engine)
    return found


def _check(disk: Path, told: list[Told]) -> None:
    weights = _trajectory(told[-1].resumed)
    for one in told:
        folder = disk / str(one.room)
        assert set(one.whole) <= {"old", "new"} and "old" in one.whole
        assert sorted(path.name for path in folder.iterdir()) == sorted([".lock", "latest", "after", *one.whole])
        for tag in [*one.whole, "after", None]:
            engine = _engine("local")
            step = engine.load(folder, tag).global_step
            assert step == one.resumed or tag in one.whole
            for parameter, expected in zip(engine.module.parameters(), weights[step], strict=True):
                assert torch.equal(zp.full(parameter), expected), (one, tag)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("transport", ["shared", "collective"])
@pytest.mark.parametrize("rooms", [FAST, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_save_fails_and_a_later_one_works(transport: str, rooms: list[int], wait: bool, tmp_path: Path) -> None:
    with _small_disk(tmp_path / "disk") as disk:
        told, other = run(2, _fills_up, transport, disk, rooms, wait)
        assert told == other
        for one in told:
            if one.error:
                assert str(disk / str(one.room)) in one.error, one
                assert "No space left" in one.error and "make room" in one.error, one
        assert all(one.error for one in told if one.room < 12)
        assert not any(one.error for one in told if one.room == MOST)
        _check(disk, told)


# -- exports


def _exports(disk: Path, rooms: list[int]) -> list[str]:
    model = zp.shard(_model(), {"transport": "shared"})
    found = []
    for room in rooms:
        if dist.get_rank() == 0:
            _leave(disk, room)
        dist.barrier()
        try:
            zp.export(model, disk / "export", max_shard_size=5000)
            found.append("")
        except CheckpointError as error:
            found.append(str(error))
        if dist.get_rank() == 0:
            (disk / "filler").unlink()
        dist.barrier()
    return found


def test_an_export_fails_and_the_old_one_stays(tmp_path: Path) -> None:
    with _small_disk(tmp_path / "disk") as disk:
        old = _model()
        with torch.no_grad():
            for parameter in old.parameters():
                parameter.fill_(3.0)
        zp.export(old, disk / "export", max_shard_size=5000)
        told, other = run(2, _exports, disk, [0, 1, 2, 3])
        assert told == other
        for text in told:
            assert str(disk / "export") in text and "No space left" in text and "make room" in text
        found = {key: value for file in disk.glob("export/*.safetensors") for key, value in load_file(file).items()}
        assert len(found) == 4 and all(bool((value == 3.0).all()) for value in found.values())
        assert len(list((disk / "export").iterdir())) == len(list(disk.glob("export/model*")))
        assert run(2, _exports, disk, [64]) == [[""], [""]]
