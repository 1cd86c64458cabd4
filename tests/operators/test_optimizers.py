"""`torch.optim` optimizers built on `model.parameters()`, without an engine: a plain loop, sharded.

Every rank trains the sharded model on its own batches, and next to it a plain one on everybody's, whose
gradients are added in the order of ranks. Parameters must agree to the bit, at any number of ranks.
"""

from __future__ import annotations

import copy
import io
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

import zeropage as zp
from tests.harness import run

TRANSPORTS = ("shared", "collective")
WORLDS = (2, 3)
MOSTLY = ("shared", pytest.param("collective", marks=pytest.mark.slow))  # for what does not depend on it
STEPS = 4
Make = Callable[[list[nn.Parameter]], optim.Optimizer]


class Lion(optim.Optimizer):
    """An optimizer that torch does not have, written as people write them."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                momentum = state["momentum"]
                p.data.mul_(1 - group["lr"] * 0.01)
                update = momentum.clone().mul_(0.9).add(p.grad, alpha=0.1).sign_()
                p.add_(update, alpha=-group["lr"])
                momentum.lerp_(p.grad, 0.01)


ELEMENTWISE: dict[str, Make] = {
    "SGD": lambda p: optim.SGD(p, 0.1),
    "SGD nesterov": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD foreach": lambda p: optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "Adam": lambda p: optim.Adam(p, 0.01),
    "Adam amsgrad": lambda p: optim.Adam(p, 0.01, amsgrad=True),
    "Adam maximize": lambda p: optim.Adam(p, 0.01, maximize=True, weight_decay=0.1),
    "AdamW": lambda p: optim.AdamW(p, 0.01),
    "AdamW foreach": lambda p: optim.AdamW(p, 0.01, foreach=True),
    "AdamW foreach amsgrad": lambda p: optim.AdamW(p, 0.01, foreach=True, amsgrad=True),
    "AdamW fused": lambda p: optim.AdamW(p, 0.01, fused=True),
    "AdamW tensor lr": lambda p: optim.AdamW(p, torch.tensor(0.01)),
    "AdamW groups": lambda p: optim.AdamW([{"params": p[:2]}, {"params": p[2:], "lr": 0.1, "weight_decay": 0.0}], 0.01),
    "Adagrad": lambda p: optim.Adagrad(p, 0.01, initial_accumulator_value=0.1),
    "Adagrad foreach": lambda p: optim.Adagrad(p, 0.01, foreach=True),
    "Adagrad fused": lambda p: optim.Adagrad(p, 0.01, fused=True),
    "RMSprop": lambda p: optim.RMSprop(p, 0.01, centered=True, momentum=0.9),
    "RMSprop foreach": lambda p: optim.RMSprop(p, 0.01, foreach=True),
    "Adadelta": lambda p: optim.Adadelta(p),
    "Adamax": lambda p: optim.Adamax(p),
    "NAdam": lambda p: optim.NAdam(p),
    "RAdam": lambda p: optim.RAdam(p),
    "ASGD": lambda p: optim.ASGD(p),
}
WHOLE: dict[str, Make] = {
    "Lion": Lion,
    "Rprop": lambda p: optim.Rprop(p),
    "Adafactor": lambda p: optim.Adafactor(p, 0.01),
    "Adafactor foreach": lambda p: optim.Adafactor(p, 0.01, foreach=True),
    "Muon": lambda p: optim.Muon([q for q in p if q.dim() == 2], 0.01),
    "LBFGS": lambda p: optim.LBFGS(p, 0.1, max_iter=2, line_search_fn="strong_wolfe"),
}
OPTIMIZERS = ELEMENTWISE | WHOLE


class Model(nn.Module):
    """Matrices, vectors and a number, none of which the ranks divide."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(17, 23)
        self.second = nn.Linear(23, 11, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.randn(7))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale


