"""A rank is killed at a chosen point of a save: at some byte of its file, or before each of its calls that publish.

Those calls (fsync, rename, unlink ...) are counted in the rank that is to die, so every point has its case: after the
data and before its sum, between the report and the publication, between the manifest and the rename, between the
rename and `latest`, while the old checkpoint is removed.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import run
from tests.scenarios.test_saving import _close, _engine, _reference, _train, _weights

_CALLS = ("fsync", "rename", "replace", "unlink", "mkdir", "rmdir")
_LAST = 60  # more calls than a save makes


def _die_at_call(number: int) -> None:
    """Kill this process before its call of that number, counted from now."""
    made = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal made
            made += 1
            if made == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return wrapper

    for name in _CALLS:  # for good: this process is of one use
        setattr(os, name, counted(getattr(os, name)))


def _die_at_byte(number: int) -> None:
    """Let the kernel kill this process when a file of it grows beyond so many bytes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (number, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _rank(
    rank: int, meeting_place: str, folder: str, transport: str, wait: bool, tags: list[str], victim: int, die: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting_place}", rank=rank, world_size=2)
    engine = _engine(transport, timeout_s=600)
    _train(engine)
    engine.save(folder, tag=tags[0])
    _train(engine)
    if rank == victim:
        die[0](die[1])
    engine.save(folder, tag=tags[1], wait=wait, keep=1)
    _train(engine)
    engine.close()


def _resumes(transport: str, folder: Path) -> tuple[int, list[torch.Tensor], str]:
    """The step and weights that are found, and what is said when the next save cleans up."""
    engine = _engine(transport)
    step = engine.load(folder).global_step
    weights = _weights(engine)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("zeropage")
    logger.addHandler(handler)
    try:
        _train(engine)
        engine.save(folder, tag="next", keep=1)
    finally:
        logger.removeHandler(handler)
    engine.close()
    return step, weights, "\n".join(said)


def _killed(folder: Path, transport: str, wait: bool, tags: list[str], victim: int, die: tuple[Any, int]) -> int | None:
    """The step that was found afterwards; None if the victim lived, so that the point is beyond the save."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torch.distributed.checkpoint", __name__])
    folder.mkdir()
    arguments = (str(folder / "meet"), str(folder / "saves"), transport, wait, tags, victim, die)
    ranks = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    if codes == [0, 0]:
        return None
    assert codes[victim] in (-signal.SIGKILL, -signal.SIGXFSZ), codes
    assert codes[1 - victim] not in (None, 0, -signal.SIGKILL), "the other one ends by itself, with an error"
    saves = folder / "saves"
    left = [path.name for path in saves.iterdir() if path.name.startswith((".saving-", ".removing-"))]
    (step, weights, said), (other, _, _) = run(2, _resumes, transport, saves)
    assert step == other and step in (1, 2)
    _close(weights, _reference(step))
    for name in left:
        assert f"{name} was left by a program that died" in said
    assert sorted(path.name for path in saves.iterdir()) == [".lock", "latest", "next"]
    return step


def _bytes_of_a_rank(transport: str, folder: Path) -> int:
    engine = _engine(transport)
    _train(engine)
    engine.save(folder)
    engine.close()
    return max(file.stat().st_size for file in folder.glob(f"step1/__{dist.get_rank()}_*"))


TAGS = {"a new tag": ["one", "two"], "the same tag": ["same", "same"]}
WAYS = [(transport, wait) for transport in ("shared", "collective") for wait in (True, False)]


def _every_call(folder: Path, transport: str, wait: bool, tags: list[str], victim: int, calls: range) -> list[int]:
    found = []
    for call in calls:
        step = _killed(folder / str(call), transport, wait, tags, victim, (_die_at_call, call))
        if step is None:
            break
        found.append(step)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("tags", TAGS)
@pytest.mark.parametrize("wait", [True, False])
def test_killed_before_every_call(wait: bool, tags: str, victim: int, tmp_path: Path) -> None:
    """From one call on the new checkpoint is found, before it the old one."""
    found = _every_call(tmp_path, "shared", wait, TAGS[tags], victim, range(1, _LAST))
    assert 2 <= len(found) < _LAST - 1
    assert found == sorted(found) and found[0] == 1
    if victim == 0:
        assert found[-1] == 2 and len(found) > 8


@pytest.mark.parametrize(("transport", "wait"), [WAYS[0], WAYS[3]])
def test_killed_before_some_calls(transport: str, wait: bool, tmp_path: Path) -> None:
    for call in (3, 6):
        assert _every_call(tmp_path, transport, wait, TAGS["the same tag"], 0, range(call, call + 1)) in ([1], [2])


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(("transport", "wait"), WAYS)
def test_killed_at_some_bytes(transport: str, wait: bool, victim: int, tmp_path: Path) -> None:
    """While it writes its values: the old checkpoint is found."""
    most = min(run(2, _bytes_of_a_rank, transport, tmp_path / "measured"))
    for number in (0, most // 7, most // 2, most - 1):
        die = (_die_at_byte, number)
        assert _killed(tmp_path / str(number), transport, wait, TAGS["a new tag"], victim, die) == 1
