"""An export that is killed at any of its calls to the file system: readers find the old one or the new one, whole."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zeropage as zp
from tests.harness import run
from zeropage.errors import CheckpointError
from zeropage.weights.source import INDEX, SINGLE, find_source

LAYERS = 4
SIZES = {"one": "5GB", "four": 200, "two": 400}  # bytes that hold so many files

_CALLS = ("mkdir", "posix_fallocate", "pwrite", "fsync", "link", "replace", "rename", "unlink")


def _model(value: float) -> nn.Module:
    model = nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(LAYERS)])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def _values(folder: Path) -> set[float]:
    """All values that a reader of the folder finds, as transformers reads it."""
    source = find_source(folder)
    assert len(source.places) == LAYERS
    files = {path: load_file(path) for path, _ in source.places.values()}
    return {float(v) for key, (path, _) in source.places.items() for v in files[path][key].flatten()}


def _dies_at(call: int, folder: str, size: Any, links: bool) -> None:
    """Export twos; the process is killed before its call number `call` to the file system."""
    made = 0

    def counted(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal made
            made += 1
            if made == call:
                os.kill(os.getpid(), signal.SIGKILL)
            if name == "link" and not links:
                raise OSError(errno.EPERM, "no hard links here")
            return function(*args, **kwargs)

        return wrapper

    with pytest.MonkeyPatch.context() as patch:
        for name in _CALLS:
            patch.setattr(os, name, counted(getattr(os, name), name))
        zp.export(_model(2.0), folder, size)


def _started(function: Callable[..., None], *args: Any) -> int | None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torch.distributed.checkpoint", __name__])
    process = context.Process(target=function, args=args)
    process.start()
    process.join(60)
    return process.exitcode


PAIRS = [("four", "one"), ("four", "two"), (None, "four")]


@pytest.mark.parametrize(
    ("old", "new", "links"),
    [
        *((old, new, True) for old, new in PAIRS),
        pytest.param("one", "four", True, marks=pytest.mark.slow),
        pytest.param("one", "one", True, marks=pytest.mark.slow),
        pytest.param("four", "four", True, marks=pytest.mark.slow),
        ("four", "four", False),  # links are made only where names repeat
    ],
)
def test_killed_at_every_call(old: str | None, new: str, links: bool, tmp_path: Path) -> None:
    found = []
    for call in range(1, 100):
        folder = tmp_path / str(call) / "export"
        if old is not None:
            zp.export(_model(1.0), folder, SIZES[old])
            (folder / "config.json").touch()
        code = _started(_dies_at, call, str(folder), SIZES[new], links)
        assert code in (0, -signal.SIGKILL)
        try:
            found.append(_values(folder))
        except CheckpointError:
            assert old is None or not links, "there is always one to read"
            assert not (folder / INDEX).exists() and not (folder / SINGLE).exists()
            found.append(set())
        if code == 0:
            break
        zp.export(_model(3.0), folder, SIZES[new])
        assert _values(folder) == {3.0}
        _only_an_export(folder)
    before: set[float] = set() if old is None else {1.0}
    assert found[0] == before and found[-1] == {2.0} and len(found) > 5
    told = [values for i, values in enumerate(found) if i == 0 or values != found[i - 1]]
    assert told == ([before, {2.0}] if links or old is None else [before, set(), {2.0}])
    _only_an_export(folder)


def _only_an_export(folder: Path) -> None:
    left = {path.name for path in folder.iterdir()} - {"config.json"}
    if (folder / INDEX).exists():
        assert left == {INDEX} | {path.name for path, _ in find_source(folder).places.values()}
    else:
        assert left == {SINGLE}
    assert [path.name for path in folder.parent.iterdir()] == ["export"]


def _exports_again(folder: Path, times: int) -> None:
    for value in range(times):
        zp.export(zp.shard(_model(float(value)), {"transport": "shared"}), folder, SIZES["four"])


@pytest.mark.slow
def test_a_reader_never_sees_a_mixture(tmp_path: Path) -> None:
    """`load_safetensors` while files of the same names are replaced: the values of one export, or an error."""
    zp.export(_model(0.0), tmp_path, SIZES["four"])
    ends, seen, mixed = threading.Event(), [], []

    def read() -> None:
        model = _model(-1.0)
        while not ends.is_set():
            try:
                zp.load_safetensors(model, tmp_path)
            except CheckpointError:
                continue
            values = {float(v) for parameter in model.parameters() for v in parameter.detach().aminmax()}
            seen.append(max(values))
            if len(values) > 1:
                mixed.append(values)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        run(2, _exports_again, tmp_path, 60)
    finally:
        ends.set()
        reader.join()
    assert seen and not mixed


def test_files_replaced_between_check_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zp.export(_model(1.0), tmp_path, SIZES["four"])
    model = _model(0.0)
    source = find_source(tmp_path)
    zp.export(_model(2.0), tmp_path, SIZES["four"])
    monkeypatch.setattr("zeropage.weights.loading.find_source", lambda path: source)
    with pytest.raises(CheckpointError, match=r"model-00001-of-00004\.safetensors was replaced while it was read"):
        zp.load_safetensors(model, tmp_path)


def test_two_exports_at_a_time_leave_each_other_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is being written is no leftover."""
    from zeropage.weights.draft import Draft, place_for
    from zeropage.weights.plan import plan_files

    plan = plan_files({"a": (torch.float32, (3,))}, 1000)
    for folder in (tmp_path / "new", tmp_path):
        draft = Draft(plan, folder, place_for(folder))
        with draft.made():
            zp.export(_model(1.0), folder)
            draft.check_in_sight()
        assert _values(folder) == {1.0} and not caplog.text
        dead = place_for(folder)
        dead.mkdir()
        zp.export(_model(2.0), folder)
        assert not dead.exists() and str(dead) in caplog.text
        caplog.clear()