def build() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(5, 17, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(batch(step, rank)).square().mean()


class Side:
    """One of the two models in a comparison."""

    def __init__(self, make: Make, transport: str | None, model: nn.Module | None = None, **settings: Any) -> None:
        self.model = build() if model is None else model
        self.plain = transport is None
        if transport is not None:
            zp.shard(self.model, {"transport": transport, "poison_frames": True} | settings)
        self.optimizer = make(list(self.model.parameters()))

    def backward(self, step: int, change: Callable[[Tensor, int], Tensor] = lambda loss, rank: loss) -> Tensor:
        """Gradients of the mean loss over ranks. `change` makes something else of a rank's loss, which is returned."""
        if not self.plain:
            loss = change(loss_of(self.model, step, dist.get_rank()), dist.get_rank())
            loss.backward()
            return loss.detach()
        world = dist.get_world_size()
        kept = {parameter: parameter.grad for parameter in self.model.parameters()}
        losses = []
        for rank in range(world):
            for parameter in self.model.parameters():
                parameter.grad = None
            loss = change(loss_of(self.model, step, rank), rank)
            loss.backward()
            losses.append(loss.detach())
            for parameter in self.model.parameters():
                if parameter.grad is None:
                    continue
                if kept[parameter] is None:
                    kept[parameter] = parameter.grad * (1 / world)
                else:
                    kept[parameter].add_(parameter.grad, alpha=1 / world)
        for parameter, gradient in kept.items():
            parameter.grad = gradient
        return mean_of(losses)

    def train(self, steps: Iterable[int], before_step: Callable[[nn.Module], Any] | None = None) -> None:
        for step in steps:
            if isinstance(self.optimizer, optim.LBFGS):
                self.optimizer.step(lambda step=step: self._closure(step))
                continue
            self.backward(step)
            if before_step is not None:
                before_step(self.model)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _closure(self, step: int) -> Tensor:
        self.optimizer.zero_grad()
        with torch.enable_grad():
            loss = self.backward(step)
        return loss if self.plain else all_mean(loss)  # it decides how the line search goes on


def all_mean(loss: Tensor) -> Tensor:
    losses = [torch.empty_like(loss) for _ in range(dist.get_world_size())]
    dist.all_gather(losses, loss)
    return mean_of(losses)


def mean_of(losses: list[Tensor]) -> Tensor:
    return torch.stack(losses).mean()


def differences(plain: nn.Module, paged: nn.Module) -> list[str]:
    """Parameters that are not equal to the bit."""
    found = []
    for (name, one), (_, other) in zip(plain.named_parameters(), paged.named_parameters(), strict=True):
        full = zp.full(other)
        if not torch.equal(one.detach(), full):
            found.append(f"{name} differs by {float((one.detach() - full).abs().max()):.1e}")
    return found


# -- every optimizer in a plain loop


@pytest.mark.parametrize("transport", MOSTLY)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("names", [list(ELEMENTWISE), list(WHOLE)], ids=["elementwise", "whole"])
def test_optimizers_equal_unsharded_ones(world: int, transport: str, names: list[str]) -> None:
    for found in run(world, run_optimizers, names, transport):
        assert found == {}


def run_optimizers(names: list[str], transport: str) -> dict[str, Any]:
    found = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*not elementwise.*")
        for name in names:
            try:
                plain, paged = Side(OPTIMIZERS[name], None), Side(OPTIMIZERS[name], transport)
                plain.train(range(STEPS))
                paged.train(range(STEPS))
                wrong = differences(plain.model, paged.model)
                if not differences(build(), paged.model):
                    wrong.append("nothing was trained")
                if name in ELEMENTWISE:
                    wrong += unsharded_state(paged.optimizer)
                if wrong:
                    found[name] = wrong
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
            dist.barrier()
    return found


def unsharded_state(optimizer: optim.Optimizer) -> list[str]:
    """State of the size of a parameter that is not paged."""
    return [
        f"{key} of a parameter of shape {tuple(parameter.shape)} is not sharded"
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor) and value.dim() > 0 and not zp.is_paged(value)
    ]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_optimizers_that_need_whole_matrices_say_so_once(transport: str) -> None:
    assert run(2, run_warned, transport) == [(0, 1)] * 2


