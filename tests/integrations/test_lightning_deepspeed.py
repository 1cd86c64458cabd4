"""The first report through Lightning's own `DeepSpeedStrategy`, with zeropage in DeepSpeed's place.

It asks for a GPU before anything else; the program below leaves that question out and nothing more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeropage as zp

ROOT = Path(zp.__file__).parents[1]
RANKS, BATCH = 2, 4

PROGRAM = """
import json, os, pathlib, sys
import zeropage.deepspeed
zeropage.deepspeed.install()
import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
import zeropage as zp
from zeropage.optim import record_of

FOLDER, RANK = pathlib.Path(sys.argv[1]), int(os.environ["RANK"])

class OnCPU(DeepSpeedStrategy):
    def setup_environment(self):
        self.accelerator.setup_device(self.root_device)
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

class Distillation(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 3)).half().requires_grad_(False)
        self.student = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
        self.losses = []

    def loss(self, batch):
        with torch.no_grad():
            wanted = self.teacher(batch.to(self.teacher[0].weight.dtype))
        return nn.functional.mse_loss(self.student(batch).float(), wanted.float())

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        self.log("val", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-2)

def trainer(precision, epochs):
    return pl.Trainer(
        accelerator="cpu", devices=2, strategy=OnCPU(stage=3), precision=precision, max_epochs=epochs, logger=False,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
    )

def data():
    samples = torch.randn(16, 7, generator=torch.Generator().manual_seed(0))
    return DataLoader(samples, 4, sampler=DistributedSampler(samples, 2, RANK, shuffle=False))

def module(seed=0):
    torch.manual_seed(seed)
    return Distillation()

def tried(precision):
    whole, fit = module(), trainer(precision, 3)
    fit.validate(whole, data(), verbose=False)
    fit.fit(whole, data(), data())
    (tested,) = fit.test(whole, data(), verbose=False)
    first, half = module(), trainer(precision, 1)
    half.validate(first, data(), verbose=False)  # in 16 bits it rounds the weights, so both do it
    half.fit(first, data())
    half.save_checkpoint(FOLDER / f"{precision}.ckpt")
    rest = module(1)
    trainer(precision, 3).fit(rest, data(), ckpt_path=FOLDER / f"{precision}.ckpt")
    return {
        "losses": whole.losses,
        "resumed": rest.losses,
        "tested": tested["val"],
        "teacher": sorted({str(p.dtype) for p in whole.teacher.parameters()}),
        "student": sorted({str(p.dtype) for p in whole.student.parameters()}),
        "slices": [zp.local(p).numel() for p in whole.teacher.parameters()],
        "gradients": sum(record_of(p).gradient_bytes for p in whole.teacher.parameters()),
    }

found = {precision: tried(precision) for precision in ("32-true", "bf16-mixed", "16-mixed")}
(FOLDER / str(RANK)).write_text(json.dumps(found))
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("lightning")
    (folder / "program.py").write_text(PROGRAM)
    keep = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LD_LIBRARY_PATH")}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "program.py", str(folder)],
        cwd=folder, env={**keep, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / str(rank)).read_text()) for rank in range(RANKS)]


def _plain(epochs: int) -> tuple[list[list[float]], float]:
    """Plain torch on the samples of both ranks: losses of each rank, and the loss of the end on all samples."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 3)).half()
    student = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    samples = torch.randn(16, 7, generator=torch.Generator().manual_seed(0))

    def loss(batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher.float()(batch)
        return nn.functional.mse_loss(student(batch), wanted)

    told: list[list[float]] = [[] for _ in range(RANKS)]
    for _ in range(epochs):
        for start in range(0, 16, RANKS * BATCH):
            losses = [loss(samples[start : start + RANKS * BATCH][rank::RANKS]) for rank in range(RANKS)]
            optimizer.zero_grad()
            (sum(losses) / RANKS).backward()
            optimizer.step()
            for rank in range(RANKS):
                told[rank].append(losses[rank].item())
    return told, loss(samples).item()


@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-5), ("bf16-mixed", 2e-2), ("16-mixed", 2e-3)])
def test_it_trains_as_plain_torch(ranks: list[dict[str, Any]], precision: str, tolerance: float) -> None:
    losses, end = _plain(3)
    for rank, found in enumerate(ranks):
        assert found[precision]["losses"] == pytest.approx(losses[rank], rel=tolerance)
        assert found[precision]["tested"] == pytest.approx(end, rel=tolerance)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_it_goes_on_to_the_bit(ranks: list[dict[str, Any]], precision: str) -> None:
    for found in ranks:
        assert len(found[precision]["resumed"]) == 4
        assert found[precision]["resumed"] == found[precision]["losses"][2:]


@pytest.mark.parametrize(
    ("precision", "teacher", "student"),
    [
        ("32-true", "torch.float32", "torch.float32"),  # Lightning's own plugin casts the whole module
        ("bf16-mixed", "torch.float16", "torch.bfloat16"),
        ("16-mixed", "torch.float16", "torch.float16"),
    ],
)
def test_the_teacher_is_sharded_and_untrained(
    ranks: list[dict[str, Any]], precision: str, teacher: str, student: str
) -> None:
    for found in ranks:
        assert (found[precision]["teacher"], found[precision]["student"]) == ([teacher], [student])
        assert found[precision]["gradients"] == 0
    sizes = [231, 33, 99, 3]
    assert [sum(pair) for pair in zip(*(found[precision]["slices"] for found in ranks), strict=True)] == sizes
    assert ranks[0][precision]["slices"][0] < sizes[0]
