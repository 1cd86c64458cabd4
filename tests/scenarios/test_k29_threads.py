"""K29: ranks with more threads than the host has cores are told, before steps take several times as long."""

from __future__ import annotations

import logging
import os
from unittest import mock

import torch

import zeropage as zp
from tests.harness import run
from tests.harness.models import build_mlp


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
