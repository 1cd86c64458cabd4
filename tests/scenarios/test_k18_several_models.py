"""Several sharded models and engines in one process: nothing is global, each engine steps its own parameters."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zeropage as zp
from tests.harness import run
from tests.harness.models import build_lm, build_mlp, build_tied_lm, lm_batch, mlp_batch
from tests.scenarios.beside import averaged_backward, everywhere, plain_copy, same_parameters
from zeropage.errors import GradientError

STEPS = 4


def _engine(model: nn.Module, transport: str, lr: float = 1e-2) -> zp.Engine:
    return zp.Engine(model, torch.optim.AdamW(model.parameters(), lr=lr), {"transport": transport})


def _distil(teacher: nn.Module, student: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        wanted = teacher(tokens).softmax(-1)
    return F.cross_entropy(student(tokens).flatten(0, 1), wanted.flatten(0, 1))


def _teacher(transport: str) -> None:
    """A frozen teacher with an engine of its own (no optimizer), made in either order."""
    for teacher_first in (True, False):
        plain_teacher, plain_student = plain_copy(build_lm, 1).requires_grad_(False), plain_copy(build_tied_lm, 2)
        reference = torch.optim.AdamW(plain_student.parameters(), lr=1e-2)
        if teacher_first:
            teacher = zp.Engine(plain_copy(build_lm, 1).requires_grad_(False), config={"transport": transport})
        student = _engine(plain_copy(build_tied_lm, 2), transport)
        if not teacher_first:
            teacher = zp.Engine(plain_copy(build_lm, 1).requires_grad_(False), config={"transport": transport})
        for step in range(STEPS):
            averaged_backward(
                plain_student.parameters(),
                lambda rank, step=step: _distil(plain_teacher, plain_student, lm_batch(step, 0, rank)),
            )
            reference.step()
            reference.zero_grad()
            student.backward(_distil(teacher, student, lm_batch(step, 0, dist.get_rank())))
            student.step()
        same_parameters(plain_student, student.module)
        same_parameters(plain_teacher, teacher.module, exact=True)
        teacher.close()
        student.close()


@everywhere
def test_student_and_frozen_teacher(transport: str, world: int) -> None:
    run(world, _teacher, transport)


def _critic_loss(generator: nn.Module, critic: nn.Module, step: int, rank: int) -> Tensor:
    fake = generator(mlp_batch(step, 1, rank)).detach()
    return critic(fake).mean() - critic(mlp_batch(step, 0, rank)).mean()


def _generator_loss(generator: nn.Module, critic: nn.Module, step: int, rank: int) -> Tensor:
    return -critic(generator(mlp_batch(step, 1, rank))).mean()


def _gan(transport: str) -> None:
    """The generator's loss goes through the critic, whose gradients of it are dropped."""
    rank = dist.get_rank()
    g, d = plain_copy(build_mlp, 1), plain_copy(build_mlp, 2)
    both = [*g.parameters(), *d.parameters()]
    g_reference, d_reference = torch.optim.AdamW(g.parameters(), lr=1e-2), torch.optim.AdamW(d.parameters(), lr=3e-3)
    generator, critic = _engine(plain_copy(build_mlp, 1), transport), _engine(plain_copy(build_mlp, 2), transport, 3e-3)
    for step in range(STEPS):
        averaged_backward(both, lambda rank, step=step: _critic_loss(g, d, step, rank))
        d_reference.step()
        d_reference.zero_grad()
        averaged_backward(both, lambda rank, step=step: _generator_loss(g, d, step, rank))
        g_reference.step()
        g_reference.zero_grad()
        d_reference.zero_grad()

        critic.backward(_critic_loss(generator, critic, step, rank))
        assert all(p.grad is None for p in generator.module.parameters())
        critic.step()
        generator.backward(_generator_loss(generator, critic, step, rank))
        assert all(p.grad is not None for p in critic.module.parameters())
        generator.step()
        critic.zero_grad()
    same_parameters(g, generator.module)
    same_parameters(d, critic.module)
    critic.close()
    generator.close()


@everywhere
def test_generator_and_critic(transport: str, world: int) -> None:
    run(world, _gan, transport)


def _joint(transport: str) -> None:
    """One loss over two trained models; whichever engine runs the backward and steps first."""
    rank = dist.get_rank()
    plain = [plain_copy(build_mlp, 1), plain_copy(build_mlp, 2)]
    parameters = [p for model in plain for p in model.parameters()]
    references = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in plain]
    engines = [_engine(plain_copy(build_mlp, seed), transport) for seed in (1, 2)]
    for step in range(STEPS):
        averaged_backward(
            parameters, lambda rank, step=step: plain[1](plain[0](mlp_batch(step, 0, rank))).square().mean()
        )
        for reference in references:
            reference.step()
            reference.zero_grad()
        one, other = engines if step % 2 else reversed(engines)
        one.backward(engines[1](engines[0](mlp_batch(step, 0, rank))).square().mean())
        assert one.step().applied
        assert other.step().applied
    for model, engine in zip(plain, engines, strict=True):
        same_parameters(model, engine.module)
    engines[0].close()
    loss = engines[1](mlp_batch(9, 0, rank)).square().mean()
    engines[1].backward(loss)
    assert engines[1].step().applied, "the other engine goes on"
    engines[1].close()


@everywhere
def test_two_models_one_loss(transport: str, world: int) -> None:
    run(world, _joint, transport)


