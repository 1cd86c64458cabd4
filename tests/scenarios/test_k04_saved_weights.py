"""K04: every public way to save a sharded model writes full, right tensors, or raises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

import zeropage as zp
from tests.harness import run
from tests.harness.models import lm_batch, next_token
from tests.scenarios.beside import everywhere, plain_copy
from tests.scenarios.test_k15_export import Mixed


def _trained(transport: str) -> zp.Engine:
    """Two steps, so that what is saved is not what was built."""
    model = plain_copy(Mixed)
    used = [*model.embedding.parameters(), *model.blocks.parameters()]
    engine = zp.Engine(model, torch.optim.AdamW(used, lr=1e-2), {"transport": transport})
    for step in range(2):
        engine.backward(next_token(engine, lm_batch(step, 0, dist.get_rank())))
        engine.step()
    return engine


def _state_dict(model: nn.Module, path: Path) -> None:
    torch.save({name: zp.full(value) for name, value in model.state_dict().items()}, path)


def _torch_save(model: nn.Module, path: Path) -> None:
    torch.save(model.state_dict(), path)


def _torch_save_of_parameters(model: nn.Module, path: Path) -> None:
    torch.save({**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}, path)


def _save_model(model: nn.Module, path: Path) -> None:
    safetensors.torch.save_model(model, path)


def _save_file(model: nn.Module, path: Path) -> None:
    safetensors.torch.save_file({k: v.contiguous() for k, v in model.state_dict().items() if k != "head.weight"}, path)


def _export(model: nn.Module, path: Path) -> None:
    zp.export(model, path)


WAYS: dict[str, Callable[[nn.Module, Path], None]] = {
    "state_dict": _state_dict,
    "torch.save": _torch_save,
    "torch.save of parameters": _torch_save_of_parameters,
    "save_model": _save_model,
    "save_file": _save_file,
    "export": _export,
}
ALONE = [way for way in WAYS if way != "export"]


def _read(way: str, path: Path) -> nn.Module:
    """A plain model with what was written, loaded strictly."""
    model = plain_copy(Mixed, seed=9)
    if way == "export":
        zp.load_safetensors(model, path)
    elif way == "save_model":
        safetensors.torch.load_model(model, path)
    elif way == "save_file":
        state = safetensors.torch.load_file(path)
        model.load_state_dict({**state, "head.weight": state["embedding.weight"]})
    else:
        state = torch.load(path)
        state.pop("cache", None)
        model.load_state_dict(state)
    return model


def _saves(transport: str, folder: Path) -> dict[str, torch.Tensor]:
    engine = _trained(transport)
    for way, save in WAYS.items():
        save(engine.module, folder / (way if way == "export" else f"{way}.{dist.get_rank()}"))
    if dist.get_rank() == 0:  # reads need nobody
        for way in ALONE:
            WAYS[way](engine.module, folder / f"{way}.alone")
    full = {name: zp.full(value) for name, value in engine.module.state_dict().items()}
    engine.close()
    return full


@everywhere
def test_what_is_written_is_full_and_right(transport: str, world: int, tmp_path: Path) -> None:
    expected = run(world, _saves, transport, tmp_path)[0]
    before = plain_copy(Mixed).state_dict()
    assert not torch.equal(expected["embedding.weight"], before["embedding.weight"]), "it has been trained"
    for path in tmp_path.iterdir():
        found = _read(path.name.split(".")[0] if path.name == "export" else path.name.rsplit(".", 1)[0], path)
        for name, value in found.state_dict().items():
            assert torch.equal(value, expected[name]), f"{name} in {path.name}"
    assert len(list(tmp_path.iterdir())) == 1 + len(ALONE) * (world + 1)


# -- transformers


def _llama(tied: bool) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _save_pretrained(transport: str, folder: Path, tied: bool) -> None:
    model = plain_copy(lambda: _llama(tied))
    zp.shard(model, {"transport": transport})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    model.save_pretrained(folder / "all", max_shard_size="20KB")  # transformers writes on the first rank
    if dist.get_rank() == 0:
        model.save_pretrained(folder / "alone")
        model.config.save_pretrained(folder / "export")
    dist.barrier()
    zp.export(model, folder / "export", max_shard_size="20KB")


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("transport", "tied"),
    [
        ("shared", True),
        *(pytest.param(*case, marks=SLOW) for case in [("shared", False), ("collective", True), ("collective", False)]),
    ],
)
def test_save_pretrained(transport: str, tied: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    run(2, _save_pretrained, transport, tmp_path, tied)
    plain = plain_copy(lambda: _llama(tied))
    for folder in tmp_path.iterdir():
        found, info = transformers.LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()), info
        for (name, value), other in zip(plain.named_parameters(), found.parameters(), strict=True):
            assert torch.equal(value * 1.5, other), f"{name} in {folder.name}"
    assert {folder.name for folder in tmp_path.iterdir()} == {"all", "alone", "export"}
    assert len(list((tmp_path / "export").glob("*.safetensors"))) > 1


# -- what one rank cannot do alone


def _engine_save(engine: zp.Engine, folder: Path) -> None:
    engine.save(folder)


def _export_alone(engine: zp.Engine, folder: Path) -> None:
    zp.export(engine.module, folder)


def _load_alone(engine: zp.Engine, folder: Path) -> None:
    zp.load_safetensors(engine.module, folder)


def _alone(transport: str, what: Callable[[zp.Engine, Path], None], folder: Path) -> str:
    engine = _trained(transport)
    with pytest.raises((zp.errors.DivergenceError, zp.errors.PeerLostError)) as raised:
        if dist.get_rank() == 0:
            what(engine, folder)
        engine.backward(next_token(engine, lm_batch(2, 0, dist.get_rank())))
        engine.step()
    return str(raised.value)


@pytest.mark.parametrize("what", [_engine_save, _export_alone, _load_alone])
@pytest.mark.parametrize("transport", ["shared", "collective"])
def test_on_rank_zero_alone(transport: str, what: Any, tmp_path: Path) -> None:
    for told in run(2, _alone, transport, what, tmp_path / "out", timeout=20):
        assert any(word in told for word in ("save", "export", "safetensors")), told
    assert not (tmp_path / "out").exists()
