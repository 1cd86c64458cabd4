"""What the Lightning strategy saves, goes on from, and refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.distributed.checkpoint import FileSystemReader

from tests.harness import Failure, run
from tests.integrations.lightning_cases import (
    QUIET,
    Classifier,
    Distillation,
    Dropping,
    Gan,
    Outcome,
    full_state,
    loader,
    same_outcome,
    train,
    trainer_of,
)
from zeropage.errors import CheckpointError

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


def _tail(outcome: Outcome, steps: int) -> Outcome:
    return Outcome(outcome.losses[-steps:], outcome.state)


# -- going on


def _interrupted(build: Callable[[], Any], folder: Path, options: dict[str, Any]) -> tuple[Outcome, Outcome, Outcome]:
    """Without an interruption; up to it; and from there."""
    whole = train(build, "zeropage", 2, {**options, "max_epochs": 3})
    first = train(build, "zeropage", 2, {**options, "max_epochs": 1}, then_save=folder / "one.ckpt")
    torch.manual_seed(99)
    return whole, first, train(build, "zeropage", 2, {**options, "max_epochs": 3}, ckpt_path=folder / "one.ckpt")


@pytest.mark.parametrize(
    ("build", "options"),
    [
        pytest.param(Dropping, {}, id="dropout and a schedule"),
        pytest.param(Dropping, {"precision": "bf16-true"}, id="bf16-true"),
        pytest.param(Gan, {}, id="two optimizers"),
        pytest.param(Distillation, {}, id="teacher and student"),
    ],
)
def test_a_resumed_run_equals_the_uninterrupted_one(
    build: Callable[[], Any], options: dict[str, Any], tmp_path: Path
) -> None:
    for whole, _, resumed in run(2, _interrupted, build, tmp_path, options):
        assert len(resumed.losses) < len(whole.losses)
        same_outcome(_tail(whole, len(resumed.losses)), resumed)


def _on_ranks(world: int, build: Callable[[], Any], **how: Any) -> Outcome:
    both = run(world, train, build, "zeropage", world, how.pop("options"), **how)
    losses = [sum(parts) / world for parts in zip(*(outcome.losses for outcome in both), strict=True)]
    return Outcome(losses, both[0].state)


@pytest.mark.parametrize(("build", "saving", "loading"), [(Classifier, 2, 1), (Classifier, 1, 2), (Gan, 2, 1)])
def test_any_number_of_ranks_goes_on(build: Callable[[], Any], saving: int, loading: int, tmp_path: Path) -> None:
    whole = train(build, "auto", 1, {"max_epochs": 3})
    _on_ranks(saving, build, options={"max_epochs": 1}, then_save=tmp_path / "one.ckpt")
    resumed = _on_ranks(loading, build, options={"max_epochs": 3}, ckpt_path=tmp_path / "one.ckpt")
    same_outcome(_tail(whole, len(resumed.losses)), resumed, 1e-5)


def test_it_goes_on_from_what_lightning_saved_by_itself(tmp_path: Path) -> None:
    whole = train(Classifier, "auto", 1, {"max_epochs": 3})
    train(Classifier, "auto", 1, {"max_epochs": 1}, then_save=tmp_path / "one.ckpt")
    resumed = _on_ranks(2, Classifier, options={"max_epochs": 3}, ckpt_path=tmp_path / "one.ckpt")
    same_outcome(_tail(whole, len(resumed.losses)), resumed, 1e-5)


# -- callbacks


def _with_callbacks(strategy: str, folder: Path, ckpt_path: Path | None, epochs: int) -> tuple[Any, ...]:
    """ModelCheckpoint in the middle of an epoch and at its end; EarlyStopping counts on."""
    stopping = EarlyStopping("val", patience=3)
    checkpoints = ModelCheckpoint(folder, "{epoch}-{step}", monitor="val", save_top_k=2, save_last=True)
    often = ModelCheckpoint(folder / "often", "{step}", every_n_train_steps=3, save_top_k=-1)
    torch.manual_seed(0)
    module = Classifier()
    trainer = trainer_of(
        strategy, 2, max_epochs=epochs, enable_checkpointing=True, callbacks=[stopping, checkpoints, often]
    )
    trainer.fit(module, loader(4, 2), loader(4, 2), ckpt_path=ckpt_path)
    last = full_state(module)
    (best,) = trainer.test(module, loader(4, 2), ckpt_path="best", verbose=False)
    kept = sorted(path.name for path in folder.glob("*.ckpt"))
    assert best["test"] == pytest.approx(float(checkpoints.best_model_score))
    return Outcome(module.losses, last), stopping.state_dict(), best, trainer.global_step, kept


def _resumed_with_callbacks(strategy: str, folder: Path) -> list[tuple[Any, ...]]:
    """Without an interruption; to the half; from there; and from the middle of an epoch."""
    return [
        _with_callbacks(strategy, folder / "whole", None, 4),
        _with_callbacks(strategy, folder / "half", None, 2),
        _with_callbacks(strategy, folder / "half", folder / "half" / "last.ckpt", 4),
        _with_callbacks(strategy, folder / "middle", folder / "whole" / "often" / "step=6.ckpt", 4),
    ]


@pytest.mark.slow
def test_callbacks_go_on_as_under_ddp_and_find_the_best_again(tmp_path: Path) -> None:
    everywhere = [run(2, _resumed_with_callbacks, strategy, tmp_path / strategy) for strategy in ("ddp", "zeropage")]
    for expected, got in zip(*everywhere, strict=True):
        for (outcome, *rest), (our_outcome, *our_rest) in zip(expected, got, strict=True):
            same_outcome(outcome, our_outcome)
            assert our_rest == rest
        same_outcome(_tail(got[0][0], 8), got[2][0])
        assert got[0][-1] == got[2][-1] == ["epoch=2-step=12.ckpt", "epoch=3-step=16.ckpt", "last.ckpt"]


# -- weights alone, and parts


def _weights_only(path: Path) -> tuple[float, float, str]:
    torch.manual_seed(0)
    module, trainer = Classifier(), trainer_of("zeropage", 2)
    trainer.fit(module, loader(8, 2))
    trainer.save_checkpoint(path, weights_only=True)
    (told,) = trainer.validate(module, loader(8, 2), verbose=False)
    torch.manual_seed(1)
    other = Classifier()
    (found,) = trainer_of("zeropage", 2).validate(other, loader(8, 2), ckpt_path=path, verbose=False)
    with pytest.raises(CheckpointError) as raised:
        trainer_of("zeropage", 2, max_epochs=3).fit(other, loader(8, 2), ckpt_path=path)
    return told["val"], found["val"], str(raised.value)


def test_weights_alone_can_be_evaluated_and_not_gone_on_from(tmp_path: Path) -> None:
    for told, found, message in run(2, _weights_only, tmp_path / "weights.ckpt"):
        assert told == found
        assert "save_weights_only=True" in message
    assert not (tmp_path / "weights.ckpt" / "state").exists()


class _Lean(Distillation):
    """Its checkpoints do not hold the teacher, by a hook."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name in [name for name in checkpoint["state_dict"] if name.startswith("teacher")]:
            del checkpoint["state_dict"][name]
        checkpoint["note"] = {"by": "a hook"}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.note = checkpoint["note"]


