"""What lives beside the engine: optimizers by name, monitors, the progress line, the count of operations."""

from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropage as zp
from tests.harness import run
from tests.harness.models import build_mlp, mlp_batch
from tests.scenarios.beside import averaged_backward, plain_copy, same_parameters
from zeropage.deepspeed.flops import FlopsProfiler
from zeropage.deepspeed.lion import Lion
from zeropage.deepspeed.monitor import MonitorMaster
from zeropage.deepspeed.optimizers import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdam,
    make_optimizer,
)
from zeropage.deepspeed.progress import Progress
from zeropage.deepspeed.settings import Settings, read_settings
from zeropage.errors import ConfigError, UnsupportedOperationError


def _settings(**config: Any) -> Settings:
    return read_settings({"train_micro_batch_size_per_gpu": 4, **config}, 2)


def _named(name: str, **params: Any) -> torch.optim.Optimizer:
    block = {"type": name, "params": params}
    return make_optimizer(_settings(optimizer=block), [nn.Parameter(torch.zeros(2))])


# -- optimizers


@pytest.mark.parametrize(
    ("name", "params", "kind", "wanted"),
    [
        ("Adam", {}, torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-8}),
        ("AdamW", {"lr": 0.1, "betas": [0.8, 0.9]}, torch.optim.AdamW, {"lr": 0.1, "betas": (0.8, 0.9)}),
        ("Adam", {"adam_w_mode": False}, torch.optim.Adam, {"weight_decay": 0.0}),
        ("AdamW", {"adam_w_mode": False}, torch.optim.AdamW, {"weight_decay": 0.0}),
        ("adamw", {"torch_adam": True}, torch.optim.AdamW, {"weight_decay": 0.01}),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, torch.optim.Adam, {"weight_decay": 0}),
        ("Adagrad", {}, torch.optim.Adagrad, {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0}),
        ("Lion", {"lr": 0.1}, Lion, {"lr": 0.1, "betas": (0.9, 0.999), "weight_decay": 0.0}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        ("RMSprop", {"alpha": 0.5}, torch.optim.RMSprop, {"alpha": 0.5}),
    ],
)
def test_optimizers_by_name_have_deepspeeds_defaults(
    name: str, params: dict[str, Any], kind: type, wanted: dict[str, Any]
) -> None:
    made = _named(name, **params)
    assert type(made) is kind
    assert {key: made.defaults[key] for key in wanted} == wanted


