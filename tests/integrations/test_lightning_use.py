"""Evaluation, `configure_model`, callbacks, errors and the end of a run under the Lightning strategy."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelSummary
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

import zeropage as zp
from tests.harness import Failure, run
from tests.integrations.lightning_cases import (
    QUIET,
    Classifier,
    Distillation,
    Outcome,
    full_state,
    loader,
    same_outcome,
    train,
    trainer_of,
)
from zeropage.construct import pagers_of
from zeropage.errors import ConfigError
from zeropage.lightning import ZeropageStrategy
from zeropage.optim import record_of

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]

ROOT = Path(zp.__file__).parents[1]


def test_it_is_registered_by_its_name() -> None:
    assert "zeropage" in StrategyRegistry.available_strategies()
    assert isinstance(StrategyRegistry.get("zeropage"), ZeropageStrategy)


# -- evaluation


def _evaluated(strategy: str, devices: int) -> tuple[float, Outcome, float, list[Tensor]]:
    """Validate before fit, test and predict after it; a second fit goes on."""
    torch.manual_seed(0)
    module, data = Classifier(), loader(8, devices)
    trainer = trainer_of(strategy, devices, max_epochs=1)
    (before,) = trainer.validate(module, data, verbose=False)
    trainer.fit(module, data, data)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data, data)
    (after,) = trainer.test(module, data, verbose=False)
    predicted = trainer.predict(module, data)
    assert predicted is not None
    return before["val"], Outcome(module.losses, full_state(module)), after["test"], list(predicted)


def test_validate_fit_test_and_predict_over_one_module() -> None:
    before, outcome, after, predicted = _evaluated("auto", 1)
    both = run(2, _evaluated, "zeropage", 2)
    for found in both:
        assert (found[0], found[2]) == (pytest.approx(before), pytest.approx(after, rel=1e-4))
    losses = [sum(pair) / 2 for pair in zip(*(found[1].losses for found in both), strict=True)]
    same_outcome(outcome, Outcome(losses, both[0][1].state), 1e-5)
    shares = torch.stack([torch.cat(found[3]) for found in both], 1).flatten(0, 1)
    torch.testing.assert_close(shares, torch.cat(predicted), rtol=1e-4, atol=1e-4)


class _Normalised(Classifier):
    """Each rank's running means are its own while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(9))


def _running_means(path: Path) -> tuple[Tensor, Tensor, float, float]:
    torch.manual_seed(0)
    module, trainer = _Normalised(), trainer_of("zeropage", 2)
    trainer.fit(module, loader(8, 2))
    own = module.net[1].running_mean.clone()
    (found,) = trainer.validate(module, loader(8, 2), verbose=False)
    trainer.save_checkpoint(path)
    (again,) = trainer.test(_Normalised(), loader(8, 2), ckpt_path=path, verbose=False)
    return own, module.net[1].running_mean.clone(), found["val"], again["test"]


def test_what_is_evaluated_is_what_is_saved(tmp_path: Path) -> None:
    """The first rank's buffers, as in DDP."""
    first, second = run(2, _running_means, tmp_path / "one.ckpt")
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[0], first[1]) and torch.equal(first[0], second[1])
    assert first[2] == second[2] == first[3] == second[3]


# -- configure_model