def run_warned(transport: str) -> tuple[int, int]:
    """How often AdamW and Muon warn in three steps."""
    counts = []
    for name in ("AdamW", "Muon"):
        paged = Side(OPTIMIZERS[name], transport, nn.Sequential(nn.Linear(17, 23), nn.Linear(23, 11)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            paged.train(range(3))
        counts.append(sum("not elementwise" in str(warning.message) for warning in caught))
    return counts[0], counts[1]


# -- through the engine


@pytest.mark.parametrize("transport", MOSTLY)
@pytest.mark.parametrize("world", WORLDS)
def test_optimizers_through_the_engine_equal_unsharded_ones(world: int, transport: str) -> None:
    for found in run(world, run_engines, transport):
        assert found == {}


def run_engines(transport: str) -> dict[str, Any]:
    found = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*not elementwise.*")
        for name in OPTIMIZERS:
            if name == "LBFGS":
                continue
            try:
                plain, paged = Side(OPTIMIZERS[name], None), Side(OPTIMIZERS[name], transport)
                plain.train(range(STEPS))
                engine = zp.Engine(paged.model, paged.optimizer)
                for step in range(STEPS):
                    engine.backward(loss_of(paged.model, step, dist.get_rank()))
                    engine.step()
                wrong = differences(plain.model, paged.model)
                if wrong:
                    found[name] = wrong
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
            dist.barrier()
    return found


# -- what a training loop does around the step


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", WORLDS)
def test_clipping(world: int, transport: str) -> None:
    for found in run(world, run_clipping, transport):
        assert found == {}


def run_clipping(transport: str) -> dict[str, Any]:
    found = {}
    ways: dict[str, Callable[[nn.Module], Any]] = {
        "norm": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.05),
        "norm, foreach": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.05, foreach=True),
        "largest": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.05, norm_type=float("inf")),
        "value": lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.01),
        "value, foreach": lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.01, foreach=True),
        "by hand": lambda m: [p.grad.mul_(0.1) for p in m.parameters() if p.grad is not None],
        "assigned": lambda m: [setattr(p, "grad", p.grad * 0.1) for p in m.parameters() if p.grad is not None],
    }
    for name, clip in ways.items():
        plain, paged = Side(OPTIMIZERS["AdamW"], None), Side(OPTIMIZERS["AdamW"], transport)
        answers: list[list[float]] = []
        for side in (plain, paged):
            answers.append([])
            side.train(range(3), lambda model: answers[-1].append(clip(model)))
        if "norm" in name or name == "largest":
            norms = [[float(norm) for norm in answer] for answer in answers]
            if norms[0] != norms[1]:
                found[name] = norms
        wrong = differences(plain.model, paged.model)
        if wrong:
            found[name] = wrong
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", WORLDS)
def test_grad_scaler(world: int, transport: str) -> None:
    for found in run(world, run_scaler, transport):
        assert found == []


def run_scaler(transport: str) -> list[Any]:
    """One overflow, which the last rank alone brings; scale and parameters as in the plain run."""
    sides = [Side(OPTIMIZERS["SGD nesterov"], None), Side(OPTIMIZERS["SGD nesterov"], transport)]
    scales: list[list[float]] = []
    for side in sides:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        scales.append([])
        for step in range(5):

            def scaled(loss: Tensor, rank: int, scaler: Any = scaler, step: int = step) -> Tensor:
                bad = step == 1 and rank == dist.get_world_size() - 1
                return scaler.scale(loss * float("inf") if bad else loss)

            side.backward(step, scaled)
            scaler.unscale_(side.optimizer)
            nn.utils.clip_grad_norm_(side.model.parameters(), 0.5)
            scaler.step(side.optimizer)
            scaler.update()
            side.optimizer.zero_grad()
            scales[-1].append(scaler.get_scale())
    wrong: list[Any] = differences(sides[0].model, sides[1].model)
    if scales[0] != scales[1] or 4.0 not in scales[1]:
        wrong.append(scales)
    return wrong


@pytest.mark.parametrize("transport", MOSTLY)
@pytest.mark.parametrize("world", WORLDS)
def test_state_dicts(world: int, transport: str) -> None:
    for found in run(world, run_state_dicts, transport):
        assert found == {}


def run_state_dicts(transport: str) -> dict[str, Any]:
    """Two steps, the state into a new model and optimizer, two more: as four steps without a break."""
    found = {}
    for name in ("AdamW", "AdamW fused", "SGD nesterov", "Adagrad", "Adam amsgrad", "RMSprop"):
        plain, first = Side(OPTIMIZERS[name], None), Side(OPTIMIZERS[name], transport)
        plain.train(range(4))
        first.train(range(2))
        weights = {key: zp.full(value) for key, value in first.model.state_dict().items()}
        paged_state = first.optimizer.state_dict()
        file = io.BytesIO()
        torch.save(paged_state, file)
        file.seek(0)
        saved_state = torch.load(file, weights_only=True)
        for kind, state in (("paged", copy.deepcopy(paged_state)), ("saved", copy.deepcopy(saved_state))):
            again = Side(OPTIMIZERS[name], transport)
            again.model.load_state_dict(weights)
            again.optimizer.load_state_dict(state)
            again.train(range(2, 4))
            wrong = differences(plain.model, again.model) + unsharded_state(again.optimizer)
            if wrong:
                found[f"{name}, {kind}"] = wrong
        unsharded = Side(OPTIMIZERS[name], None)  # and back into a plain training
        unsharded.model.load_state_dict(weights)
        unsharded.optimizer.load_state_dict(saved_state)
        unsharded.train(range(2, 4))
        wrong = differences(plain.model, unsharded.model)
        if wrong:
            found[f"{name}, unsharded"] = wrong
    return found


