"""What DeepSpeed has saved loads on any number of ranks, to the bit, and training goes on as there.

The folders in `tests/fixtures/deepspeed` were written by DeepSpeed itself; `tests/fixtures/make_deepspeed.py` says
what is in them, and makes them anew.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

import zeropage as zp
from tests.fixtures.make_deepspeed import CASES, FOLDER, LOSS_SCALE, MORE_STEPS, Case, batch, build, schedule
from tests.harness import run
from zeropage import cli
from zeropage.checkpoint import convert_deepspeed
from zeropage.checkpoint.deepspeed import loss_scale_from
from zeropage.checkpoint.deepspeed_files import Inert
from zeropage.checkpoint.deepspeed_groups import stage_of
from zeropage.loss_scale import DynamicLossScale

# Seen on one machine: no difference at all in fp32 and bf16, and 2e-5 in fp16, from the first loss on, since stage 3
# adds a bias after it has rounded the product. Other processors may have other kernels than the one of the fixtures.
TOLERANCE = {"fp32": 1e-6, "bf16": 2e-3, "fp16": 5e-4}
# The first optimizer file of each case.
OPTIM = {"stage1-fp32": "zero_pp_rank_0", "stage2-bf16": "bf16_zero_pp_rank_0", "stage3-fp32": "zero_pp_rank_0"}


def _engine(case: Case, *, frozen_too: bool = False) -> zp.Engine:
    """With all weights zero. `frozen_too` puts frozen parameters into the last group of the optimizer."""
    model, optimizer = build(case)
    if frozen_too:
        *_, last = optimizer.param_groups
        last["params"] = [p for p in model.parameters() if p.dim() <= 1]
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.zero_()  # so that whatever is right has been loaded
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    config: dict[str, Any] = {"transport": "local" if world == 1 else "shared"}
    if case.precision != "fp32":
        config |= {"precision": case.precision, "cast_frozen": True}
    if case.precision == "fp16":
        config["loss_scale"] = {"window": LOSS_SCALE["loss_scale_window"], "hysteresis": LOSS_SCALE["hysteresis"]}
    return zp.Engine(model, optimizer, config, lr_scheduler=schedule(case, optimizer))


def _loaded_and_trained(name: str, folder: str) -> dict[str, Any]:
    """What an engine holds after loading, then the losses of more steps and the masters after them."""
    case = CASES[name]
    with _engine(case) as engine:
        found = engine.load(folder)
        seen: dict[str, Any] = {"values": _held_by(engine), "progress": engine.progress(), "found": found}
        optimizer = engine.optimizer
        assert optimizer is not None
        seen["settings"] = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        seen["steps"] = {float(state["step"]) for state in optimizer.state.values()}
        seen["scheduler"] = {} if engine.lr_scheduler is None else engine.lr_scheduler.state_dict()
        seen["losses"] = []
        for step in range(case.steps, case.steps + MORE_STEPS):
            loss = engine(batch(step))
            seen["losses"].append(loss.item())
            engine.backward(loss)
            assert engine.step().applied
        seen["after"] = {k: v for k, v in _held_by(engine).items() if k.startswith("master.")}
        seen["scale after"] = engine.loss_scale
    return seen


def _held_by(engine: zp.Engine) -> dict[str, Tensor]:
    """Under the names of `expected.safetensors`."""
    held = {f"model.{name}": _plain(value) for name, value in engine.module.state_dict(keep_vars=True).items()}
    sharded = engine.sharded_optimizer
    assert sharded is not None
    records = {record.page: master for record, master in sharded.masters.items()}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        page = parameter._node.page
        held[f"master.{name}"] = _joined(records[page].values, page) if page in records else zp.full(parameter)
        state = sharded.optimizer.state[parameter]
        held |= {f"optimizer.{name}.{key}": zp.full(state[key]) for key in ("exp_avg", "exp_avg_sq")}
    return held


def _plain(value: Tensor) -> Tensor:
    return zp.full(value) if zp.is_paged(value) else value.detach().clone()


def _joined(own: Tensor, page: Any) -> Tensor:
    """A master of which every rank has a slice."""
    low, high = page.bounds
    whole = torch.zeros(page.layout.numel)
    whole[low:high] = own
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(whole)
    return whole.view(page.spec.shape)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if "stage2-" in name else name for name in CASES]
)
def test_what_was_held_is_held_again_and_training_goes_on(name: str, world: int, tmp_path: Path) -> None:
    case, expected = CASES[name], load_file(FOLDER / name / "expected.safetensors")
    folder = FOLDER / name
    if world != 2:  # on two ranks, the engine converts by itself
        convert_deepspeed(folder, tmp_path / "converted")
        folder = tmp_path / "converted"
    for seen in run(world, _loaded_and_trained, name, str(folder)):
        kinds = ("model.", "master.", "optimizer.")
        held = {key: value for key, value in expected.items() if key.startswith(kinds)}
        assert seen["values"].keys() == held.keys()
        for key, value in held.items():
            assert seen["values"][key].dtype == value.dtype, key
            assert torch.equal(seen["values"][key], value), key
        _check_small_things(name, case, seen)
        tolerance = TOLERANCE[case.precision]
        if case.scheduler:
            assert [group["lr"] for group in seen["settings"]] == expected["rates"].tolist()
        if case.scheduler == "deepspeed":  # from here on the rates are the program's own matter
            assert seen["losses"][0] == pytest.approx(expected["losses"][0].item(), rel=tolerance)
            continue
        assert seen["losses"] == pytest.approx(expected["losses"].tolist(), rel=tolerance)
        for key, value in seen["after"].items():
            torch.testing.assert_close(value, expected[key.replace("master.", "after.", 1)], rtol=0, atol=5 * tolerance)


def _check_small_things(name: str, case: Case, seen: dict[str, Any]) -> None:
    assert seen["found"].tag == f"global_step{case.steps}"
    assert seen["found"].global_step == case.applied
    client_state = dict(seen["found"].client_state)
    if case.scheduler == "deepspeed":
        assert client_state.pop("deepspeed_lr_scheduler") == {"last_batch_iteration": case.steps - 1}
    if case.scheduler == "torch":
        assert seen["scheduler"]["last_epoch"] == case.steps
    assert client_state == {"note": f"made as {name}"}
    assert seen["steps"] == {case.applied}
    progress = seen["progress"]
    assert (progress["global_step"], progress["skipped_steps"]) == (case.applied, len(case.poisoned))
    if case.precision == "fp16":
        # of two overflows the first was let pass; one clean step after them, and two of three more follow
        assert progress["loss_scale"] == {"scale": 128.0, "clean_steps": 0, "tolerance": 0}
        assert seen["scale after"] == 128.0
    if case.two_groups:
        assert [group["weight_decay"] for group in seen["settings"]] == [0.1, 0.01]
        assert [group["betas"] for group in seen["settings"]] == [(0.9, 0.999), (0.8, 0.95)]
        assert case.scheduler or [group["lr"] for group in seen["settings"]] == [1e-2, 3e-3]


def test_frozen_parameters_in_a_group() -> None:
    """DeepSpeed drops them from the groups; a program that gives them to its optimizer loads all the same."""
    case, expected = CASES["stage2-bf16"], load_file(FOLDER / "stage2-bf16" / "expected.safetensors")
    with _engine(case, frozen_too=True) as engine:
        engine.load(FOLDER / "stage2-bf16")
        for key, value in _held_by(engine).items():
            assert torch.equal(value, expected[key]), key


def test_weights_alone() -> None:
    """An engine without an optimizer, in another precision."""
    case, expected = CASES["stage3-fp16"], load_file(FOLDER / "stage3-fp16" / "expected.safetensors")
    model, _ = build(case)
    with zp.Engine(model) as engine:
        engine.load(FOLDER / "stage3-fp16", weights_only=True)
        for name, parameter in model.named_parameters():
            assert torch.equal(zp.full(parameter), expected[f"model.{name}"].float())


def test_nothing_is_left_beside_what_was_loaded(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER / "stage1-fp32", tmp_path / "theirs")
    before = sorted(tmp_path.rglob("*"))
    run(2, _loaded_and_trained, "stage1-fp32", str(folder))
    assert sorted(tmp_path.rglob("*")) == before


def test_the_command(tmp_path: Path) -> None:
    source = FOLDER / "stage3-fp32"
    told = CliRunner().invoke(cli.app, ["import-deepspeed", str(source), str(tmp_path / "out")])
    assert told.exit_code == 0
    assert "step 3, 4 trained parameters (ZeRO stage 3, 3 ranks)" in told.output
    assert (tmp_path / "out" / "latest").read_text() == "global_step3"
    again = CliRunner().invoke(cli.app, ["import-deepspeed", str(source), str(tmp_path / "out")])
    assert again.exit_code == 1 and "exists" in again.output


# -- what is refused


def _refusal(folder: Path, tag: str | None = None) -> str:
    """Nothing is written."""
    target = folder.parent / "target"
    with pytest.raises(zp.errors.CheckpointError) as raised:
        convert_deepspeed(folder, target, tag)
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name]
    return str(raised.value)


@pytest.fixture(params=OPTIM)
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(FOLDER / request.param, tmp_path / request.param)


def _files(folder: Path, kind: str) -> list[Path]:
    return sorted((folder / "global_step3").glob(f"*_{kind}_states.pt"))


@pytest.mark.parametrize("kind", ["optim", "model"])
def test_every_file_must_be_there(kind: str, damaged: Path) -> None:
    for file in _files(damaged, kind):
        kept = file.read_bytes()
        file.unlink()
        assert f"{file.name} is missing" in _refusal(damaged)
        file.write_bytes(kept)


@pytest.mark.parametrize("kind", ["optim", "model"])
def test_a_truncated_file_is_named(kind: str, damaged: Path) -> None:
    file = _files(damaged, kind)[0]
    kept = file.read_bytes()
    for length in (0, 100, len(kept) // 2, len(kept) - 1):
        file.write_bytes(kept[:length])
        told = _refusal(damaged)
        assert str(file) in told and "truncated" in told


def test_a_file_too_many_is_named(damaged: Path) -> None:
    last = _files(damaged, "optim")[-1]
    world = len(_files(damaged, "optim"))
    extra = last.with_name(last.name.replace(f"rank_{world - 1}_mp", f"rank_{world}_mp"))
    shutil.copy(last, extra)
    assert str(extra) in _refusal(damaged)


def test_a_pointer_to_nowhere(damaged: Path) -> None:
    (damaged / "latest").write_text("global_step99")
    told = _refusal(damaged)
    assert str(damaged / "latest") in told and "'global_step99'" in told and "global_step3" in told
    (damaged / "latest").unlink()
    assert "no file 'latest'" in _refusal(damaged)
    assert "'step7'" in _refusal(damaged, "step7")


def _rewritten(file: Path, change: Any) -> None:
    """Save `file` again with its content changed."""
    with torch.serialization.safe_globals(
        [(Inert, name) for name in torch.serialization.get_unsafe_globals_in_checkpoint(file)]
    ):
        values = torch.load(file, weights_only=True)
    change(values)
    for known in (values.get("optimizer_state_dict", {}),):
        for key in ("loss_scaler", "param_slice_mappings"):
            known.pop(key, None)
        if "zero_stage" in known:
            known["zero_stage"] = stage_of(known["zero_stage"])
    torch.save(values, file)


def _without_shapes(values: dict[str, Any]) -> None:
    del values["param_shapes"]


def _other_shapes(values: dict[str, Any]) -> None:
    values["param_shapes"][0]["embedding.weight"] = torch.Size([11, 500])


def _no_weights(values: dict[str, Any]) -> None:
    del values["module"]["embedding.weight"]


@pytest.mark.parametrize(
    ("change", "said"),
    [(_without_shapes, "'param_shapes'"), (_other_shapes, "elements"), (_no_weights, "'embedding.weight'")],
)
def test_an_inconsistent_model_file(change: Any, said: str, damaged: Path) -> None:
    file = _files(damaged, "model")[0]
    _rewritten(file, change)
    told = _refusal(damaged)
    assert said in told and str(file.parent) in told


def _short_moments(values: dict[str, Any]) -> None:
    inner = values["optimizer_state_dict"]
    state = inner.get("base_optimizer_state", inner.get("optimizer_state_dict"))["state"]
    state[0]["exp_avg"] = state[0]["exp_avg"][:3].clone()


def _other_world(values: dict[str, Any]) -> None:
    values["optimizer_state_dict"]["partition_count"] = 7


def _no_optimizer(values: dict[str, Any]) -> None:
    del values["optimizer_state_dict"]


@pytest.mark.parametrize(
    ("change", "said"),
    [(_short_moments, "'exp_avg'"), (_other_world, "missing"), (_no_optimizer, "'optimizer_state_dict'")],
)
def test_an_inconsistent_optimizer_file(change: Any, said: str, damaged: Path) -> None:
    file = _files(damaged, "optim")[-1]
    _rewritten(file, change)
    told = _refusal(damaged)
    assert said in told and str(file.parent) in told


class Payload:
    """A class of nobody's."""


