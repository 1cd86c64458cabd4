"""The command line: what it prints, and what `demo` starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import zeropage
from zeropage import cli

runner = CliRunner()


def test_version() -> None:
    result = runner.invoke(cli.app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"zeropage {zeropage.__version__}\n"


def test_env_as_json_and_as_tables() -> None:
    found = json.loads(runner.invoke(cli.app, ["env", "--json"]).output)
    assert found["versions"]["zeropage"] == zeropage.__version__
    assert found["versions"]["torch"] in runner.invoke(cli.app, ["env"]).output


def test_demo_starts_the_example_with_its_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[list[str]] = []

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        started.append(command)
        return subprocess.CompletedProcess(command, returncode=3)

    monkeypatch.setattr(cli.subprocess, "run", run)
    text = tmp_path / "text"
    text.write_text("words")
    options = ["--ranks", "3", "--transport", "collective", "--steps", "8"]
    options += ["--out", str(tmp_path / "out"), "--text", str(text)]
    result = runner.invoke(cli.app, ["demo", *options])
    assert result.exit_code == 3, "the example's verdict is the command's"
    assert started == [[sys.executable, str(cli.demo_program()), *options]]


def test_demo_is_the_example_of_the_repository() -> None:
    example = Path(__file__).parents[2] / "examples" / "distill.py"
    assert cli.demo_program().read_text() == example.read_text()


@pytest.mark.parametrize("wrong", [["--ranks", "0"], ["--steps", "1"], ["--transport", "pigeon"]])
def test_demo_refuses_what_cannot_be(wrong: list[str]) -> None:
    assert runner.invoke(cli.app, ["demo", *wrong]).exit_code == 2


def test_export_converts_a_checkpoint(tmp_path: Path) -> None:
    engine = zeropage.Engine(torch.nn.Linear(3, 5))
    engine.save(tmp_path / "checkpoint")
    zeropage.export(engine.module, tmp_path / "live", 30, "bf16")
    engine.close()
    options = [str(tmp_path / "checkpoint"), str(tmp_path / "out"), "--max-shard-size", "30", "--dtype", "bf16"]
    assert runner.invoke(cli.app, ["export", *options]).exit_code == 0
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert len(files) == 2 + 1
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "live").iterdir()}


@pytest.mark.parametrize(
    ("wrong", "words"), [(["--dtype", "fp16"], "no checkpoint"), (["--max-shard-size", "big"], "max_shard_size")]
)
def test_export_says_what_is_wrong(wrong: list[str], words: str, tmp_path: Path) -> None:
    result = runner.invoke(cli.app, ["export", str(tmp_path), str(tmp_path / "out"), *wrong])
    assert result.exit_code == 1
    assert words in result.output
    assert not (tmp_path / "out").exists()
