"""`Trainer(strategy="zeropage")` gives what Lightning gives by itself: to the bit where it adds in the same order.

Two ranks are compared with two ranks of DDP, whose sums of two gradients are the same sums; and with one process on
batches of twice the size, to rounding. One rank is compared with Lightning without any strategy, to the bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, EMAWeightAveraging, StochasticWeightAveraging

from tests.harness import run
from tests.integrations.lightning_cases import (
    QUIET,
    Classifier,
    Distillation,
    Gan,
    Numbers,
    Outcome,
    full_state,
    loader,
    same_outcome,
    train,
    trainer_of,
)
from zeropage.errors import ConfigError
from zeropage.lightning import ZeropageStrategy

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]

TRAININGS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "automatic": (Classifier, {}),
    "accumulated": (Classifier, {"accumulate_grad_batches": 2}),
    "clipped by norm": (Classifier, {"gradient_clip_val": 0.1}),
    "clipped by value": (Classifier, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "bf16-mixed": (Classifier, {"precision": "bf16-mixed"}),
    "bf16-true": (Classifier, {"precision": "bf16-true"}),
    "16-true": (Classifier, {"precision": "16-true"}),
    "64-true": (Classifier, {"precision": "64-true"}),
    "manual, two optimizers": (Gan, {}),
    "teacher and student": (Distillation, {}),
}


def _both(build: Callable[[], Any], options: dict[str, Any]) -> tuple[Outcome, Outcome]:
    return train(build, "ddp_find_unused_parameters_true", 2, options), train(build, "zeropage", 2, options)


@pytest.mark.parametrize("what", TRAININGS)
def test_two_ranks_train_as_those_of_ddp(what: str) -> None:
    build, options = TRAININGS[what]
    # DDP adds micro-batches up before ranks; norms are summed in another order
    tolerance = 1e-6 if what in ("accumulated", "clipped by norm") else 0.0
    for expected, got in run(2, _both, build, options):
        same_outcome(expected, got, tolerance)


@pytest.mark.parametrize("what", ["automatic", "accumulated", "clipped by norm", "64-true"])
def test_two_ranks_train_as_one_process_on_the_whole_batch(what: str) -> None:
    build, options = TRAININGS[what]
    expected = train(build, "auto", 1, options)
    both = run(2, train, build, "zeropage", 2, options)
    losses = [sum(pair) / 2 for pair in zip(*(outcome.losses for outcome in both), strict=True)]
    same_outcome(expected, Outcome(losses, both[0].state), 1e-5)
    assert len(losses) == 4


@pytest.mark.parametrize("what", TRAININGS)
def test_one_rank_trains_as_lightning_alone(what: str) -> None:
    build, options = TRAININGS[what]
    expected = train(build, "auto", 1, options)
    (got,) = run(1, train, build, "zeropage", 1, options)
    same_outcome(expected, got, 1e-6 if what == "clipped by norm" else 0.0)


def _over_messages(build: Callable[[], Any], options: dict[str, Any]) -> tuple[Outcome, Outcome]:
    return train(build, "ddp_find_unused_parameters_true", 2, options), train(
        build, ZeropageStrategy({"transport": "collective"}), 2, options
    )


@pytest.mark.parametrize("what", ["clipped by norm", "bf16-mixed", "manual, two optimizers", "teacher and student"])
def test_ranks_that_share_no_memory(what: str) -> None:
    build, options = TRAININGS[what]
    for expected, got in run(2, _over_messages, build, options):
        same_outcome(expected, got, 1e-6)


# -- callbacks that reach into the training, and an optimizer that calls its closure itself


class _Quasi(Classifier):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class _FrozenAtFirst(Classifier):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class _Thaw(BaseFinetuning):
    """The first layer is trained from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


def _with_callback(
    build: Callable[[], Any], strategy: str, devices: int, callback: Callable[[], Any] | None
) -> Outcome:
    return train(build, strategy, devices, {"max_epochs": 4, "callbacks": [] if callback is None else [callback()]})


@pytest.mark.filterwarnings("ignore:LBFGS, or a hook on it, is not elementwise.*:", "ignore:SWA is currently only.*:")
@pytest.mark.parametrize(
    ("build", "callback"),
    [
        pytest.param(_Quasi, None, id="LBFGS"),
        pytest.param(_FrozenAtFirst, _Thaw, id="thawing"),
        pytest.param(Classifier, partial(StochasticWeightAveraging, 1e-3, swa_epoch_start=1), id="averaging"),
        pytest.param(Classifier, partial(EMAWeightAveraging, decay=0.9), id="moving average"),
    ],
)
def test_what_reaches_into_the_training(build: Callable[[], Any], callback: Callable[[], Any] | None) -> None:
    both = run(2, _with_callback, build, "zeropage", 2, callback)
    if build is _Quasi:  # it makes much of the rounding of a batch in one piece
        for ddp, ours in zip(run(2, _with_callback, build, "ddp", 2, callback), both, strict=True):
            same_outcome(ddp, ours, 1e-5)
        return
    expected = _with_callback(build, "auto", 1, callback)
    losses = [sum(pair) / 2 for pair in zip(*(outcome.losses for outcome in both), strict=True)]
    same_outcome(expected, Outcome(losses, both[0].state), 1e-4)