def _two_parts(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    parameters = list(model.parameters())
    return parameters[::2], parameters[1::2]


def _two_engines_one_model(transport: str) -> None:
    """Each engine steps its own parameters of one model, after a backward that both have in common."""
    plain, model = plain_copy(build_lm, 1), plain_copy(build_lm, 1)
    references = [torch.optim.AdamW(part, lr=1e-2) for part in _two_parts(plain)]
    optimizers = [torch.optim.AdamW(part, lr=1e-2) for part in _two_parts(model)]
    engines = [zp.Engine(model, optimizer, {"transport": transport}) for optimizer in optimizers]
    for step in range(STEPS):
        averaged_backward(
            plain.parameters(), lambda rank, step=step: plain(lm_batch(step, 0, rank)).float().square().mean()
        )
        engines[0].backward(model(lm_batch(step, 0, dist.get_rank())).float().square().mean())
        for reference, engine in zip(references, engines, strict=True):
            reference.step()
            reference.zero_grad()
            assert engine.step().applied
    same_parameters(plain, model)
    for engine in engines:
        engine.close()


@everywhere
def test_two_engines_on_one_model(transport: str, world: int) -> None:
    run(world, _two_engines_one_model, transport)


BAD = 1  # the step at which one parameter's gradient is not finite on one rank


def _each_skips_its_own(second_skips: bool) -> None:
    """A gradient that is not finite concerns the engine that steps its parameter, whichever was made last."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    plain, model = plain_copy(build_mlp, 1), plain_copy(build_mlp, 1)
    references = [torch.optim.AdamW(part, lr=1e-2) for part in _two_parts(plain)]
    settings = [{"skip_nonfinite": True}, {"skip_nonfinite": second_skips}]
    engines = [
        zp.Engine(model, torch.optim.AdamW(part, lr=1e-2), config)
        for part, config in zip(_two_parts(model), settings, strict=True)
    ]
    bad = next(name for name, parameter in model.named_parameters() if parameter is _two_parts(model)[0][0])
    for step in range(3):
        averaged_backward(plain.parameters(), lambda rank, step=step: plain(mlp_batch(step, 0, rank)).square().mean())
        hooks = []
        if step == BAD and rank == last:
            hooks.append(model.get_parameter(bad).register_hook(lambda gradient: gradient * float("inf")))
        model(mlp_batch(step, 0, rank)).square().mean().backward()
        for hook in hooks:
            hook.remove()
        results = [engine.step() for engine in reversed(engines)]
        assert results[0].applied, "its own gradients are finite"
        assert results[1].applied is (step != BAD)
        if step == BAD:
            assert results[1].reason == f"the gradient of {bad!r} is not finite on rank {last}"
            references[0].zero_grad()
        for reference in references:
            reference.step()
            reference.zero_grad()
    same_parameters(plain, model)
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("second_skips", [True, False])
def test_each_engine_skips_for_its_own_parameters(second_skips: bool) -> None:
    run(2, _each_skips_its_own, second_skips)


def _forgotten(how: str) -> None:
    """Gradients that were dropped are not held against those that came after."""
    model = plain_copy(build_mlp)
    engine = zp.Engine(model, torch.optim.AdamW(model.parameters()), {"skip_nonfinite": True})
    loss = engine(mlp_batch(0, 0, dist.get_rank())).square().mean()
    if how == "loss":
        engine.backward(loss * float("nan"))
    else:
        loss.register_hook(lambda gradient: gradient * float("inf"))
        engine.backward(loss)
    engine.zero_grad()
    engine.backward(engine(mlp_batch(1, 0, dist.get_rank())).square().mean())
    assert engine.step().applied
    engine.close()


@pytest.mark.parametrize("how", ["loss", "gradient"])
def test_zero_grad_forgets_what_was_not_finite(how: str) -> None:
    run(2, _forgotten, how)


def _scaled(dynamic: bool) -> str:
    """One loss for two engines in fp16: right with one fixed scale, an error with scales that differ."""
    plain, model = plain_copy(build_mlp), plain_copy(build_mlp)
    before = [parameter.detach().clone() for parameter in plain.parameters()]
    plain.half()
    fixed: dict[str, object] = {"dynamic": False, "initial": 64.0}
    scales = [{"initial": 64.0}, {"initial": 4.0}] if dynamic else [fixed, fixed]
    engines = [
        zp.Engine(model, torch.optim.SGD(part, lr=1.0), {"precision": "fp16", "loss_scale": scale})
        for part, scale in zip(_two_parts(model), scales, strict=True)
    ]
    batch = mlp_batch(0, 0, 0).half()
    (plain(batch).float().square().mean() * 64.0).backward()
    try:
        engines[0].backward(model(batch).float().square().mean())
        assert all(engine.step().applied for engine in engines)
    except GradientError as error:
        return str(error)
    for value, parameter, got in zip(before, plain.parameters(), model.parameters(), strict=True):
        assert parameter.grad is not None
        wanted = value - parameter.grad.float() / 64.0
        assert torch.allclose(zp.full(got).float(), wanted, atol=2e-3), "to the rounding of fp16"
        assert not torch.allclose(value, wanted, atol=1e-2), "or nothing is shown"
    return ""


def test_one_loss_for_two_engines_in_fp16() -> None:
    assert run(1, _scaled, False) == [""]
    (told,) = run(1, _scaled, True)
    assert "scaled by 64" in told and "scaled by 4" in told


def _unscaled() -> str:
    model = plain_copy(build_mlp)
    engine = zp.Engine(model, torch.optim.SGD(model.parameters(), lr=1.0), {"precision": "fp16"})
    try:
        model(mlp_batch(0, 0, 0).half()).float().square().mean().backward()
    except GradientError as error:
        engine.zero_grad()
        engine.backward(model(mlp_batch(0, 0, 0).half()).float().square().mean() * 1e-3)
        assert engine.step().applied, "an engine goes on after the error"
        return str(error)
    return ""


def test_a_loss_that_was_not_scaled_is_an_error_in_fp16() -> None:
    (told,) = run(1, _unscaled)
    assert "scaled by 1," in told and "scaled by 65536" in told