def _without_teacher(folder: Path) -> tuple[Outcome, Outcome, Any]:
    whole, _, resumed = _interrupted(_Lean, folder, {})
    module = _Lean()
    trainer_of("zeropage", 2).validate(module, loader(8, 2), ckpt_path=folder / "one.ckpt", verbose=False)
    return whole, resumed, module.note


def test_a_hook_leaves_the_teacher_out(tmp_path: Path) -> None:
    for whole, resumed, note in run(2, _without_teacher, tmp_path):
        same_outcome(_tail(whole, len(resumed.losses)), resumed)
        assert note == {"by": "a hook"}
    saved = FileSystemReader(tmp_path / "one.ckpt" / "state").read_metadata().state_dict_metadata
    named = {key for key in saved if key.startswith("model.")}
    assert named == {f"model.student.{name}" for name in ("0.weight", "0.bias", "2.weight", "2.bias")}


class _Changing(Classifier):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["net.0.weight"] = torch.zeros(9, 7)


def _refused(path: Path) -> str:
    torch.manual_seed(0)
    trainer = trainer_of("zeropage", 2)
    trainer.fit(_Changing(), loader(8, 2))
    with pytest.raises(CheckpointError) as raised:
        trainer.save_checkpoint(path)
    return str(raised.value)


def test_a_hook_that_changes_tensors_is_told(tmp_path: Path) -> None:
    for message in run(2, _refused, tmp_path / "one.ckpt"):
        assert "net.0.weight" in message
    assert not (tmp_path / "one.ckpt").exists()


class _Counting(Classifier):
    """Has state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.seen += 1
        return super().training_step(batch, index)

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def _extra_state(path: Path) -> int:
    trainer = trainer_of("zeropage", 2)
    trainer.fit(_Counting(), loader(8, 2))
    trainer.save_checkpoint(path)
    module = _Counting()
    trainer_of("zeropage", 2, max_epochs=3).fit(module, loader(8, 2), ckpt_path=path)
    return module.seen


def test_extra_state_comes_back(tmp_path: Path) -> None:
    assert run(2, _extra_state, tmp_path / "one.ckpt") == [6, 6]


def _wrong_model(path: Path) -> None:
    trainer = trainer_of("zeropage", 2)
    trainer.fit(Classifier(), loader(8, 2))
    trainer.save_checkpoint(path)
    trainer_of("zeropage", 2, max_epochs=3).fit(Gan(), loader(8, 2), ckpt_path=path)


def test_a_checkpoint_of_another_model_is_told_on_all_ranks(tmp_path: Path) -> None:
    for failure in run(2, _wrong_model, tmp_path / "one.ckpt", expect_errors=True):
        assert isinstance(failure, Failure)
        assert "does not fit the model" in failure.traceback and "generator.0.weight" in failure.traceback
