"""`save_checkpoint` and `load_checkpoint`: DeepSpeed's folders and return values, training that goes on to the bit."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zeropage as zp
from tests.fixtures.make_deepspeed import CASES, FOLDER, LOSS_SCALE, MORE_STEPS, batch, build
from tests.harness import run
from tests.harness.models import build_mlp, mlp_batch
from tests.integrations.deepspeed_cases import engine_of, rank
from tests.scenarios.beside import plain_copy, same
from zeropage.deepspeed.engine import DeepSpeedEngine
from zeropage.deepspeed.utils import safe_get_full_fp32_param
from zeropage.deepspeed.zero_to_fp32 import (
    LazyTensor,
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    get_model_state_file,
    get_optim_files,
    load_state_dict_from_zero_checkpoint,
)
from zeropage.errors import CheckpointError, ConfigError


class Custom:
    """A class that only a pickle can hold."""

    def __init__(self, value: int) -> None:
        self.value = value


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.last = nn.Linear(7, 7)
        self.last.weight = self.first.weight
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("scale", torch.ones(2, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.frozen(self.first(x))))


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _engine(precision: str = "fp32", seed: int = 0, build: Any = build_mlp, **changes: Any) -> DeepSpeedEngine:
    block = {} if precision == "fp32" else {precision: {"enabled": True}}
    changes.setdefault("scheduler", {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.01}})
    return engine_of(plain_copy(build, seed), _adamw, **block, **changes)


def _train(engine: DeepSpeedEngine, steps: range) -> None:
    dtype = next(engine.parameters()).dtype
    for step in steps:
        for micro in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(mlp_batch(step, micro, rank()).to(dtype)).float().square().mean())
            engine.step()


def _exact(engine: DeepSpeedEngine) -> list[torch.Tensor]:
    return [safe_get_full_fp32_param(p) for p in engine.module.parameters()]


def _equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _resume(precision: str, folder: str) -> None:
    """Saved after two steps (one micro-batch into none), trained on; loaded into another engine, trained alike."""
    engine = _engine(precision, gradient_accumulation_steps=2)
    _train(engine, range(2))
    assert engine.save_checkpoint(folder, client_state={"epoch": 3, "mine": rank(), "object": Custom(rank())})
    _train(engine, range(2, 4))
    other = _engine(precision, seed=7, gradient_accumulation_steps=2)
    state = torch.get_rng_state()
    path, client_state = other.load_checkpoint(folder)
    assert torch.equal(torch.get_rng_state(), state), "as DeepSpeed, which leaves random numbers alone"
    assert path.startswith(f"{folder}/global_step2/")
    assert client_state["epoch"] == 3 and client_state["mine"] == rank() and client_state["object"].value == rank()
    assert set(client_state) == {"epoch", "mine", "object"}
    assert (other.global_steps, other.micro_steps, other.global_samples) == (2, 4, 24)
    _train(other, range(2, 4))
    assert other.get_lr() == engine.get_lr()
    assert _equal(_exact(engine), _exact(other))
    assert engine.zeropage_engine.loss_scale == other.zeropage_engine.loss_scale
    engine.destroy()
    other.destroy()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_training_goes_on(precision: str, tmp_path: Path) -> None:
    run(2, _resume, precision, str(tmp_path))
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert (tmp_path / "zero_to_fp32.py").stat().st_mode & 0o111
    prefix = "bf16_" if precision == "bf16" else ""
    for number in range(2):
        assert (tmp_path / f"global_step2/zero_pp_rank_{number}_mp_rank_00_model_states.pt").exists()
        assert (tmp_path / f"global_step2/{prefix}zero_pp_rank_{number}_mp_rank_00_optim_states.pt").exists()
    run(1, _elsewhere, precision, str(tmp_path))


def _elsewhere(precision: str, folder: str) -> None:
    """On another number of ranks; the first rank's client state."""
    engine = _engine(precision, seed=7)
    path, client_state = engine.load_checkpoint(folder, tag="global_step2")
    assert path is not None and client_state["mine"] == 0 and client_state["object"].value == 0
    whole = get_fp32_state_dict_from_zero_checkpoint(folder)
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(whole[name], safe_get_full_fp32_param(parameter)), name
    engine.destroy()


