"""Programs that end, or die of an exception, while a save with `wait=False` is in flight."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import zeropage as zp
from tests.scenarios.test_saving import WIDTH, _engine, _loads_as
from zeropage.checkpoint.folder import tags

LONG = 60  # seconds after which a program that should have ended within a few is given up

PROGRAM = f"""
import os, sys, time
import torch, zeropage as zp
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
folder, transport = sys.argv[1:]
rank = int(os.environ["RANK"])
model = nn.Sequential(nn.Linear({WIDTH}, {WIDTH}), nn.Tanh(), nn.Linear({WIDTH}, {WIDTH}))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine = zp.Engine(model, optimizer, {{"transport": transport, "timeout_s": 600}})

def train():
    generator = torch.Generator().manual_seed(engine.global_step)
    engine.backward(engine(torch.randn(4, {WIDTH}, generator=generator)).square().mean())
    engine.step()

train()
engine.save(folder)
train()
fsync = os.fsync

def slow(file):
    time.sleep(0.5)
    fsync(file)

os.fsync = slow  # a slow disk: the save is in flight for a while
engine.save(folder, wait=False)
assert not os.path.exists(folder + "/step2")
"""

ENDINGS = {
    "falls off the end": "",
    "goes on": "train()\ntrain()",
    "exits": "sys.exit(3)",
    "raises": "if rank == 1: raise ValueError('of its own')\nwhile True: train()",
    "raises on the first": "if rank == 0: raise ValueError('of its own')\nwhile True: train()",
    "raises in a with": "with engine:\n  if rank == 1: raise ValueError('of its own')\n  while True: train()",
    "is killed": "if rank == 1: os.kill(os.getpid(), 9)\nwhile True: train()",
    "is killed as the first": "if rank == 0: os.kill(os.getpid(), 9)\nwhile True: train()",
}
WHOLE = ("falls off the end", "goes on", "exits")


def _free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def _run(folder: Path, transport: str, ending: str) -> list[tuple[int, str]]:
    """Exit codes, and what was printed, of two ranks of a program."""
    environment = os.environ | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "PYTHONPATH": str(Path(zp.__file__).parents[1]),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM + ENDINGS[ending], str(folder), transport],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=LONG)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, text) for rank, text in zip(ranks, said, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("transport", ["shared", "collective"])
def test_leaving(transport: str, ending: str, tmp_path: Path) -> None:
    ended = _run(tmp_path, transport, ending)
    if ending in WHOLE:
        expected = 3 if ending == "exits" else 0
        assert [code for code, _ in ended] == [expected] * 2, ended
        assert tags(tmp_path) == ["step1", "step2"]
        _loads_as(tmp_path, None, 2)
    else:
        assert all(code != 0 for code, _ in ended), ended
        assert "killed" in ending or any("of its own" in text for _, text in ended)
        assert tags(tmp_path) in (["step1"], ["step1", "step2"])
        step = 2 if (tmp_path / "latest").read_text() == "step2" else 1
        _loads_as(tmp_path, None, step)
    engine = _engine("local")
    engine.save(tmp_path, tag="next")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == [".lock"], "leftovers"