def test_a_pickle_of_somebody_else_is_not_executed(damaged: Path) -> None:
    file = _files(damaged, "model")[0]
    _rewritten(file, lambda values: values.update(payload=Payload()))
    told = _refusal(damaged)
    assert str(file) in told and "Payload" in told


def test_parallelism_of_other_kinds_is_refused(damaged: Path) -> None:
    first = _files(damaged, "optim")[0]
    other = shutil.copy(first, first.with_name(first.name.replace("mp_rank_00", "mp_rank_01")))
    assert "parallelism" in _refusal(damaged) and Path(other).name in _refusal(damaged)


def _refused(name: str, folder: str) -> str:
    """What is said on a rank; the engine is as it was."""
    with _engine(CASES[name]) as engine:
        with pytest.raises(zp.errors.CheckpointError) as raised:
            engine.load(folder)
        assert engine.global_step == 0
        assert all(float(zp.full(p).abs().sum()) == 0 for p in engine.module.parameters())
    return str(raised.value)


def test_all_ranks_are_told(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER / "stage3-fp32", tmp_path / "theirs")
    before = sorted(tmp_path.rglob("*"))[1:]
    gone = _files(folder, "optim")[2]
    gone.unlink()
    for told in run(2, _refused, "stage3-fp32", str(folder)):
        assert f"{gone.name} is missing" in told
    assert sorted(tmp_path.rglob("*"))[1:] == [path for path in before if path != gone]