def _parts(folder: str) -> None:
    """What is loaded and what not, by the flags."""
    engine = _engine()
    _train(engine, range(3))
    engine.save_checkpoint(folder, tag="here")
    saved, rate = _exact(engine), engine.get_lr()
    state = {p: zp.full(engine.basic_optimizer.state[p]["exp_avg"]) for p in engine.module.parameters()}

    module_only = _engine(seed=7)
    _train(module_only, range(1))
    before = [zp.full(s["exp_avg"]) for s in module_only.basic_optimizer.state.values()]
    module_only.load_checkpoint(folder, load_module_only=True)
    assert _equal(_exact(module_only), saved)
    assert _equal([zp.full(s["exp_avg"]) for s in module_only.basic_optimizer.state.values()], before)
    assert module_only.global_steps == 1 and module_only.get_lr() != rate

    no_optimizer = _engine(seed=7)
    no_optimizer.load_checkpoint(folder, load_optimizer_states=False)
    assert _equal(_exact(no_optimizer), saved)
    assert not no_optimizer.basic_optimizer.state
    assert no_optimizer.global_steps == 3
    assert no_optimizer.lr_scheduler.state_dict() == engine.lr_scheduler.state_dict()

    no_schedule = _engine(seed=7)
    no_schedule.load_checkpoint(folder, load_lr_scheduler_states=False)
    assert no_schedule.lr_scheduler.state_dict() != engine.lr_scheduler.state_dict()
    mine = [zp.full(no_schedule.basic_optimizer.state[p]["exp_avg"]) for p in no_schedule.module.parameters()]
    assert _equal(mine, list(state.values()))

    inference = engine_of(plain_copy(build_mlp, 7))
    inference.load_checkpoint(folder)
    assert _equal([zp.full(p) for p in inference.module.parameters()], saved)
    with contextlib.suppress(ConfigError):
        inference.load_checkpoint(folder, custom_load_fn=print)
        raise AssertionError("not there")
    for each in (engine, module_only, no_optimizer, no_schedule, inference):
        each.destroy()


def test_parts(tmp_path: Path) -> None:
    run(2, _parts, str(tmp_path))


def _absent(folder: str) -> None:
    engine = _engine()
    before = _exact(engine)
    assert engine.load_checkpoint(folder) == (None, None)
    assert engine.load_checkpoint(folder, tag="nowhere") == (None, None)
    engine.save_checkpoint(folder, tag="first")
    engine.save_checkpoint(folder, tag="second", save_latest=False)
    assert Path(folder, "latest").read_text() == "first"
    assert Path(folder, "second", "manifest.json").exists()
    assert engine.load_checkpoint(folder, tag="second")[0] is not None
    assert _equal(_exact(engine), before)
    other = engine_of(plain_copy(lambda: nn.Linear(7, 3)), _adamw)
    with contextlib.suppress(CheckpointError):
        other.load_checkpoint(folder)
        raise AssertionError("it does not fit")
    engine.destroy()
    other.destroy()


def test_what_is_not_there(tmp_path: Path) -> None:
    run(2, _absent, str(tmp_path))


