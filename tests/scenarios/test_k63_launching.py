"""Import is light; one process, torchrun and srun all start alike; what a launcher forgot is named."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropage as zp
from tests.harness import run
from tests.scenarios.beside import plain_copy

LAUNCH_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_NTASKS",
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE",
)  # fmt: skip

SCRIPT = """
import json, pathlib, sys, time
began = time.perf_counter()
import torch
loaded = time.perf_counter()
import zeropage as zp
seconds = time.perf_counter() - loaded
heavy = sorted({"deepspeed", "mpi4py", "ninja", "transformers", "triton", "safetensors"} & set(sys.modules))

torch.manual_seed(0)
model = torch.nn.Linear(7, 5)
engine = zp.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
x = torch.ones(3, 7)
engine.backward(engine(x).square().mean())
applied = engine.step().applied
weight = zp.full(model.weight).flatten().tolist()
paged = zp.is_paged(model.weight)
transport = engine.pagers[0].transport
engine.close()
found = json.dumps({
    "rank": transport.rank, "world": transport.world, "transport": transport.name, "applied": applied, "paged": paged,
    "weight": weight, "heavy": heavy, "torch_s": loaded - began, "zeropage_s": seconds,
})
pathlib.Path(sys.argv[1], f"{transport.rank}.json").write_text(found)  # lines on one stdout would mix
"""


def _expected() -> list[float]:
    model = plain_copy(lambda: nn.Linear(7, 5))
    model(torch.ones(3, 7)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model.weight.detach().flatten().tolist()


def _clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}


def _launch(command: list[str], folder: Path) -> list[dict[str, object]]:
    """Run the script by `command`; what each rank found, by rank."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [*command, str(script), str(folder)], env=_clean_environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


@pytest.mark.slow
def test_one_process_without_a_launcher(tmp_path: Path) -> None:
    (found,) = _launch([sys.executable], tmp_path)
    print(f"import torch {found['torch_s']:.2f} s, then import zeropage {found['zeropage_s']:.2f} s")
    assert (found["rank"], found["world"], found["transport"]) == (0, 1, "local")
    assert found["paged"] and found["applied"]
    assert found["heavy"] == []
    assert found["weight"] == _expected()


def test_torchrun(tmp_path: Path) -> None:
    found = _launch([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"], tmp_path)
    assert [(one["rank"], one["world"], one["transport"]) for one in found] == [(0, 2, "shared"), (1, 2, "shared")]
    for one in found:
        assert one["paged"] and one["applied"]
        assert one["weight"] == _expected()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _launched_by(names: tuple[str, str], port: int, timeout_s: float) -> tuple[int, int, bool, list[float]]:
    """Train as a process that only has these variables of a launcher, and no process group yet."""
    rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
    for name in LAUNCH_VARIABLES:
        os.environ.pop(name, None)
    os.environ |= {names[0]: rank, names[1]: world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    assert not dist.is_initialized()
    model = plain_copy(lambda: nn.Linear(7, 5))
    engine = zp.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), {"timeout_s": timeout_s})
    engine.backward(engine(torch.ones(3, 7)).square().mean())
    engine.step()
    options = dist.group.WORLD._get_backend(torch.device("cpu")).options
    found = (
        dist.get_rank(),
        dist.get_world_size(),
        options._timeout == timedelta(seconds=timeout_s),
        zp.full(model.weight).flatten().tolist(),
    )
    engine.close()
    assert dist.is_initialized(), "closing an engine leaves the process group"
    return found


@pytest.mark.parametrize(
    "names",
    [
        ("RANK", "WORLD_SIZE"),
        ("SLURM_PROCID", "SLURM_NTASKS"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ],
)
def test_variables_of_a_launcher(names: tuple[str, str]) -> None:
    found = run(2, _launched_by, names, _free_port(), 23.0, process_group=False)
    assert found == [(rank, 2, True, _expected()) for rank in range(2)]


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "MASTER_ADDR"),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "MASTER_ADDR": "localhost"}, "MASTER_PORT"),
    ],
)
def test_a_missing_variable_is_named(bare: pytest.MonkeyPatch, given: dict[str, str], missing: str) -> None:
    for name, value in given.items():
        bare.setenv(name, value)
    model = nn.Linear(3, 3)
    with pytest.raises(zp.errors.ConfigError, match=rf"^{missing} "):
        zp.shard(model)
    assert not zp.is_paged(model.weight)
    assert not dist.is_initialized()


def test_one_slurm_task_needs_no_address(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("SLURM_PROCID", "0")
    bare.setenv("SLURM_NTASKS", "1")
    model = zp.shard(nn.Linear(3, 3))
    assert zp.is_paged(model.weight)
    assert not dist.is_initialized()


@pytest.mark.slow
def test_a_model_that_outlives_pythons_modules_ends_quietly(tmp_path: Path) -> None:
    """Trainers keep their model in cycles, which Python may find after everything else is gone."""
    script = tmp_path / "train.py"
    script.write_text(
        "import builtins, torch, zeropage as zp\nbuiltins.kept = zp.shard(torch.nn.Linear(3, 2))  # goes last\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, env=_clean_environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "Exception ignored" not in done.stderr
