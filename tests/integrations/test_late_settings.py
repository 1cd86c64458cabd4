"""A configuration that comes after the model was sharded: what it cannot change any more is said, by its key."""

from __future__ import annotations

import logging
import logging.handlers
import queue
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run
from tests.harness.models import build_mlp, mlp_batch
from tests.integrations.deepspeed_cases import config, engine_of
from tests.scenarios.beside import plain_copy
from zeropage.config import Config
from zeropage.deepspeed.own_settings import without_effect
from zeropage.deepspeed.settings import read_settings
from zeropage.deepspeed.zero import Init
from zeropage.errors import ConfigError

LIVE = {"stage": 3, "stage3_max_live_parameters": 100}
KEPT = "zero_optimization.stage' = {} has no effect on memory"


def _told(first: dict[str, Any], second: dict[str, Any]) -> str:
    """What is logged, or raised, when a model that was sharded with `first` gets an engine with `second`."""
    model = plain_copy(build_mlp)
    Init(model, config_dict_or_path=config(**first))
    records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    logger, handler = logging.getLogger("zeropage.deepspeed"), logging.handlers.QueueHandler(records)
    logger.addHandler(handler)
    try:
        engine = engine_of(model, lambda p: torch.optim.SGD(p, lr=0.1), **second)
        engine.backward(engine(mlp_batch(0, 0, 0)).square().mean())
        engine.step()
        assert engine.was_step_applied()
        engine.destroy()
    except ConfigError as error:
        return f"error: {error}"
    finally:
        logger.removeHandler(handler)
    return " | ".join(records.get().getMessage() for _ in range(records.qsize()))


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({}, {}, ""),
        ({"zero_optimization": LIVE}, {"zero_optimization": LIVE}, ""),
        ({"zero_optimization": {"stage": 2}}, {"zero_optimization": {"stage": 1}}, ""),
        ({}, {"zero_optimization": {"stage": 2}}, KEPT.format(2)),
        ({"zero_optimization": {"stage": 1}}, {}, KEPT.format(3)),
        ({}, {"zero_optimization": LIVE}, "'zero_optimization.stage3_max_live_parameters' has no effect"),
        ({}, {"data_types": {"grad_accum_dtype": "bf16"}}, "error: config key 'data_types.grad_accum_dtype' says bf16"),
        ({}, {"communication_data_type": "bf16"}, "error: config key 'communication_data_type' says bf16"),
        ({"communication_data_type": "bf16"}, {"communication_data_type": "bf16"}, ""),
    ],
)
def test_what_comes_too_late(first: dict[str, Any], second: dict[str, Any], said: str) -> None:
    (told,) = run(1, _told, first, second)
    assert said in told and bool(told) == bool(said)


def test_host_memory_is_where_everything_is_on_cpus() -> None:
    """Offload asks for what is so already."""
    offload = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    assert run(1, _told, {}, {"zero_optimization": offload}) == [""]


@pytest.mark.parametrize("key", ["offload_param", "offload_optimizer"])
def test_the_disk_that_comes_too_late(key: str, tmp_path: Path) -> None:
    offload = {"stage": 3, key: {"device": "nvme", "nvme_path": str(tmp_path)}}
    (told,) = run(1, _told, {}, {"zero_optimization": offload})
    assert f"'zero_optimization.{key}' has no effect" in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["offload_param", "offload_optimizer"])
def test_offload_that_comes_too_late_for_a_device(key: str) -> None:
    settings = read_settings(config(zero_optimization={"stage": 3, key: {"device": "cpu"}}), world=1)
    (told,) = without_effect(settings, Config(), on_device=True)
    assert f"'zero_optimization.{key}' has no effect" in told
    assert not list(without_effect(settings, settings.config, on_device=True))
