"""A DeepSpeed configuration: every key takes effect, is accepted because it has no meaning here, or is refused."""

from __future__ import annotations

import base64
import copy
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from zeropage.deepspeed.keys import KEYS, Treatment
from zeropage.deepspeed.settings import Settings, read_settings
from zeropage.errors import ConfigError

FIXTURES = Path(__file__).parents[1] / "fixtures/deepspeed_face"
ROOT = Path(__file__).parents[2]
MICRO, STEPS = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
BASE = {"train_micro_batch_size_per_gpu": 2}

# For every honoured key a value that shows, and what it needs around it.
ON = {"enabled": True}
NVME = {"device": "nvme", "nvme_path": "/a"}
SHOWS: dict[str, tuple[Any, dict[str, Any]]] = {
    "train_batch_size": (8, {}),
    "train_micro_batch_size_per_gpu": (4, {}),
    "gradient_accumulation_steps": (3, {}),
    "dataloader_drop_last": (True, {}),
    "steps_per_print": (10, {}),
    "wall_clock_breakdown": (True, {}),
    "log_level": ("warning", {}),
    "timers.throughput.enabled": (False, {}),
    "tensorboard.enabled": (True, {}),
    "tensorboard.output_path": ("there", {"tensorboard": ON}),
    "tensorboard.job_name": ("job", {"tensorboard": ON}),
    "csv_monitor.enabled": (True, {}),
    "csv_monitor.output_path": ("there", {"csv_monitor": ON}),
    "csv_monitor.job_name": ("job", {"csv_monitor": ON}),
    "wandb.enabled": (True, {}),
    "wandb.group": ("group", {"wandb": ON}),
    "wandb.team": ("team", {"wandb": ON}),
    "wandb.project": ("project", {"wandb": ON}),
    "flops_profiler.enabled": (True, {}),
    "flops_profiler.profile_step": (3, {"flops_profiler": ON}),
    "flops_profiler.module_depth": (1, {"flops_profiler": ON}),
    "flops_profiler.top_modules": (4, {"flops_profiler": ON}),
    "flops_profiler.detailed": (False, {"flops_profiler": ON}),
    "flops_profiler.output_file": ("flops.txt", {"flops_profiler": ON}),
    "fp16.enabled": (True, {}),
    "fp16.auto_cast": (True, {"fp16": ON}),
    "fp16.loss_scale": (128, {"fp16": ON}),
    "fp16.initial_scale_power": (4, {"fp16": ON}),
    "fp16.loss_scale_window": (10, {"fp16": ON}),
    "fp16.hysteresis": (3, {"fp16": ON}),
    "fp16.min_loss_scale": (2, {"fp16": ON}),
    "bf16.enabled": (True, {}),
    "bf16.check_grad_overflow": (False, {"bf16": ON}),
    "torch_autocast.enabled": (True, {}),
    "torch_autocast.dtype": ("float32", {"torch_autocast": ON}),
    "data_types.grad_accum_dtype": ("bf16", {}),
    "communication_data_type": ("fp16", {}),
    "gradient_clipping": (0.5, {}),
    "managed_gradient_accumulation": (False, {}),
    "optimizer.type": ("AdamW", {}),
    "optimizer.params": ({"lr": 0.1}, {"optimizer": {"type": "AdamW"}}),
    "scheduler.type": ("WarmupLR", {}),
    "scheduler.params": ({"warmup_num_steps": 3}, {"scheduler": {"type": "WarmupLR"}}),
    "zero_optimization.stage": (3, {}),
    "zero_optimization.offload_param.device": ("cpu", {}),
    "zero_optimization.offload_optimizer.device": ("cpu", {}),
    "zero_optimization.offload_param.nvme_path": ("/b", {"zero_optimization": {"offload_param": NVME}}),
    "zero_optimization.offload_optimizer.nvme_path": ("/b", {"zero_optimization": {"offload_optimizer": NVME}}),
    "zero_optimization.cpu_offload": (True, {}),
    "zero_optimization.cpu_offload_param": (True, {}),
    "zero_optimization.stage3_max_live_parameters": (1000, {"zero_optimization": {"stage": 3}}),
    "zero_optimization.max_live_parameters": (1000, {"zero_optimization": {"stage": 3}}),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (True, {}),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (True, {}),
    "zero_optimization.gather_16bit_weights_on_model_save": (True, {}),
    "activation_checkpointing.cpu_checkpointing": (True, {}),
}
CHECKED_ONLY = {"data_types.param_dtype"}  # it must agree with others