# -- fp32 masters, which Lightning's other strategies have not


class _Slow(Classifier):
    """Updates that are nothing in bf16."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def _on_masters() -> list[list[float]]:
    """Plain torch: bf16 copies compute, fp32 values are stepped. The losses of both ranks."""
    torch.manual_seed(0)
    module = _Slow()
    optimizer = module.configure_optimizers()
    exact = {name: p.detach().clone() for name, p in module.net.named_parameters()}
    told: list[list[float]] = [[], []]
    samples = torch.stack([Numbers()[i] for i in range(16)])
    for step in range(4):
        batch = samples[step % 2 * 8 : step % 2 * 8 + 8].bfloat16()
        sums = {name: torch.zeros_like(value) for name, value in exact.items()}
        for rank in range(2):
            net = copy.deepcopy(module.net).bfloat16()
            loss = net(batch[rank::2]).float().square().mean()
            loss.backward()
            told[rank].append(loss.item())
            for name, parameter in net.named_parameters():
                sums[name] += parameter.grad.float() / 2
        for name, parameter in module.net.named_parameters():
            parameter.grad = sums[name]
        optimizer.step()
    return told


def _with_masters(folder: Path) -> tuple[list[float], list[float], set[torch.dtype]]:
    options = {"precision": "bf16-true", "max_epochs": 2}
    whole = train(_Slow, ZeropageStrategy(fp32_masters=True), 2, options)
    half = {**options, "max_epochs": 1}
    train(_Slow, ZeropageStrategy(fp32_masters=True), 2, half, then_save=folder / "one.ckpt")
    rest = train(_Slow, ZeropageStrategy(fp32_masters=True), 2, options, ckpt_path=folder / "one.ckpt")
    assert rest.losses == whole.losses[2:]
    same_outcome(Outcome(rest.losses, whole.state), rest)
    without = train(_Slow, "zeropage", 2, options)
    assert without.losses[1:] != whole.losses[1:]
    return whole.losses, rest.losses, {value.dtype for value in whole.state.values()}


def test_masters_keep_what_bf16_would_lose(tmp_path: Path) -> None:
    expected = _on_masters()
    for rank, (losses, rest, dtypes) in enumerate(run(2, _with_masters, tmp_path)):
        assert losses == expected[rank] and len(rest) == 2
        assert dtypes == {torch.bfloat16}


def _fitted_twice(fits: int) -> Outcome:
    torch.manual_seed(0)
    module = _Plain()
    trainer = trainer_of(ZeropageStrategy(fp32_masters=True), 2, precision="bf16-true", max_epochs=4 // fits)
    for fit in range(1, fits + 1):
        trainer.fit_loop.max_epochs = 4 // fits * fit
        trainer.fit(module, loader(8, 2))
    return Outcome(module.losses, full_state(module))


class _Plain(Classifier):
    """Its optimizer keeps nothing, so a second fit is the rest of the first."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def test_a_second_fit_goes_on_with_the_masters() -> None:
    for once, twice in zip(run(2, _fitted_twice, 1), run(2, _fitted_twice, 2), strict=True):
        assert len(once.losses) == 8
        same_outcome(once, twice)


def _gan_with_masters() -> list[torch.dtype]:
    torch.manual_seed(0)
    module = Gan()
    trainer = trainer_of(ZeropageStrategy(fp32_masters=True), 2, precision="bf16-true")
    trainer.fit(module, loader(8, 2))
    return [o.state[p]["exp_avg" if i == 0 else "momentum_buffer"].dtype
            for i, o in enumerate(trainer.optimizers) for g in o.param_groups for p in g["params"]]  # fmt: skip


def test_masters_of_two_optimizers() -> None:
    for dtypes in run(2, _gan_with_masters):
        assert dtypes == [torch.float32] * 8


def _masters_of_wide_parameters() -> None:
    with pytest.raises(ConfigError, match="bf16-true"):
        train(Classifier, ZeropageStrategy(fp32_masters=True), 1)


def test_masters_that_cannot_be_are_refused() -> None:
    run(1, _masters_of_wide_parameters)
