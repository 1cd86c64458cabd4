"""The second report as its user wrote it: GLPN with CLIP's pooling, the Trainer, fp16, all offloaded, and on again.

In DeepSpeed a backward ends with "tracing error" when a checkpoint was saved or loaded before the first forward
and, later, a step is skipped. Here the program saves before its first step, goes on from a checkpoint in a new
process, skips one step for a loss that is not finite, and ends where the uninterrupted run ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from tests.integrations.launching import Run, ds_config, launch

OFFLOADED = {
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "fp16": {
        "enabled": "auto", "loss_scale": 0, "loss_scale_window": 2, "initial_scale_power": 8, "hysteresis": 1,
        "min_loss_scale": 1,
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "bfloat16": {"enabled": False},
    "data_efficency": {"enabled": False},
}  # fmt: skip
BAD = 4  # the step, counted from 0, whose loss is not finite

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """The uninterrupted run."""
    folder = tmp_path_factory.mktemp("depth")
    return folder, launch("depth.py", folder, ds_config(folder / "ds.json", **OFFLOADED), "whole", 3)


def _check(told: dict[str, Any], steps: int) -> None:
    assert told["dtypes"] == ["torch.float16"]
    assert told["buffer"] == ["torch.float64", 0.123456789], "buffers keep their dtype and values"
    assert told["skipped"] == 1 and len(told["scales"]) == steps
    assert told["trained"], "every parameter, those of the pooling too"
    assert told["back"], "what was saved before the first step is what was there then"


def test_misspelt_keys_are_told(whole: tuple[Path, Run]) -> None:
    output = whole[1].output
    assert "'data_efficency' (did you mean 'data_efficiency'?)" in output
    assert "'bfloat16' is an old name (did you mean 'bf16'?)" in output


def test_on_to_the_end_from_a_checkpoint(whole: tuple[Path, Run]) -> None:
    folder, first = whole
    for told in first.told:
        _check(told, steps=6)
    resumed = launch("depth.py", folder, folder / "ds.json", "resumed", 3, folder / "whole/checkpoint-3")
    for before, told in zip(first.told, resumed.told, strict=True):
        _check(told, steps=3)
        assert told["losses"] == before["losses"] and told["rates"] == before["rates"]
        assert told["scales"] == before["scales"][3:]
    expected = load_file(folder / "whole/end/model.safetensors")
    got = load_file(folder / "resumed/end/model.safetensors")
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3])
def test_on_another_number_of_ranks(world: int, whole: tuple[Path, Run]) -> None:
    folder, first = whole
    start = folder / "whole/checkpoint-3"
    run = launch("depth.py", folder, folder / "ds.json", f"on {world}", 6 // world, start, ranks=world)
    for told in run.told:
        _check(told, steps=3)
        assert told["rates"] == first.told[0]["rates"]
        for step in (3, 5):
            assert told["losses"][step] == pytest.approx(first.told[0]["losses"][step], rel=2e-2)
    expected = load_file(folder / "whole/end/model.safetensors")
    got = load_file(folder / f"on {world}/end/model.safetensors")
    for name, value in expected.items():
        assert torch.allclose(value, got[name], atol=2e-2), name
