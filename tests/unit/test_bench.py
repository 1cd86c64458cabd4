"""`zeropage bench`: it runs, says all it promises, leaves the folder as it was, and predicts as its docs say."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from zeropage import cli
from zeropage.bench import disk
from zeropage.bench.expect import Model, Move, Rates, expect
from zeropage.bench.ranks import ask_ranks
from zeropage.bench.settings import default_ranks
from zeropage.errors import OffloadError, PeerLostError

runner = CliRunner()
TINY = ["--ranks", "2", "--sizes", "4KiB,64KiB", "--seconds", "0.001", "--disk-size", "64KiB", "--tokens", "2"]


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_json_is_complete_and_the_folder_is_as_before(tmp_path: Path, precision: str) -> None:
    (tmp_path / "mine").write_text("kept")
    options = [*TINY, "--folder", str(tmp_path), "--precision", precision, "--parameters", "1e6", "--json"]
    result = runner.invoke(cli.app, ["bench", *options])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    ways = [verdict["name"] for verdict in found["transports"] if verdict["can_run"]] + ["torch.distributed"]
    moves = [(move["by"], move["what"], move["nbytes"]) for move in found["moves"]]
    expected = {(way, what, size) for way in ways for what in ("gather", "reduce") for size in (4 << 10, 64 << 10)}
    assert set(moves) == expected and len(moves) == len(expected)
    assert "collective" in ways and "local" not in ways
    assert [rate["what"] for rate in found["memory"]] == ["copy", "add in place", "cast bf16 to fp32"]
    compute = [(rate["what"], rate["precision"]) for rate in found["compute"]]
    assert compute == [("matmul", "fp32"), ("matmul", "bf16"), ("layers", precision)]
    assert found["disk"]["nbytes"] == 64 << 10 and found["disk"]["folder"] == str(tmp_path)
    assert [one["transport"] for one in found["expected"]] == ways[:-1]
    numbers = [found["disk"]["write"], found["disk"]["read"], found["optimizer_ns"]]
    numbers += [one["rate"] for one in found["memory"] + found["compute"]]
    numbers += [move[key] for move in found["moves"] for key in ("seconds", "processor")]
    numbers += [one[key] for one in found["expected"] for key in ("compute", "gather", "reduce", "optimizer", "step")]
    assert all(number > 0 for number in numbers)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_one_rank_has_nothing_to_exchange(tmp_path: Path) -> None:
    options = [*TINY, "--ranks", "1", "--folder", str(tmp_path), "--parameters", "1e6"]
    shown = runner.invoke(cli.app, ["bench", *options]).output
    assert "local" in shown and "GFLOP/s" in shown and "Attention" in shown
    assert "torch.distributed" not in shown


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--ranks", "0"], "--ranks 0: at least one rank"),
        (["--sizes", "big"], "--sizes='big' cannot be read"),
        (["--sizes", "1"], "1 bytes cannot be cut for 2 ranks"),
        (["--sizes", "1TB"], "take fewer --ranks or smaller --sizes"),
        (["--disk-size", "0"], "--disk-size='0' must be at least one byte"),
        (["--seconds", "0"], "--seconds 0"),
        (["--seconds", "nan"], "--seconds nan"),
        (["--parameters", "nan"], "--parameters nan"),
        (["--parameters", "0"], "--parameters 0"),
        (["--tokens", "0"], "--tokens 0"),
        (["--folder", "/nowhere/at/all"], "--folder /nowhere/at/all: No such file"),
        (["--disk-size", "1000000TB"], "are to be written and"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_starts(
    wrong: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr("zeropage.bench.run.probe_transports", lambda: ())  # it tries whether processes can share
    result = runner.invoke(cli.app, ["bench", *TINY, "--folder", str(tmp_path), *wrong])
    assert result.exit_code == 1
    assert words in " ".join(result.output.split())
    assert list(tmp_path.iterdir()) == []


def test_unknown_precisions_are_usage_errors() -> None:
    assert runner.invoke(cli.app, ["bench", "--precision", "fp8"]).exit_code == 2


def test_ranks_are_at_most_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, ranks in ((1, 1), (3, 3), (64, 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert default_ranks() == ranks


def test_a_rank_that_fails_is_heard() -> None:
    """Its last words are in the message, and the other one does not go on."""
    with pytest.raises(PeerLostError, match=r"(?s)rank 1: exit status 1; .*KeyError: 'fp7'") as told:
        ask_ranks(2, 1, {"threads": 1, "precision": "fp7", "tokens": 1, "seconds": 0.1, "transports": []})
    assert "rank 0" in str(told.value)
    assert _ranks_of(os.getpid()) == []


@pytest.mark.parametrize(
    "name", ["SIGKILL", *(pytest.param(name, marks=pytest.mark.slow) for name in ("SIGINT", "SIGTERM"))]
)
def test_nothing_stays_behind_when_it_is_interrupted(tmp_path: Path, name: str) -> None:
    """Neither a file nor a process, also when the command gets no chance to clean up."""
    command = [sys.executable, "-c", "from zeropage.cli import app; app()", "bench", *TINY, "--folder", str(tmp_path)]
    command += ["--seconds", "60"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_without_noise()) as bench:
        _until(lambda: len(_ranks_of(bench.pid)) == 2)
        found = _ranks_of(bench.pid)
        bench.send_signal(signal.Signals[name])
        bench.wait(30)
    _until(lambda: not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in found))
    assert list(tmp_path.iterdir()) == []


def _without_noise() -> dict[str, str]:
    return os.environ | {"PYTHONWARNINGS": "ignore"}


def _ranks_of(pid: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(pid).children() if "zeropage.bench.rank" in child.cmdline()]


def _until(true: Callable[[], bool]) -> None:
    for _ in range(600):
        if true():
            return
        time.sleep(0.05)
    raise AssertionError("waited half a minute in vain")


# -- the disk


def test_the_file_has_no_name_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[Path]] = []
    write = os.pwritev

    def watched(*arguments: object) -> int:
        seen.append(list(tmp_path.iterdir()))
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwritev", watched)
    rates = disk.measure_disk(tmp_path, 20 << 20)
    assert rates.nbytes == 20 << 20
    assert len(seen) >= 3 and not any(seen)


def test_a_file_system_without_direct_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refused(path: object, flags: int, *more: object, **others: object) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct access")
        return opened(path, flags, *more, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refused)
    assert not disk.measure_disk(tmp_path, 5000).direct
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OffloadError, match=rf"{tmp_path}: 8,192 bytes cannot be written.*No space left"):
        disk.measure_disk(tmp_path, 5000)
    assert list(tmp_path.iterdir()) == []


# -- what is expected


RATES = Rates(flops=1e12, ns=2.0)


def test_a_step_is_computing_moving_and_stepping() -> None:
    """1e9 parameters in bf16: 2e9 bytes in units of 1e8, gathered twice and reduced once, nothing to be hidden."""
    gather = Move("gather", "collective", 10**8, seconds=0.1, processor=0.1)
    reduce = Move("reduce", "collective", 10**8, seconds=0.2, processor=0.3)
    found = expect(Model(1e9, 1000, "bf16"), 2, RATES, "collective", gather, reduce)
    assert found.compute == pytest.approx(6.0)
    assert found.gather == pytest.approx(2 * 20 * 0.1)
    assert found.reduce == pytest.approx(20 * 0.2)
    assert found.hidden == 0
    assert found.optimizer == pytest.approx(1.0)
    assert found.step == pytest.approx(6 + 4 + 4 + 1)


def test_waiting_is_hidden_as_far_as_there_is_computing() -> None:
    gather = Move("gather", "collective", 10**8, seconds=0.1, processor=0.02)
    long = expect(Model(1e9, 1000, "bf16"), 2, RATES, "collective", gather)
    assert long.hidden == pytest.approx(2 * 20 * 0.08)
    assert long.step == pytest.approx(6 + 2 * 20 * 0.02 + 1)
    short = expect(Model(1e9, 1, "bf16"), 2, RATES, "collective", gather)
    assert short.hidden == pytest.approx(short.compute) == pytest.approx(0.006)


def test_fp32_and_checkpointing_cost_more() -> None:
    gather = Move("gather", "shared", 10**8, seconds=0.1, processor=0.1)
    plain = expect(Model(1e9, 1000, "bf16"), 2, RATES, "shared", gather)
    wide = expect(Model(1e9, 1000, "fp32"), 2, RATES, "shared", gather)
    again = expect(Model(1e9, 1000, "bf16", checkpointing=True), 2, RATES, "shared", gather)
    assert wide.gather == pytest.approx(2 * plain.gather)
    assert again.compute == pytest.approx(8 / 6 * plain.compute)
    assert again.gather == pytest.approx(1.5 * plain.gather)


def test_one_rank_moves_nothing() -> None:
    found = expect(Model(1e6, 10, "fp32"), 1, RATES, "local")
    assert (found.gather, found.reduce, found.hidden) == (0, 0, 0)