class _Late(Classifier):
    """Built when ranks know of each other: each weight is cut as it is made."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.losses: list[float] = []
        self.net: nn.Sequential | None = None
        self.paged = False

    def configure_model(self) -> None:
        if self.net is None:
            layer = nn.Linear(7, 9)
            self.paged = all(zp.is_paged(p) for p in layer.parameters())
            self.net = nn.Sequential(layer, nn.LayerNorm(9), nn.Tanh(), nn.Linear(9, 3))


class _LateByHand(_Late):
    def configure_model(self) -> None:
        with zp.init():
            super().configure_model()


def _late(build: Any, options: dict[str, Any]) -> tuple[Outcome, Outcome, bool]:
    expected = train(Classifier, "ddp", 2, options)
    torch.manual_seed(0)
    module, trainer = build(), trainer_of("zeropage", 2, **options)
    trainer.fit(module, loader(8, 2))
    return expected, Outcome(module.losses, full_state(module)), module.paged


@pytest.mark.parametrize("build", [_Late, _LateByHand])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_configure_model_pages_as_it_builds(build: type[_Late], precision: str) -> None:
    for expected, got, paged in run(2, _late, build, {"precision": precision}):
        assert paged
        if precision == "32-true":  # the other draws its weights in bf16
            same_outcome(expected, got)
        else:
            assert {value.dtype for value in got.state.values()} == {torch.bfloat16}


class _Pretrained(pl.LightningModule):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.model: nn.Module | None = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        from transformers import AutoModelForCausalLM

        if self.model is None:
            self.model = AutoModelForCausalLM.from_pretrained(self.folder)
            self.model.train()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        tokens = (batch * 10).long().abs() % 32
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _pretrained(folder: Path) -> tuple[list[float], list[float], bool]:
    found = []
    for strategy in ("ddp", "zeropage"):
        module = _Pretrained(folder)
        trainer_of(strategy, 2).fit(module, loader(8, 2))
        found.append(module)
    return found[0].losses, found[1].losses, all(zp.is_paged(p) for p in found[1].parameters())


def test_from_pretrained_in_configure_model(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    for expected, got, paged in run(2, _pretrained, tmp_path):
        assert expected == got and paged and len(got) == 4


# -- mixed dtypes


def _teacher(precision: str) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Distillation()
    module.register_buffer("frequencies", torch.tensor([1.0, 1 / 3]))
    before = {name: p.detach().clone() for name, p in module.teacher.named_parameters()}
    trainer = trainer_of("zeropage", 2, precision=precision)
    trainer.fit(module, loader(8, 2))
    assert all(torch.equal(zp.full(p), before[name]) for name, p in module.teacher.named_parameters())
    (optimizer,) = trainer.optimizers
    return {
        "teacher": {p.dtype for p in module.teacher.parameters()},
        "student": {p.dtype for p in module.student.parameters()},
        "buffer": module.frequencies.dtype,
        "slices": [(zp.local(p).numel(), p.numel()) for p in module.teacher.parameters()],
        "gradients": sum(record_of(p).gradient_bytes for p in module.teacher.parameters()),
        "states": {name for name, p in module.named_parameters() if p in optimizer.state},
    }


@pytest.mark.parametrize(("precision", "student"), [("32-true", torch.float32), ("bf16-true", torch.bfloat16)])
def test_a_frozen_fp16_teacher_stays_so_and_costs_its_slices(precision: str, student: torch.dtype) -> None:
    both = run(2, _teacher, precision)
    for found in both:
        assert found["teacher"] == {torch.float16} and found["student"] == {student}
        assert found["buffer"] == torch.float32
        assert found["gradients"] == 0
        assert found["states"] == {"student.0.weight", "student.0.bias", "student.2.weight", "student.2.bias"}
    for (one, whole), (other, _) in zip(*(found["slices"] for found in both), strict=True):
        assert one + other == whole
    assert any(one < whole for one, whole in both[0]["slices"])


# -- callbacks and hooks


class _Norms(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.norms.append(float(grad_norm(self, norm_type=2)["grad_2.0_norm_total"]))


def _logged(strategy: str, folder: Path) -> tuple[list[float], str]:
    torch.manual_seed(0)
    module = _Norms()
    logger = CSVLogger(folder, name=strategy, version=0)
    trainer = trainer_of(
        strategy, 2, logger=logger, log_every_n_steps=1, enable_model_summary=True,
        callbacks=[LearningRateMonitor("step"), ModelSummary(2)],
    )  # fmt: skip
    trainer.fit(module, loader(8, 2))
    trainer.strategy.barrier()
    return module.norms, (Path(logger.log_dir) / "metrics.csv").read_text()


def test_learning_rates_and_gradient_norms_are_told(tmp_path: Path) -> None:
    expected, got = run(2, _logged, "ddp", tmp_path), run(2, _logged, "zeropage", tmp_path)
    for (norms, rates), (our_norms, our_rates) in zip(expected, got, strict=True):
        assert our_rates == rates and "lr-AdamW" in rates
        assert len(our_norms) == 4 and our_norms == pytest.approx(norms)


def _scaled(initial: float) -> tuple[Outcome, Outcome, float]:
    """A scale that overflows at first: steps are left out until it fits."""
    found, scale = [], 0.0
    for strategy in ("ddp", "zeropage"):
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=initial))
        torch.manual_seed(0)
        module, trainer = Classifier(), trainer_of(strategy, 2, plugins=[plugin], max_epochs=4)
        trainer.fit(module, loader(8, 2))
        found.append(Outcome(module.losses, full_state(module)))
        scale = trainer.precision_plugin.scaler.get_scale()
    return found[0], found[1], scale


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*before.*optimizer.step.*:")
@pytest.mark.parametrize("initial", [1024.0, 2.0**25])
def test_dynamic_loss_scaling(initial: float) -> None:
    for expected, got, scale in run(2, _scaled, initial):
        same_outcome(expected, got)
        assert (scale < initial) == (initial > 1024.0)


# -- settings and errors


@pytest.mark.parametrize(
    ("settings", "instead"),
    [
        ({"accumulate": 2}, "accumulate_grad_batches"),
        ({"clip_grad_norm": 1.0}, "gradient_clip_val"),
        ({"precision": "bf16"}, "precision="),
    ],
)
def test_what_the_trainer_decides_is_refused(settings: dict[str, Any], instead: str) -> None:
    with pytest.raises(ConfigError, match=instead):
        ZeropageStrategy(settings)


def test_a_checkpoint_io_is_refused() -> None:
    with pytest.raises(ConfigError, match="AsyncCheckpointIO"):
        trainer_of("zeropage", 1, plugins=[AsyncCheckpointIO()])


def _configured() -> tuple[str, int]:
    torch.manual_seed(0)
    module = Classifier()
    trainer_of(ZeropageStrategy({"transport": "collective", "resident_bytes": 0}), 2).fit(module, loader(8, 2))
    (pager,) = pagers_of(module)
    return pager.transport.name, pager.config.resident_bytes


def test_settings_reach_the_pages() -> None:
    assert run(2, _configured) == [("collective", 0)] * 2


class _Failing(Classifier):
    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if index == 1 and self.trainer.global_rank == 1:
            raise ValueError("a bad sample")
        return super().training_step(batch, index)


def _failing() -> None:
    trainer_of("zeropage", 2).fit(_Failing(), loader(8, 2))


def test_an_error_on_one_rank_ends_the_others() -> None:
    first, second = run(2, _failing, expect_errors=True, timeout=30)
    assert isinstance(second, Failure) and "a bad sample" in second.traceback
    assert isinstance(first, Failure) and "PeerLostError" in first.traceback and "rank 1" in first.traceback


def _left() -> tuple[int, int, bool]:
    torch.manual_seed(0)
    module, trainer = Classifier(), trainer_of("zeropage", 2)
    trainer.fit(module, loader(8, 2))
    (pager,) = pagers_of(module)
    resident, gradients = pager.resident_bytes, sum(record_of(p).has_gradient() for p in module.parameters())
    watch = weakref.ref(pager)
    del module, trainer, pager
    gc.collect()
    return resident, gradients, watch() is None


def test_the_end_of_a_run_frees_what_it_took() -> None:
    assert run(2, _left) == [(0, 0, True)] * 2


# -- as a user starts it

PROGRAM = """
import pathlib, sys
import torch
import lightning.pytorch as pl
import zeropage.lightning
from torch.utils.data import DataLoader

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
    def training_step(self, batch, index):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy="zeropage", max_epochs=1, logger=False, enable_progress_bar=False,
    default_root_dir=sys.argv[1],
)
module = Module()
trainer.fit(module, DataLoader(torch.randn(8, 4), batch_size=2))
found = f"rank {trainer.global_rank} of {trainer.world_size} ended at step {trainer.global_step}"
pathlib.Path(sys.argv[1], str(trainer.global_rank)).write_text(found)
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), ("-m", "torch.distributed.run", "--nproc-per-node", "2")])
def test_lightning_and_torchrun_start_it(launcher: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    keep = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LD_LIBRARY_PATH")}
    done = subprocess.run(
        [sys.executable, *launcher, "program.py", str(tmp_path)],
        cwd=tmp_path, env={**keep, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text() == f"rank {rank} of 2 ended at step 2"
    assert (tmp_path / "checkpoints" / "epoch=0-step=2.ckpt" / "state").is_dir()
