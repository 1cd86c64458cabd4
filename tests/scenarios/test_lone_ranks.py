"""K16, K62, dead ranks: what one rank does alone either needs nobody, or is an error on all ranks, soon."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import zeropage as zp
from tests.harness import Failure, RankDied, run
from tests.harness.models import build_mlp, mlp_batch

TRANSPORTS = ["shared", "collective"]
TIMEOUT_S = 4.0


def _engine(transport: str) -> zp.Engine:
    torch.manual_seed(0)
    model = build_mlp()
    return zp.Engine(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), {"transport": transport, "timeout_s": TIMEOUT_S}
    )


def _train(engine: zp.Engine, steps: int) -> None:
    rank = torch.distributed.get_rank()
    for step in range(steps):
        engine.backward(engine(mlp_batch(step, 0, rank)).square().mean())
        engine.step()


# -- reads need nobody


def _rank_zero_looks(transport: str) -> tuple[float, ...]:
    engine = _engine(transport)
    rank = torch.distributed.get_rank()
    engine.backward(engine(mlp_batch(0, 0, rank)).square().mean())
    parameter = next(iter(engine.module.parameters()))
    seen: tuple[float, ...] = ()
    if rank == 0:
        assert "shape" in repr(parameter)
        seen = (parameter.norm().item(), parameter.grad.norm().item(), zp.full(parameter).sum().item())
    engine.step()
    if rank == 0:
        moment = engine.optimizer.state[parameter]["exp_avg"]
        assert zp.full(moment).norm().item() > 0 and "shape" in repr(moment)
    torch.distributed.barrier()
    _train(engine, 1)
    engine.close()
    return seen


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rank_zero_prints_norms(transport: str, world: int) -> None:
    seen, *others = run(world, _rank_zero_looks, transport)
    assert all(other == () for other in others)
    torch.manual_seed(0)
    plain = build_mlp()
    for rank in range(world):
        (plain(mlp_batch(0, 0, rank)).square().mean() / world).backward()
    parameter = next(iter(plain.parameters()))
    expected = (parameter.norm().item(), parameter.grad.norm().item(), parameter.sum().item())
    assert seen == pytest.approx(expected, rel=1e-5)


# -- everything else must be done by all


def _saves(engine: zp.Engine) -> None:
    engine.save(Path("lone"))


def _steps(engine: zp.Engine) -> None:
    engine.step()


def _writes(engine: zp.Engine) -> None:
    with torch.no_grad():
        next(iter(engine.module.parameters())).zero_()


def _gathers_to_edit(engine: zp.Engine) -> None:
    with zp.gather(engine.module, writer=0):
        pass


def _closes(engine: zp.Engine) -> None:
    engine.close()


def _drops_gradients(engine: zp.Engine) -> None:
    engine.zero_grad()


ALONE: dict[str, tuple[Callable[[zp.Engine], None], str]] = {
    "save": (_saves, "save"),
    "step": (_steps, "at step 2"),
    "write": (_writes, "zero_"),
    "gather": (_gathers_to_edit, "gather"),
    "close": (_closes, "close"),
    "zero_grad": (_drops_gradients, "zero_grad"),
}


def _rank_zero_alone(transport: str, what: str, folder: str) -> None:
    os.chdir(folder)
    engine = _engine(transport)
    _train(engine, 1)
    if torch.distributed.get_rank() == 0:
        ALONE[what][0](engine)
    _train(engine, 2)


@pytest.mark.parametrize("what", ALONE)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_alone_is_an_error_on_all_ranks(transport: str, what: str, tmp_path: Path) -> None:
    began = time.monotonic()
    results = run(2, _rank_zero_alone, transport, what, str(tmp_path), expect_errors=True, timeout=30)
    assert time.monotonic() - began < 20
    for result in results:
        assert isinstance(result, Failure), result
        assert result.type == "DivergenceError", result.traceback
        assert ALONE[what][1] in result.message
        assert "rank 0" in result.message
    assert list(tmp_path.iterdir()) == []


def _uneven(transport: str, *, train: bool) -> int:
    """Rank 0 has one batch more."""
    engine = _engine(transport)
    rank = torch.distributed.get_rank()
    count = 3 if rank == 0 else 2
    if train:
        _train(engine, count)
    else:
        with torch.no_grad():
            for step in range(count):
                engine(mlp_batch(step, 0, rank))
    engine.close()
    return count


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_uneven_training_names_the_steps(transport: str, world: int) -> None:
    for result in run(world, _uneven, transport, train=True, expect_errors=True, timeout=30):
        assert isinstance(result, Failure) and result.type == "DivergenceError", result
        assert "rank 0: step 3" in result.message
        assert "rank 1: close the engine after step 2" in result.message


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_uneven_evaluation_is_fine(transport: str) -> None:
    assert run(3, _uneven, transport, train=False) == [3, 2, 2]


# -- ranks that are gone


def _killed(transport: str, when: str) -> None:
    engine = _engine(transport)
    _train(engine, 1)
    rank = torch.distributed.get_rank()
    loss = engine(mlp_batch(1, 0, rank)).square().mean()
    if rank == 1:
        if when == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if when == "raises":
            raise ValueError("bad batch")
        time.sleep(2.5 * TIMEOUT_S)
    engine.backward(loss)
    engine.step()
    _train(engine, 2)


@pytest.mark.parametrize(
    "when", ["killed", pytest.param("raises", marks=pytest.mark.slow), pytest.param("hangs", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_lost_rank_is_named(transport: str, world: int, when: str) -> None:
    before = set(os.listdir("/dev/shm"))
    began = time.monotonic()
    results = run(world, _killed, transport, when, expect_errors=True, timeout=40)
    if when != "hangs":
        assert time.monotonic() - began < 10 + TIMEOUT_S
    lost = results.pop(1)
    assert isinstance(lost, RankDied if when == "killed" else Failure)
    for result in results:
        assert isinstance(result, Failure), result
        assert result.is_a("PeerLostError"), result.traceback
        assert "rank 1" in result.message
    left = {name for name in set(os.listdir("/dev/shm")) - before if "zeropage" in name}
    assert not left


LOST_FIRST = {"shared": 2, "collective": 1}


def _one_after_the_other(transport: str) -> None:
    """Rank 0 loses a rank; the third one comes later, and asks rank 0 before the other."""
    engine = _engine(transport)
    rank = torch.distributed.get_rank()
    if rank == LOST_FIRST[transport]:
        raise ValueError("bad batch")
    if transport == "shared":  # here the others see who waits at a meeting; so rank 0 waits in its second backward
        for step in range(2 - rank):
            engine.backward(engine(mlp_batch(step, 0, rank)).square().mean())
    if rank != 0:
        time.sleep(1)
    _writes(engine)


@pytest.mark.parametrize("transport", [pytest.param("shared", marks=pytest.mark.slow), "collective"])
def test_the_rank_lost_first_is_named(transport: str) -> None:
    results = run(3, _one_after_the_other, transport, expect_errors=True, timeout=40)
    first = LOST_FIRST[transport]
    results.pop(first)
    for result in results:
        assert isinstance(result, Failure) and result.is_a("PeerLostError"), result
        assert f"rank {first}" in result.message
    assert f"having lost rank {first}" in results[1].message