class Failing(optim.SGD):
    """Raises in the middle of its third step."""

    steps = 0

    def step(self, closure: Callable[[], Tensor] | None = None) -> None:  # type: ignore[override]
        self.steps += 1
        if self.steps == 3:
            with torch.no_grad():
                self.param_groups[0]["params"][0].mul_(1)
            raise ValueError("in the middle of a step")
        super().step(closure)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_exception_inside_a_step(transport: str) -> None:
    for found in run(2, run_failing_step, transport):
        assert found == []


def run_failing_step(transport: str) -> list[str]:
    sides = [Side(lambda p: Failing(p, 0.1, momentum=0.9), kind) for kind in (None, transport)]
    wrong = []
    for side in sides:
        side.train(range(2))
        try:
            side.train([2])
            wrong.append("did not raise")
        except ValueError:
            pass
        with torch.no_grad():
            if zp.is_paged(side.model.first.weight * 2):
                wrong.append("still inside the step")
            side.model.first.weight.mul_(2)  # an ordinary write
        side.optimizer.zero_grad()
        side.train(range(3, 5))
    return wrong + differences(sides[0].model, sides[1].model)


class ByNorm(optim.Optimizer):
    """Reads whole parameters and writes to them in turn; ranks are at different points of their step."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                time.sleep(0.02 * (dist.get_rank() % 2))
                p.mul_(p.square().sum() / (1 + p.grad.abs().sum()))
                p.div_(p.abs().max() + p.grad.abs().max())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_reads_inside_a_step_do_not_depend_on_timing_or_residency(transport: str) -> None:
    for found in run(2, run_by_norm, transport):
        assert found == []


def run_by_norm(transport: str) -> list[str]:
    plain, paged = Side(ByNorm, None), Side(ByNorm, transport)
    plain.train(range(3))

    def look(model: nn.Module) -> None:
        if dist.get_rank() == 0:  # resident on this rank alone
            model.second.weight.sum(), model.first.weight.grad.sum()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*not elementwise.*")
        paged.train(range(3), look)
    found = differences(plain.model, paged.model)
    with torch.no_grad():
        paged.model.unused.zero_()  # a meeting: over collectives, a rank that has left serves nobody
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_schedulers_groups_averages_and_accumulation(transport: str) -> None:
    for found in run(2, run_around, transport):
        assert found == []


def run_around(transport: str) -> list[str]:
    sides = [Side(lambda p: optim.AdamW(p[:2], 0.01), None), Side(lambda p: optim.AdamW(p[:2], 0.01), transport)]
    averages = []
    for side in sides:
        scheduler = optim.lr_scheduler.CosineAnnealingLR(side.optimizer, 10)
        average = optim.swa_utils.AveragedModel(side.model, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn(0.9))
        stochastic = optim.swa_utils.AveragedModel(side.model)
        for step in range(6):
            side.backward(step)
            if step % 2 == 0:
                continue  # gradients of two batches add up
            if step == 3:
                rest = list(side.model.parameters())[2:]
                side.optimizer.add_param_group({"params": rest, "lr": 0.05})
            side.optimizer.step()
            side.optimizer.zero_grad(set_to_none=step != 1)
            scheduler.step()
            average.update_parameters(side.model)
            stochastic.update_parameters(side.model)
        averages.append((average, stochastic))
    wrong = differences(sides[0].model, sides[1].model)
    for one, other in zip(*averages, strict=True):
        wrong += [f"average: {difference}" for difference in differences(one, other)]
        if not all(zp.is_paged(parameter) for parameter in other.parameters()):
            wrong.append("an average is not sharded")
    return wrong