def _frozen(folder: str) -> None:
    """Without frozen parameters, as the Trainer saves adapters: loaded with load_module_strict=False or without."""
    engine = _engine(build=Tied)
    _train(engine, range(2))
    engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    for strict in (True, False):
        other = _engine(seed=7, build=Tied)
        kept = zp.full(other.module.frozen.weight)
        other.load_checkpoint(folder, load_module_strict=strict)
        same(kept, other.module.frozen.weight, exact=True)
        same(zp.full(engine.module.first.weight), other.module.last.weight, exact=True)
        other.destroy()
    engine.save_checkpoint(folder, tag="whole")
    smaller = engine_of(plain_copy(lambda: nn.ModuleDict({"first": nn.Linear(7, 7), "new": nn.Linear(2, 2)})))
    kept = zp.full(smaller.module["new"].weight)
    smaller.load_checkpoint(folder, tag="whole", load_module_strict=False)
    same(zp.full(engine.module.first.bias), smaller.module["first"].bias, exact=True)
    same(kept, smaller.module["new"].weight, exact=True)
    with contextlib.suppress(CheckpointError):
        smaller.load_checkpoint(folder, tag="whole")
        raise AssertionError("names do not match")
    smaller.destroy()
    engine.destroy()


def test_frozen_parameters_left_out(tmp_path: Path) -> None:
    assert "exclude_frozen_parameters" in inspect.signature(DeepSpeedEngine.save_checkpoint).parameters
    run(2, _frozen, str(tmp_path))


# -- state dicts


def _consolidated(folder: str) -> None:
    engine = _engine("bf16", build=Tied, zero_optimization={"stage": 3})
    _train(engine, range(1))
    whole = engine._zero3_consolidated_16bit_state_dict()
    assert engine.save_16bit_model(folder) is False
    assert not Path(folder, "pytorch_model.bin").exists()
    if rank() == 0:
        assert list(whole) == list(engine.module.state_dict())
        assert all(type(value) is torch.Tensor for value in whole.values())
        assert whole["last.weight"] is whole["first.weight"]
        assert whole["first.weight"].dtype == torch.bfloat16 and whole["scale"].dtype == torch.float64
    else:
        assert whole is None
    for name, parameter in engine.module.named_parameters():
        value = zp.full(parameter)  # by all ranks
        assert rank() or torch.equal(whole[name], value)
    trained = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    assert rank() or set(whole) - set(trained) == {"frozen.weight", "frozen.bias"}
    engine.destroy()
    gathers = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    other = _engine("bf16", build=Tied, zero_optimization=gathers)
    assert other.zero_gather_16bit_weights_on_model_save()
    assert other.save_16bit_model(folder, "model.bin")
    loaded = torch.load(Path(folder, "model.bin"), weights_only=True)
    plain = Tied()
    plain.load_state_dict(loaded)
    other.load_module_state_dict({"module": loaded})
    assert set(other.module_state_dict()) - set(other.module_state_dict(exclude_frozen_parameters=True)) == {
        "frozen.weight",
        "frozen.bias",
    }
    for name, value in loaded.items():
        if isinstance(value, torch.Tensor) and name in dict(other.module.named_parameters()):
            same(value, other.module.get_parameter(name), exact=True)
    other.destroy()


def test_consolidated_state_dict(tmp_path: Path) -> None:
    run(2, _consolidated, str(tmp_path))


def _save_tied(folder: str) -> dict[str, torch.Tensor]:
    engine = _engine("bf16", build=Tied)
    _train(engine, range(2))
    engine.save_checkpoint(folder, client_state={"epoch": 3})
    exact = {name: safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters(remove_duplicate=False)}
    engine.destroy()
    return exact


