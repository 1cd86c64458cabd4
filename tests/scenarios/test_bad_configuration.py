"""A wrong setting is an error that names it and the remedy, on every rank, before anything is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zeropage as zp
from tests.harness import run

CASES: dict[str, tuple[dict[str, Any] | str, str, str]] = {
    "unknown key": ({"transprt": "shared"}, "ConfigError", "did you mean 'transport'"),
    "unknown nested key": ({"offload": {"paramters": "host"}}, "ConfigError", "did you mean 'parameters'"),
    "wrong type": ({"accumulate": "3"}, "ConfigError", "accumulate"),
    "wrong value": ({"precision": "fp8"}, "ConfigError", "precision"),
    "no such file": ("/no/such/config.json", "ConfigError", "/no/such/config.json"),
    "local with more ranks": ({"transport": "local"}, "TransportUnavailableError", "serves one rank"),
    "offload to disk": ({"offload": {"parameters": "disk"}}, "ConfigError", "disk"),
    "loss scale without fp16": ({"loss_scale": {"initial": 2.0}}, "ConfigError", "precision"),
}


def _shard_badly(config: dict[str, Any] | str) -> tuple[str, tuple[str, ...], str, bool, bool]:
    """The error of `shard` and of `init`, and whether everything is as it was."""
    model = nn.Linear(3, 3)
    before = model.weight.detach().clone()
    with pytest.raises(zp.errors.ZeropageError) as raised:
        zp.shard(model, config)
    with pytest.raises(type(raised.value)), zp.init(config):
        pass
    untouched = not zp.is_paged(model.weight) and torch.equal(model.weight, before)
    later = nn.Linear(2, 2)  # nothing watches any more
    bases = tuple(base.__name__ for base in type(raised.value).__mro__)
    return type(raised.value).__name__, bases, str(raised.value), untouched, not zp.is_paged(later.weight)


@pytest.mark.parametrize("name", CASES)
def test_bad_setting(name: str) -> None:
    config, kind, told = CASES[name]
    for found, bases, message, untouched, unwatched in run(2, _shard_badly, config):
        assert found == kind
        assert "ZeropageError" in bases
        assert told in message
        assert untouched and unwatched


@pytest.mark.parametrize("transport", ["shared", "collective"])
def test_a_transport_that_needs_a_group(transport: str) -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(zp.errors.TransportUnavailableError, match="torchrun"):
        zp.shard(model, {"transport": transport})
    assert not zp.is_paged(model.weight)


def test_shards_that_do_not_fit() -> None:
    model = nn.Linear(10**6, 10**7, device="meta")
    with pytest.raises(zp.errors.OutOfMemoryError, match=r"40,0\d\d,\d\d\d,\d\d\d,\d\d\d bytes .* are available"):
        zp.shard(model)
    assert not zp.is_paged(model.weight)


@pytest.mark.parametrize(
    ("late", "message"),
    [
        ({"transport": "collective"}, "transport='collective' cannot take effect: .* with 'local'"),
        ({"resident_bytes": 100}, "resident_bytes=100 cannot take effect: .* with None"),
        ({"timeout_s": 3}, "timeout_s=3.0 cannot take effect: .* with 600.0"),
        ({"readahead": False}, "readahead=False cannot take effect: .* with True"),
        ({"reduce_dtype": "bf16"}, "reduce_dtype='bf16' cannot take effect: .* with 'fp32'"),
    ],
)
def test_settings_that_come_too_late(late: dict[str, object], message: str) -> None:
    model = zp.shard(nn.Linear(3, 3))
    with pytest.raises(zp.errors.ConfigError, match=message):
        zp.Engine(model, None, late)


def test_settings_that_were_given_before() -> None:
    settings = {"transport": "local", "resident_bytes": 100, "accumulate": 2}
    assert zp.Engine(zp.shard(nn.Linear(3, 3), settings), None, settings).config.resident_bytes == 100
    zp.Engine(zp.shard(nn.Linear(3, 3)), None, {"transport": "local", "accumulate": 4})


def test_an_optimizer_over_something_else() -> None:
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    with pytest.raises(
        zp.errors.ConfigError, match=r"parameter 0 of optimizer group 0 .* does not belong to the model"
    ):
        zp.Engine(model, torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(zp.errors.ConfigError, match="must be a torch"):
        zp.Engine(model, iter(()))  # type: ignore[arg-type]
    with pytest.raises(zp.errors.ConfigError, match="closure"):
        zp.Engine(model, torch.optim.LBFGS(model.parameters()))
    assert not zp.is_paged(model.weight)