# For every refused key a value that asks for something.
ASKS: dict[str, Any] = {
    "gradient_allreduce_op": "sum",
    "data_types.buffer_dtype": "fp32",
    "zero_optimization.load_from_fp32_weights": False,
    "zero_optimization.zenflow": {"topk_ratio": 0.1},
    "zero_optimization.mics_shard_size": 4,
    "tensor_parallel.autotp_size": 2,
    "inference.tensor_parallel.tp_size": 2,
    "sequence_parallel_size": 2,
    "compression_training": {"weight_quantization": {}},
    "sparse_attention": {"mode": "fixed"},
    "zero_optimization.zeropp_loco_param": {"err_beta": 0.8, "enabled": True},
}


def with_key(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of `config` with `value` at the dotted `path`."""
    copied = copy.deepcopy(config)
    *sections, name = path.split(".")
    block = copied
    for section in sections:
        block = block.setdefault(section, {})
    block[name] = value
    return copied


def _seen(config: dict[str, Any]) -> Settings:
    """What a configuration comes to, less what is only shown again under the name that it was given."""
    return dataclasses.replace(read_settings(config, 2), raw={}, prescale_gradients=False)


def _keys(treatment: Treatment) -> list[str]:
    return [path for path, key in KEYS.items() if key.treatment is treatment]


def test_every_key_that_deepspeed_knows_is_in_the_table() -> None:
    known = json.loads((FIXTURES / "keys.json").read_text())["keys"]
    missing = [
        key
        for key in known
        if not any(key == path or key.startswith(f"{path}.") or path.startswith(f"{key}.") for path in KEYS)
    ]
    assert missing == []


def test_every_honoured_key_has_a_value_that_shows() -> None:
    assert set(SHOWS) | CHECKED_ONLY == set(_keys(Treatment.HONOURED))


@pytest.mark.parametrize("path", SHOWS)
def test_an_honoured_key_takes_effect(path: str) -> None:
    value, around = SHOWS[path]
    without = {**BASE, **around}
    assert _seen(with_key(without, path, value)) != _seen(without)


@pytest.mark.parametrize("path", _keys(Treatment.REFUSED))
def test_a_refused_key_is_an_error_that_names_it_and_what_to_write(path: str) -> None:
    value = ASKS.get(path, {"enabled": True} if "." not in path else True)
    with pytest.raises(ConfigError) as caught:
        read_settings(with_key(BASE, path, value), 2)
    assert f"config key {path!r}" in str(caught.value)
    assert KEYS[path].note in str(caught.value)


@pytest.mark.parametrize("path", _keys(Treatment.REFUSED))
def test_a_refused_key_that_is_off_is_accepted(path: str) -> None:
    for value in (*KEYS[path].off, {"enabled": False}, {}):  # (a block that is not enabled, or has nothing in it)
        read_settings(with_key(BASE, path, value), 2)


@pytest.mark.parametrize("path", _keys(Treatment.SILENT))
def test_a_key_without_meaning_is_accepted_in_silence(path: str) -> None:
    assert _seen(with_key(BASE, path, 3)) == _seen(BASE)  # warnings are errors here


def test_the_documentation_shows_the_table() -> None:
    page = (ROOT / "docs/deepspeed.md").read_text()
    for path, key in KEYS.items():
        assert f"| `{path}` | {key.treatment.value} | {key.note} |" in page
    rows = [line for line in page.splitlines() if any(f"| {t.value} |" in line for t in Treatment)]
    assert len(rows) == len(KEYS)


# -- where it comes from

TEXT = """{
  // a comment, with "quotes" and , commas ]
  "train_micro_batch_size_per_gpu": 2, # another
  /* one over
     lines */
  "csv_monitor": {"enabled": true, "output_path": "http://a/b # no comment", "job_name": "x,}",},
}"""


def test_dicts_paths_and_base64_are_read_with_comments(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(TEXT)
    wanted = json.loads('{"enabled": true, "output_path": "http://a/b # no comment", "job_name": "x,}"}')
    for config in (path, str(path), base64.urlsafe_b64encode(TEXT.encode()).decode()):
        settings = read_settings(config, 1)
        assert settings.raw == {**BASE, "csv_monitor": wanted}
    assert read_settings(settings.raw, 1).raw == settings.raw


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("no/such/file.json", "neither a path to an existing DeepSpeed config file nor base64"),
        (base64.urlsafe_b64encode(b'{"a": 1, "b": 2, "a": 3}').decode(), r"duplicate keys: \['a'\]"),
        (base64.urlsafe_b64encode(b"[1]").decode(), "expected a JSON object, got list"),
        (base64.urlsafe_b64encode(b"{1}").decode(), "not valid JSON"),
        (7, "got int"),
    ],
)
def test_what_cannot_be_read_is_told(config: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_settings(config, 1)


def test_duplicate_keys_of_a_file_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"fp16": {"enabled": true, "enabled": false}}')
    with pytest.raises(ConfigError, match=r"ds\.json: not valid JSON \(duplicate keys: \['enabled'\]\)"):
        read_settings(path, 1)


# -- unknown keys


def test_one_warning_names_all_unknown_keys_and_what_was_meant() -> None:
    config = {
        **BASE,
        "data_efficency": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket": 1},
        "quux": 1,
    }
    with pytest.warns(UserWarning) as caught:
        read_settings(config, 1)
    (warning,) = caught
    told = str(warning.message)
    assert "'data_efficency' (did you mean 'data_efficiency'?)" in told
    assert "'zero_optimization.stage3_prefetch_bucket' (did you mean 'stage3_prefetch_bucket_size'?)" in told
    assert "'quux'; it has no effect" in told


@pytest.mark.parametrize(("new", "precision"), [(None, "bf16"), ({"enabled": False}, "fp32")])
def test_the_old_name_of_bf16_counts_where_the_new_one_is_absent(new: Any, precision: str) -> None:
    with pytest.warns(UserWarning, match="did you mean 'bf16'"):
        settings = read_settings({**BASE, "bfloat16": {"enabled": True}, "bf16": new}, 1)
    assert settings.precision == precision


def test_flat_dotted_keys_are_accepted() -> None:
    """TRL writes them; DeepSpeed looks at none of them."""
    config = {**BASE, "zero_optimization.reduce_bucket_size": 12.5, "zero_optimization.stage": 3}
    assert _seen(config) == _seen(BASE)


def test_values_that_are_left_open_are_defaults_inside_blocks() -> None:
    config = {
        **BASE,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "offload_param": None},
        "fp16": {"enabled": "auto", "loss_scale_window": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    }
    assert read_settings(config, 1).precision == "fp32"


# -- batch sizes


@pytest.mark.parametrize(
    ("given", "world", "sizes"),
    [
        ({"train_batch_size": 24, MICRO: 4, STEPS: 3}, 2, (24, 4, 3)),
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4}, 2, (24, 4, 3)),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 3}, 2, (24, 4, 3)),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}, 2, (24, 4, 3)),
        ({"train_batch_size": 24}, 2, (24, 12, 1)),
        ({"train_micro_batch_size_per_gpu": 4}, 3, (12, 4, 1)),
    ],
)  # fmt: skip
def test_two_batch_sizes_give_the_third(given: dict[str, int], world: int, sizes: tuple[int, int, int]) -> None:
    found = read_settings(given, world)
    assert (found.train_batch_size, found.train_micro_batch_size_per_gpu, found.gradient_accumulation_steps) == sizes
    assert found.config.accumulate == sizes[2]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "needs 'train_batch_size' or 'train_micro_batch_size_per_gpu'"),
        ({"gradient_accumulation_steps": 2}, "needs 'train_batch_size' or"),
        ({"train_batch_size": 25, MICRO: 4, STEPS: 3}, r"25 != 4 \* 3 \* 2"),
        ({"train_batch_size": 25, "train_micro_batch_size_per_gpu": 4}, r"25 != 4 \* 3 \* 2"),
        ({"train_batch_size": 1}, r"1 != 0 \* 1 \* 2"),
        ({"train_batch_size": "auto"}, "'train_batch_size' is 'auto'"),
        ({"train_batch_size": 0}, "positive whole number, got 0"),
        ({"train_batch_size": 2.5}, "positive whole number, got 2.5"),
    ],
)  # fmt: skip
def test_batch_sizes_that_do_not_fit_are_shown(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_settings(given, 2)


# -- what the engine gets


def test_defaults_are_deepspeeds() -> None:
    settings = read_settings(BASE, 2)
    assert settings.stage == 0
    assert settings.gradient_clipping == 1.0 and settings.config.clip_grad_norm == 1.0
    assert settings.precision == "fp32" and settings.config.precision is None
    assert settings.steps_per_print == math.inf
    assert settings.optimizer is None and settings.scheduler is None and settings.autocast is None


def test_no_clipping_where_it_is_zero() -> None:
    settings = read_settings({**BASE, "gradient_clipping": 0}, 2)
    assert settings.gradient_clipping == 0.0 and settings.config.clip_grad_norm is None


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_below_stage_3_nothing_gathered_is_evicted(stage: int) -> None:
    budget = read_settings({**BASE, "zero_optimization": {"stage": stage}}, 2).config.resident_bytes
    assert budget == (sys.maxsize if stage < 3 else None)


def test_a_limit_above_the_default_budget_changes_nothing() -> None:
    zero = {"stage": 3, "stage3_max_live_parameters": 1e9}
    assert read_settings({**BASE, "zero_optimization": zero}, 2).config.resident_bytes is None


def test_a_small_limit_counts_elements_of_the_precision() -> None:
    zero = {"stage": 3, "stage3_max_live_parameters": 1000}
    assert read_settings({**BASE, "zero_optimization": zero}, 2).config.resident_bytes == 4000
    assert read_settings({**BASE, "zero_optimization": zero, "bf16": ON}, 2).config.resident_bytes == 2000


@pytest.mark.parametrize(
    ("stage", "block", "skips"),
    [
        (3, {}, True),
        (3, {"bf16": {"enabled": True, "check_grad_overflow": False}}, True),
        (2, {}, True),
        (0, {}, False),
        (0, {"fp16": ON}, True),
        (1, {"bf16": ON}, True),
        (1, {"bf16": {"enabled": True, "check_grad_overflow": False}}, False),
    ],
)
def test_steps_that_are_not_finite_are_skipped_where_deepspeed_does(
    stage: int, block: dict[str, Any], skips: bool
) -> None:
    settings = read_settings({**BASE, "zero_optimization": {"stage": stage}, **block}, 2)
    assert settings.skip_nonfinite is skips and settings.config.skip_nonfinite is skips


def test_the_loss_scale_is_translated() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 5, "loss_scale_window": 7, "hysteresis": 3, "min_loss_scale": 2}
    scale = read_settings({**BASE, "fp16": fp16}, 2).config.loss_scale
    assert (scale.dynamic, scale.initial, scale.window, scale.hysteresis, scale.min) == (True, 32.0, 7, 3, 2.0)
    scale = read_settings({**BASE, "fp16": {**fp16, "loss_scale": 256}}, 2).config.loss_scale
    assert (scale.dynamic, scale.initial) == (False, 256.0)


def test_autocast_is_bfloat16_by_default() -> None:
    assert read_settings({**BASE, "torch_autocast": ON}, 2).autocast is torch.bfloat16


def test_nvme_is_the_disk() -> None:
    offload = read_settings({**BASE, "zero_optimization": {"stage": 3, "offload_optimizer": NVME}}, 2).config.offload
    assert (offload.parameters, offload.optimizer, offload.folder) == ("none", "disk", Path("/a"))
    both = {"stage": 3, "offload_optimizer": NVME, "offload_param": {**NVME, "nvme_path": "/other"}}
    with pytest.raises(ConfigError, match=r"offload_optimizer.nvme_path' = '/a': .* the same one"):
        read_settings({**BASE, "zero_optimization": both}, 2)


@pytest.mark.parametrize("value", [math.inf, None, "absent"])
def test_no_progress_is_told_where_steps_per_print_is_infinite_or_absent(value: Any) -> None:
    config = BASE if value == "absent" else {**BASE, "steps_per_print": value}
    assert read_settings(config, 2).steps_per_print == math.inf


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"fp16": ON, "bf16": ON}, "both enabled"),
        ({"fp16": True}, "'fp16' must be an object"),
        ({"zero_optimization": {"stage": 4}}, "0, 1, 2 or 3, got 4"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "offload_param.nvme_path' = None"),
        ({"zero_optimization": {"offload_param": {"device": "gpu"}}}, "'none', 'cpu' or 'nvme', got 'gpu'"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "small gradients would vanish"),
        ({"torch_autocast": {"enabled": True, "dtype": "int8"}}, "one of fp32, fp16, bf16"),
        ({"data_types": {"param_dtype": "bf16"}}, "conflicts with the fp16 and bf16 blocks, which say fp32"),
        ({"gradient_clipping": "auto"}, "at least 0, got 'auto': only the Trainer"),
        ({"gradient_clipping": -1}, "at least 0, got -1"),
        ({"communication_data_type": "fp8"}, "'communication_data_type' must be one of"),
    ],
)  # fmt: skip
def test_wrong_values_are_named(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_settings({**BASE, **config}, 2)


def test_the_oldest_form_of_the_zero_block_is_stage_1() -> None:
    assert read_settings({**BASE, "zero_optimization": True}, 2).stage == 1
