"""K29: ranks with more threads than the host has cores are told, and a step uses no more than fit all the same."""

from __future__ import annotations

import logging
import os
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

import zeropage as zp
from tests.harness import run
from tests.harness.models import build_mlp, mlp_batch


def _warnings(threads: int, cores: int) -> list[str]:
    found: list[str] = []
    torch.set_num_threads(threads)
    with (
        mock.patch.object(
            logging.getLogger("zeropage.construct"), "warning", lambda text, *of: found.append(text % of)
        ),
        mock.patch.object(os, "cpu_count", lambda: cores),
    ):
        zp.shard(build_mlp(), {"transport": "shared"})
    return found


def test_more_threads_than_cores() -> None:
    told, *others = run(3, _warnings, 4, 8)
    assert told == [
        "3 ranks with 4 threads each share 8 cores and will wait for each other: start them with OMP_NUM_THREADS=2, or "
        "call torch.set_num_threads(2) in each"
    ]
    assert others == [[], []]


def test_threads_that_fit_and_ranks_that_have_one_only() -> None:
    assert run(3, _warnings, 4, 12) == [[], [], []]
    assert run(3, _warnings, 1, 2) == [[], [], []]


def _threads_of_a_step(cores: int, *, fails: bool) -> tuple[set[int], int]:
    """With four threads a rank: those that the optimizer had, and those that the program has afterwards."""
    torch.manual_seed(0)
    torch.set_num_threads(4)
    seen: set[int] = set()

    def look(*_: object) -> None:
        seen.add(torch.get_num_threads())
        if fails:
            raise ValueError("a hook of the user's")

    with mock.patch.object(os, "cpu_count", lambda: cores):
        model = build_mlp()
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.register_step_pre_hook(look)
        engine = zp.Engine(model, optimizer, {"transport": "shared"})
        engine.backward(engine(mlp_batch(0, 0, torch.distributed.get_rank())).square().mean())
        with pytest.raises(ValueError, match="a hook") if fails else nullcontext():
            engine.step()
    after = torch.get_num_threads()
    torch.distributed.barrier()
    return seen, after


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_has_threads_that_fit_and_gives_the_others_back(fails: bool) -> None:
    assert run(3, _threads_of_a_step, 8, fails=fails) == [({2}, 4)] * 3


def test_a_step_has_all_threads_where_they_fit_and_never_none() -> None:
    assert run(2, _threads_of_a_step, 8, fails=False) == [({4}, 4)] * 2
    assert run(3, _threads_of_a_step, 2, fails=False) == [({1}, 4)] * 3


def _threads_of_a_norm() -> tuple[set[int], int]:
    torch.set_num_threads(4)
    seen: set[int] = set()
    judge = zp.Engine._judge

    def look(engine: zp.Engine, *of: Any) -> Any:
        seen.add(torch.get_num_threads())
        return judge(engine, *of)

    with mock.patch.object(os, "cpu_count", lambda: 8), mock.patch.object(zp.Engine, "_judge", look):
        model = build_mlp()
        engine = zp.Engine(model, torch.optim.AdamW(model.parameters()), {"transport": "shared"})
        engine.backward(engine(mlp_batch(0, 0, torch.distributed.get_rank())).square().mean())
        engine.clip_grad_norm_(1.0)
    return seen, torch.get_num_threads()


def test_a_norm_that_is_asked_for_has_threads_that_fit() -> None:
    assert run(3, _threads_of_a_norm) == [({2}, 4)] * 3