@pytest.mark.slow
def test_zero_to_fp32(tmp_path: Path) -> None:
    """As module and as the script in the folder; with what Lightning reads beside."""
    exact, _ = run(2, _save_tied, str(tmp_path / "saved"))
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved")
    assert set(found) == {*exact, "count", "scale"}
    assert all(torch.equal(found[name], value) for name, value in exact.items())
    assert found["first.weight"] is found["last.weight"]
    assert found["count"].dtype == torch.int64 and found["scale"].dtype == torch.float32
    without = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved", "global_step2", True)
    assert set(found) - set(without) == {"frozen.weight", "frozen.bias"}
    lazy = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved", lazy_mode=True)
    assert isinstance(lazy["first.weight"], LazyTensor)
    assert torch.equal(lazy["first.weight"].contiguous(), exact["first.weight"])
    model = load_state_dict_from_zero_checkpoint(Tied(), tmp_path / "saved")
    assert torch.equal(model.last.weight, exact["last.weight"])

    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "saved", tmp_path / "one")
    assert torch.equal(torch.load(tmp_path / "one/pytorch_model.bin")["first.bias"], exact["first.bias"])
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "saved", tmp_path / "parts", 300, safe_serialization=True)
    index = json.loads((tmp_path / "parts/model.safetensors.index.json").read_text())["weight_map"]
    parts: dict[str, torch.Tensor] = {}
    for file in set(index.values()):
        parts |= load_file(tmp_path / "parts" / file)
    assert "last.weight" not in parts and torch.equal(parts["last.bias"], exact["last.bias"])
    assert set(parts) == set(index)

    root = Path(zp.__file__).parents[1]
    subprocess.run(
        [sys.executable, "zero_to_fp32.py", ".", "../script", "--dtype", "bfloat16"],
        cwd=tmp_path / "saved", check=True, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    written = torch.load(tmp_path / "script/pytorch_model.bin")
    assert torch.equal(written["last.bias"], exact["last.bias"].bfloat16())

    optim = torch.load(get_optim_files(tmp_path / "saved/global_step2")[0], weights_only=False)
    stage = optim["optimizer_state_dict"]["zero_stage"]
    about = torch.load(get_model_state_file(tmp_path / "saved/global_step2", stage), weights_only=False)
    assert (stage, about["epoch"], about["global_steps"], about["dp_world_size"]) == (3, 3, 2, 2)
    with pytest.raises(ValueError, match="latest"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "one")
    with pytest.raises(FileNotFoundError):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved", "global_step9")


@pytest.mark.parametrize("name", ["stage1-fp32", "stage2-bf16", "stage3-fp32"])
def test_zero_to_fp32_of_what_deepspeed_saved(name: str, tmp_path: Path) -> None:
    expected = load_file(FOLDER / name / "expected.safetensors")
    found = get_fp32_state_dict_from_zero_checkpoint(FOLDER / name)
    masters = {key.removeprefix("master."): value for key, value in expected.items() if key.startswith("master.")}
    assert masters
    for key, value in masters.items():
        assert torch.equal(found[key], value), key


def _from_deepspeed(name: str) -> None:
    """A folder of DeepSpeed's own, through the face: values, counters, client state, and the next losses."""
    case, expected = CASES[name], load_file(FOLDER / name / "expected.safetensors")
    model, optimizer = build(case)
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.zero_()  # so that whatever is right has been loaded
    block: dict[str, Any] = {} if case.precision == "fp32" else {case.precision: {"enabled": True}}
    if case.precision == "fp16":
        block = {"fp16": {"enabled": True, **LOSS_SCALE}}
    # (the data of the fixtures is the same on every rank, so that the number of ranks does not matter)
    engine = engine_of(model, optimizer, zero_optimization={"stage": case.stage}, **block)
    path, client_state = engine.load_checkpoint(FOLDER / name)
    assert path is not None and Path(path).parent.name == f"global_step{case.steps}"
    assert client_state == {"note": f"made as {name}"}
    assert (engine.global_steps, engine.skipped_steps) == (case.steps, len(case.poisoned))
    for key, parameter in model.named_parameters():
        if f"master.{key}" in expected:
            assert torch.equal(safe_get_full_fp32_param(parameter), expected[f"master.{key}"]), key
    losses = []
    for step in range(case.steps, case.steps + MORE_STEPS):
        loss = engine(batch(step))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    assert losses == pytest.approx(expected["losses"].tolist(), rel=2e-3)
    engine.destroy()


@pytest.mark.parametrize("name", CASES)
def test_what_deepspeed_saved(name: str) -> None:
    run(2, _from_deepspeed, name)