@pytest.mark.parametrize(
    ("name", "params", "told"),
    [
        ("AdamW", {"lr": "auto"}, "'optimizer.params.lr' is 'auto'"),
        ("AdamW", {"max_grad_norm": 1.0}, "'gradient_clipping' at the top level"),
        ("AdamW", {"learning_rate": 1.0}, "'optimizer.params.learning_rate': AdamW has no such argument; it takes lr"),
        ("AdamW", {"bias_correction": False}, "without bias_correction"),
        ("AdamW", {"fp32_optimizer_states": False}, "optimizer states are fp32"),
        ("Lamb", {}, "torch has no LAMB; make the optimizer in the program"),
        ("OneBitAdam", {}, "1-bit optimizers change results"),
        ("Muon", {}, "matrices only"),
        ("Adamm", {}, "neither DeepSpeed nor torch.optim has it"),
        ("Optimizer", {}, "neither DeepSpeed nor torch.optim has it"),
    ],
)
def test_optimizers_that_cannot_be_had_are_told(name: str, params: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        _named(name, **params)


def test_deepspeeds_classes_make_torchs_optimizers() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    assert type(FusedAdam(parameters, lr=0.1)) is torch.optim.AdamW
    adam = DeepSpeedCPUAdam(parameters, lr=0.1, weight_decay=0.5, adamw_mode=False)  # as Accelerate calls it
    assert type(adam) is torch.optim.Adam and adam.defaults["weight_decay"] == 0.5
    assert type(DeepSpeedCPUAdagrad(parameters)) is torch.optim.Adagrad
    assert type(DeepSpeedCPULion(parameters)) is Lion
    assert issubclass(FusedAdam, torch.optim.Optimizer)
    with pytest.raises(UnsupportedOperationError, match="cannot be subclassed"):
        type("Mine", (FusedAdam,), {})(parameters)


def test_lion_is_the_papers() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = Lion([parameter], lr=0.1, betas=(0.9, 0.5), weight_decay=0.5)
    value, momentum = torch.tensor([1.0, -2.0]), torch.zeros(2)
    for gradient in (torch.tensor([0.5, -1.0]), torch.tensor([-3.0, 0.0]), torch.tensor([0.0, 1.0])):
        parameter.grad = gradient.clone()
        optimizer.step()
        value = value * (1 - 0.1 * 0.5) - 0.1 * torch.sign(0.9 * momentum + 0.1 * gradient)
        momentum = 0.5 * momentum + 0.5 * gradient
        torch.testing.assert_close(parameter.detach(), value)


def _lion_on_pages() -> None:
    plain, model = plain_copy(build_mlp), plain_copy(build_mlp)
    reference = Lion(plain.parameters(), lr=0.01, weight_decay=0.1)
    engine = zp.Engine(model, Lion(model.parameters(), lr=0.01, weight_decay=0.1))
    for step in range(3):
        averaged_backward(plain.parameters(), lambda rank: plain(mlp_batch(step, 0, rank)).square().mean())
        reference.step()
        reference.zero_grad()
        engine.backward(engine(mlp_batch(step, 0, dist.get_rank())).square().mean())
        engine.step()
        same_parameters(plain, engine.module)
    engine.close()


def test_lion_steps_pages_as_it_steps_tensors() -> None:
    run(2, _lion_on_pages)


# -- monitors


def test_csv_files_have_a_line_for_each_event(tmp_path: Path) -> None:
    block = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    for samples in (8, 16):  # a run that is resumed goes on in the same files
        MonitorMaster(_settings(csv_monitor=block).monitors).write_events(
            [("Train/Samples/lr", 0.5 * samples, samples)]
        )
    assert (tmp_path / "job/Train_Samples_lr.csv").read_text().splitlines() == ["step,lr", "8,4.0", "16,8.0"]


def test_only_the_first_rank_writes(tmp_path: Path) -> None:
    master = MonitorMaster(_settings(csv_monitor={"enabled": True, "output_path": str(tmp_path)}).monitors, rank=1)
    master.write_events([("a", 1.0, 1)])
    assert master.enabled and list(tmp_path.iterdir()) == []


def test_wandb_gets_project_group_and_team(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    package = ModuleType("wandb")
    package.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    package.__dict__.update(init=lambda **how: seen.append(how), log=lambda values, step: seen.append((values, step)))
    monkeypatch.setitem(sys.modules, "wandb", package)
    block = {"enabled": True, "team": "t", "group": "g", "project": "p"}
    MonitorMaster(_settings(wandb=block).monitors).write_events([("loss", 0.5, 8)])
    assert seen == [{"project": "p", "group": "g", "entity": "t"}, ({"loss": 0.5}, 8)]


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_a_monitor_without_its_package_is_an_error(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"{package}.enabled' is true, and the package '{package}' is not installed"):
        MonitorMaster(_settings(**{package: {"enabled": True}}).monitors)


# -- progress


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _lines(rank: int = 0, **config: Any) -> list[str]:
    """What is told of six steps of two seconds, half of each in forward."""
    told: list[str] = []
    clock = Clock()
    progress = Progress(_settings(**config), rank, tell=told.append, clock=clock)
    for step in range(1, 7):
        with progress.phase("forward"):
            clock.now += 1.0
        clock.now += 1.0
        progress.step_done(step, 1, [0.5], [(0.9, 0.99)])
    return told


def test_a_line_every_so_many_steps_with_samples_per_second_and_memory() -> None:
    lines = _lines(steps_per_print=3)
    assert [line.split(", ")[0] for line in lines] == ["step=3", "step=6"]
    for line in lines:
        assert "skipped=1, lr=[0.5], mom=[(0.9, 0.99)], samples/s=4, memory=" in line  # 8 samples in 2 seconds
        assert "GB, peak=" in line and "forward" not in line


def test_the_breakdown_tells_where_the_time_went() -> None:
    (line,) = _lines(steps_per_print=6, wall_clock_breakdown=True)
    assert line.endswith("forward=1000.00ms")


@pytest.mark.parametrize("every", [None, float("inf"), 7])
def test_nothing_is_told_where_no_line_is_due(every: float | None) -> None:
    assert _lines(steps_per_print=every) == []


def test_only_the_first_rank_tells() -> None:
    assert _lines(rank=1, steps_per_print=2) == []


def test_no_samples_per_second_where_the_timer_is_off() -> None:
    lines = _lines(steps_per_print=3, timers={"throughput": {"enabled": False}})
    assert len(lines) == 2 and "samples/s" not in lines[0]


# -- operations


def _count(model: nn.Module, backward: bool, **block: Any) -> tuple[int, list[str]]:
    told: list[str] = []
    settings = _settings(flops_profiler={"enabled": True, "profile_step": 2, **block}).flops_profiler
    assert settings is not None
    profiler = FlopsProfiler(settings, model, tell=told.append)
    for step in (1, 2, 3):
        with profiler.counting(step):
            loss = model(torch.ones(5, 7)).sum()
            if backward:
                loss.backward()
        profiler.step_done(step)
    return profiler.get_total_flops(), told


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_one_step_is_counted_by_shapes(paged: bool, backward: bool) -> None:
    model: nn.Module = nn.Sequential(nn.Linear(7, 11), nn.Linear(11, 3))
    if paged:
        zp.shard(model)
    forward = 2 * 5 * (7 * 11 + 11 * 3)
    total, told = _count(model, backward)
    # weights' gradients cost as much as forward; the inputs' gradient only the second layer
    assert total == forward + backward * (forward + 2 * 5 * 11 * 3)
    (table,) = told
    assert table.startswith("floating-point operations of step 2: ") and "Sequential.1" in table


def test_the_table_is_as_deep_and_long_as_asked(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(7, 7)), nn.Linear(7, 3))
    _, (short,) = _count(model, False, detailed=False, module_depth=1, top_modules=1)
    assert "depth 1: Sequential.0 490" in short and "Sequential.1" not in short and "depth 2" not in short
    path = tmp_path / "flops.txt"
    assert _count(model, False, output_file=str(path))[1] == []
    assert "Sequential.0.0" in path.read_text()
