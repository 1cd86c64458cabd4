"""K54: an engine gives its room away between steps, hands its weights over, and trains on as if nothing had been."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import zeropage as zp
from tests.harness import run
from tests.harness.models import build_mlp, mlp_batch
from tests.integrations.deepspeed_cases import Beside, engine_of, loss_of, rank
from tests.scenarios.beside import plain_copy, same, same_parameters
from zeropage.deepspeed.engine import DeepSpeedEngine
from zeropage.deepspeed.offload_states import OffloadDeviceEnum, OffloadStateTypeEnum
from zeropage.deepspeed.zero import GatheredParameters
from zeropage.errors import ConfigError

ASLEEP: list[dict[str, Any]] = [
    {},
    {"include": [OffloadStateTypeEnum.lp_params], "device": OffloadDeviceEnum.cpu, "non_blocking": True},
    {"include": ["optim_states", "hp_params"], "pin_memory": False},
]


def _resident(engine: DeepSpeedEngine) -> int:
    return sum(pager.resident_bytes for pager in engine.zeropage_engine.pagers)


def _asleep() -> None:
    beside = Beside()
    zp.shard(beside.model, {"transport": "collective", "resident_bytes": sys.maxsize})
    engine = engine_of(beside.model, beside.make)
    for step, how in enumerate(ASLEEP):
        beside.step([(step, 0)])
        engine.backward(loss_of(engine, step, 0, rank()))
        engine.step()
        same(beside.plain(mlp_batch(9, 0, rank())), engine(mlp_batch(9, 0, rank())), exact=False)
        assert _resident(engine) > 0, "or nothing is shown"
        engine.offload_states(**how)
        assert _resident(engine) == 0
        _hand_over(beside.plain, engine)
        engine.reload_states()
    same_parameters(beside.plain, beside.model)
    engine.destroy()


def _hand_over(plain: nn.Module, engine: DeepSpeedEngine) -> None:
    """As programs that generate elsewhere do: one full weight at a time."""
    wanted = dict(plain.named_parameters())
    for name, parameter in engine.module.named_parameters():
        with GatheredParameters([parameter]):
            same(wanted[name], parameter.detach(), name, exact=False)
        engine.offload_states()
        assert _resident(engine) == 0


def test_training_goes_on_after_an_offload() -> None:
    run(2, _asleep)


def _for_inference() -> None:
    model = plain_copy(build_mlp)
    zp.shard(model, {"transport": "collective", "resident_bytes": sys.maxsize})
    engine = engine_of(model)
    with torch.no_grad():
        before = engine(mlp_batch(0, 0, rank()))
        engine.offload_states()
        assert _resident(engine) == 0
        engine.reload_states()
        assert torch.equal(engine(mlp_batch(0, 0, rank())), before) and _resident(engine) > 0
    engine.destroy()


def test_an_engine_for_inference() -> None:
    run(2, _for_inference)


def _refused(options: dict[str, Any]) -> str:
    engine = engine_of(plain_copy(build_mlp))
    try:
        engine.offload_states(**options)
    except ConfigError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"include": ["hp_param"]}, "hp_params"),
        ({"device": OffloadDeviceEnum.nvme}, "'cpu' only"),
        ({"device": "disk"}, "'disk'"),
        ({"device": "none"}, ""),
    ],
)
def test_what_cannot_be_had(options: dict[str, Any], said: str) -> None:
    assert all(said in told and bool(told) == bool(said) for told in run(1, _refused, options))
