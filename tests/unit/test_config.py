"""Settings: what is accepted, and that each mistake is one `ConfigError` which teaches."""

import json

import pytest
import torch
from pydantic import ValidationError

from zeropage.config import Config, LossScaleConfig, OffloadConfig
from zeropage.construct import Space
from zeropage.errors import ConfigError


def test_defaults_are_those_of_the_documentation():
    config = Config()
    assert (config.precision, config.accumulate, config.reduce_dtype) == (None, 1, "fp32")
    assert (config.bucket_bytes, config.resident_bytes, config.readahead) == (16 * 2**20, None, True)
    assert (config.transport, config.timeout_s, config.deterministic, config.seed) == (
        "auto",
        600,
        True,
        None,
    )
    assert config.loss_scale == LossScaleConfig(dynamic=True, initial=65536, window=1000, hysteresis=2, min=1)
    assert config.offload == OffloadConfig(parameters="none", optimizer="none")


def test_of_takes_a_config_a_mapping_a_file_and_nothing(tmp_path):
    settings = {"precision": "fp16", "loss_scale": {"initial": 2}, "clip_grad_norm": 1}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(settings))
    expected = Config(precision="fp16", loss_scale=LossScaleConfig(initial=2.0), clip_grad_norm=1.0)
    for value in (expected, settings, file, str(file)):
        assert Config.of(value) == expected
    assert Config.of(expected) is expected
    assert Config.of(None) == Config()


def test_a_config_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        Config().accumulate = 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"readahed": True}, "config key 'readahed': unknown key; did you mean 'readahead'?"),
        (
            {"loss_scale": {"inital": 3}},
            "config key 'loss_scale.inital': unknown key; did you mean 'initial'?",
        ),
        (
            {"offload": {"parameter": "host"}},
            "config key 'offload.parameter': unknown key; did you mean 'parameters'?",
        ),
        ({"offload": {"zzz": 1}}, "known keys are buffer_bytes, folder, optimizer, parameters"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_one(settings, message):
    with pytest.raises(ConfigError) as caught:
        Config.of(settings)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"readahead": "yes"}, "readahead"),
        ({"readahead": 1}, "readahead"),
        ({"accumulate": "3"}, "accumulate"),
        ({"accumulate": True}, "accumulate"),
        ({"accumulate": 0}, "accumulate"),
        ({"accumulate": 2.0}, "accumulate"),
        ({"clip_grad_norm": True}, "clip_grad_norm"),
        ({"clip_grad_norm": 0}, "clip_grad_norm"),
        ({"timeout_s": float("inf")}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"resident_bytes": -1}, "resident_bytes"),
        ({"bucket_bytes": 0}, "bucket_bytes"),
        ({"precision": "fp17"}, "precision"),
        ({"transport": "nccl"}, "transport"),
        ({"offload": 3}, "offload"),
        ({"precision": "fp16", "loss_scale": {"window": 0}}, "loss_scale.window"),
    ],
)
def test_a_wrong_value_is_named_and_never_coerced(settings, key):
    with pytest.raises(ConfigError, match=f"config key '{key}': .*, got "):
        Config.of(settings)
    with pytest.raises(ConfigError, match=f"config key '{key}'"):
        Config(**settings)


def test_all_mistakes_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        Config.of({"readahead": "yes", "accumulate": "3", "foo": 1})
    assert all(f"config key {key!r}" in str(caught.value) for key in ("readahead", "accumulate", "foo"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"offload": {"parameters": "disk"}}, "needs a folder"),
        ({"offload": {"optimizer": "disk"}}, "needs a folder"),
        ({"offload": {"folder": "/somewhere"}}, "folder cannot take effect"),
        ({"offload": {"optimizer": "host", "buffer_bytes": 1}}, "buffer_bytes cannot take effect"),
        ({"loss_scale": {}}, "only with precision='fp16'"),
        ({"precision": "bf16", "loss_scale": {"initial": 2}}, "precision is 'bf16'"),
        ({"precision": "fp16", "loss_scale": {"dynamic": False, "window": 5}}, "window cannot take effect"),
        ({"precision": "fp16", "loss_scale": {"initial": 1, "min": 2}}, "greater than initial"),
        ({"cast_frozen": True}, "cast_frozen cannot take effect without precision"),
    ],
)
def test_a_setting_that_cannot_take_effect_raises(settings, message):
    with pytest.raises(ConfigError, match=message):
        Config.of(settings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object, got list"),
        ('{"accumulate": 1, "accumulate": 2}', "key 'accumulate' is given twice"),
        ('{"readahed": true}', "did you mean 'readahead'"),
    ],
)
def test_a_bad_file_is_named(tmp_path, text, message):
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        Config.of(file)
    assert str(file) in str(caught.value)


def test_a_missing_file_and_a_wrong_kind_of_config_raise(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        Config.of(tmp_path / "missing.json")
    with pytest.raises(ConfigError, match="got int"):
        Config.of(3)
    with pytest.raises(ConfigError, match="keys should be strings"):
        Config.of({1: 2})


@pytest.mark.parametrize("section", [Config, LossScaleConfig, OffloadConfig])
def test_every_setting_is_described(section):
    assert all(field.description for field in section.model_fields.values())


def test_offload_that_has_no_effect_says_so(caplog: pytest.LogCaptureFixture) -> None:
    config = Config(offload={"optimizer": "host"})
    Space(config, None, torch.device("cpu")).close()
    assert caplog.messages == []
    Space(config, None, torch.device("xpu")).close()
    assert ["no effect on xpu" in message for message in caplog.messages] == [True]