# -- small parts


def test_the_loss_scale_moves_on_as_there() -> None:
    """The rule of deepspeed/runtime/fp16/loss_scaler.py, beside ours started from its state at any moment.

    Up to the next overflow, that is: after each one DeepSpeed's first window is a step longer than ours.
    """
    random = torch.Generator().manual_seed(1)
    overflows = (torch.rand(400, generator=random) < 0.2).tolist()
    theirs = {"cur_scale": 2.0**30, "cur_iter": 0, "last_overflow_iter": -1, "scale_window": 3, "cur_hysteresis": 2}
    for start in range(60):
        ours = DynamicLossScale(window=3, hysteresis=2)
        ours.load_state_dict(loss_scale_from(theirs))
        ahead = dict(theirs)
        for overflow in overflows[start : start + 40]:
            ours.update(overflow)
            _deepspeed_update(ahead, overflow)
            assert ours.scale == ahead["cur_scale"]
            if overflow:
                break
        _deepspeed_update(theirs, overflows[start])


def _deepspeed_update(state: dict[str, Any], overflow: bool) -> None:
    if overflow:
        if state["cur_hysteresis"] == 1:
            state["cur_scale"] = max(state["cur_scale"] / 2, 1)
        else:
            state["cur_hysteresis"] -= 1
        state["last_overflow_iter"] = state["cur_iter"]
    else:
        stable = state["cur_iter"] - state["last_overflow_iter"] - 1
        if stable > 0 and stable % state["scale_window"] == 0:
            state["cur_hysteresis"] = 2
            state["cur_scale"] *= 2
    state["cur_iter"] += 1


def test_a_stage_however_it_was_pickled() -> None:
    assert stage_of(2) == stage_of(Inert(2)) == stage_of(Inert(Inert, "gradients")) == 2


def test_deepspeed_is_not_needed() -> None:
    assert "deepspeed" not in sys.modules


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stage2-bf16-shuffled", "stage3-fp32"])
def test_what_the_installed_deepspeed_writes(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    command = [sys.executable, "-W", "ignore", "-m", "tests.fixtures.make_deepspeed", "--into", str(tmp_path), name]
    made = subprocess.run(command, env=os.environ | {"DS_ACCELERATOR": "cpu"}, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-4000:]
    expected = load_file(tmp_path / name / "expected.safetensors")
    (seen,) = run(1, _loaded_and_trained, name, str(tmp_path / name))
    assert all(torch.equal(value, expected[key]) for key, value in seen["values"].items())
    assert seen["losses"] == pytest.approx(expected["losses"].tolist(), rel=TOLERANCE[CASES[name].precision])
