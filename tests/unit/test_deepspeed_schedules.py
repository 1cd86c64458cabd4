"""Learning-rate schedules give the numbers that DeepSpeed's own classes gave, step by step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fixtures.make_deepspeed_face import groups
from zeropage.deepspeed import lr_schedules
from zeropage.deepspeed.lr_schedules import VALID_LR_SCHEDULES, OneCycle, WarmupLR, make_scheduler
from zeropage.deepspeed.settings import read_settings
from zeropage.errors import ConfigError

CASES = json.loads((Path(__file__).parents[1] / "fixtures/deepspeed_face/schedules.json").read_text())["cases"]


def _settings(name: str, params: dict[str, Any]) -> Any:
    return read_settings({"train_batch_size": 1, "scheduler": {"type": name, "params": params}}, 1)


def _rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def test_all_of_deepspeeds_schedules_are_recorded() -> None:
    assert {case["type"] for case in CASES} == set(VALID_LR_SCHEDULES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['type']}-{len(case['params'])}")
def test_rates_and_momenta_are_deepspeeds(case: dict[str, Any]) -> None:
    optimizer = groups()
    schedule = make_scheduler(_settings(case["type"], case["params"]), optimizer)
    for step, recorded in enumerate(case["steps"]):
        assert _rates(optimizer) == pytest.approx(recorded["lr"], rel=1e-12, abs=1e-15), step
        for group, betas in zip(optimizer.param_groups, recorded["betas"], strict=True):
            assert tuple(group["betas"]) == pytest.approx(tuple(betas), rel=1e-12), step
        if step:
            assert schedule.get_last_lr() == _rates(optimizer)
        schedule.step()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['type']}-{len(case['params'])}")
def test_a_schedule_goes_on_from_its_state(case: dict[str, Any]) -> None:
    optimizer = groups()
    kind = vars(lr_schedules)[case["type"]]
    first = kind(optimizer, **case["params"])
    for _ in range(7):
        first.step()
    second = kind(groups(), **case["params"])
    second.load_state_dict(first.state_dict())
    second.step()
    assert second.get_last_lr() == pytest.approx(case["steps"][8]["lr"], rel=1e-12)


def test_a_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    schedule = WarmupLR(optimizer, warmup_max_lr=1.0, warmup_num_steps=4, warmup_type="linear")
    for _ in range(3):
        schedule.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.5


def test_one_cycle_leaves_an_optimizer_without_betas_alone(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    OneCycle(optimizer, 0.1, 0.2).step()
    assert optimizer.param_groups[0]["momentum"] == 0.9 and "betas" not in optimizer.param_groups[0]
    assert "no betas" in caplog.text


def test_torchs_schedulers_can_be_named() -> None:
    optimizer = groups()
    schedule = make_scheduler(_settings("StepLR", {"step_size": 1, "gamma": 0.5}), optimizer)
    assert isinstance(schedule, torch.optim.lr_scheduler.StepLR)


@pytest.mark.parametrize(
    ("name", "params", "told"),
    [
        ("WarmUp", {}, "'WarmUp': there is LRRangeTest"),
        ("WarmupDecayLR", {}, "total_num_steps"),
        ("WarmupDecayLR", {"total_num_steps": "auto"}, "total_num_steps' is 'auto'"),
        ("WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps must be a whole number above 0"),
        ("WarmupLR", {"warmup_type": "cosine"}, "'log' or 'linear'"),
        ("WarmupLR", {"warmup_max_lr": [1.0]}, "has 1 values, and the optimizer has 2"),
        ("LRRangeTest", {"lr_range_test_step_size": 1.5}, "lr_range_test_step_size"),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 0}, "cycle_first_step_size"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(name: str, params: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make_scheduler(_settings(name, params), groups())
