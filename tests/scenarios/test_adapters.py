"""PEFT on a sharded base: an adapter's files are adapter-sized, plain PEFT reads them, and they load over a base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import zeropage as zp
from tests.harness import run
from tests.scenarios.beside import everywhere, plain_copy
from zeropage.checkpoint.folder import Manifest

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it

KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {"target_modules": ["q_proj", "v_proj"]},
    "DoRA": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "LoRA and a head": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
}
TRAIN_STEPS = 3


def _base() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=67, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    return transformers.LlamaForCausalLM(config)


def _adapted(kind: str) -> nn.Module:
    base = plain_copy(_base, seed=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return peft.get_peft_model(base, peft.LoraConfig(r=3, lora_alpha=8, **KINDS[kind]))


def _tokens(step: int) -> Tensor:
    return torch.randint(0, 67, (2, 9), generator=torch.Generator().manual_seed(step))


def _engine(kind: str, transport: str) -> zp.Engine:
    model = _adapted(kind)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    return zp.Engine(model, optimizer, {"transport": transport, "timeout_s": 20})


def _train(engine: zp.Engine, steps: int = TRAIN_STEPS) -> None:
    for _ in range(steps):
        tokens = _tokens(engine.global_step)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()


def _logits(model: nn.Module) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model(input_ids=_tokens(99)).logits


def _trainable_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def _trains_and_saves(kind: str, transport: str, folder: Path) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits after training, and the trainable values."""
    engine = _engine(kind, transport)
    _train(engine)
    rank = dist.get_rank()
    engine.module.save_pretrained(folder / "one", is_main_process=rank == 0)
    engine.module.save_pretrained(folder / f"own{rank}")
    engine.save(folder / "saves", tag="adapter", trainable_only=True)
    engine.save(folder / "saves", tag="whole")
    values = {name: zp.full(p).detach() for name, p in engine.module.named_parameters() if p.requires_grad}
    logits = _logits(engine.module)
    engine.close()
    return logits, values


def _goes_on(kind: str, transport: str, folder: Path) -> Tensor:
    """The adapter over a base: a process that knows only the base and the checkpoint."""
    engine = _engine(kind, transport)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            if parameter.requires_grad:
                parameter.fill_(7.0)
    assert engine.load(folder / "saves", "adapter").global_step == TRAIN_STEPS
    _train(engine)
    logits = _logits(engine.module)
    engine.close()
    return logits


def _plain_from_pretrained(folder: Path) -> Tensor:
    """Without zeropage: PEFT, over a base of its own."""
    return _logits(peft.PeftModel.from_pretrained(plain_copy(_base, seed=1), folder))


def _size(folder: Path) -> int:
    return (folder / "adapter_model.safetensors").stat().st_size


@pytest.mark.parametrize("kind", KINDS)
@everywhere
def test_an_adapter_goes_out_and_comes_back(kind: str, transport: str, world: int, tmp_path: Path) -> None:
    ranks = run(world, _trains_and_saves, kind, transport, tmp_path)
    logits, values = ranks[0]
    assert not torch.equal(logits, _logits(_adapted(kind))), "training has changed something"
    for other, _ in ranks[1:]:
        assert torch.equal(other, logits)

    adapter = _trainable_bytes(_adapted(kind))
    for name in ["one", *(f"own{rank}" for rank in range(world))]:
        assert adapter <= _size(tmp_path / name) < 1.1 * adapter + 8192, "the size of an adapter"
        saved = load_file(tmp_path / name / "adapter_model.safetensors")
        assert len(saved) == len(values)
        for key, value in values.items():
            assert torch.equal(saved[_name_in_a_file(key)], value), key
        assert torch.equal(_plain_from_pretrained(tmp_path / name), logits)

    sizes = {
        tag: sum(file.nbytes for file in Manifest.read(tmp_path / "saves" / tag).files.values())  # type: ignore
        for tag in ("adapter", "whole")
    }
    whole = sum(p.numel() * p.element_size() for p in _adapted(kind).parameters())
    assert sizes["whole"] - sizes["adapter"] > whole - adapter, "frozen weights are left out"

    plain = _plain_trained(kind, 2 * TRAIN_STEPS)
    for found in run(3 - world if world < 3 else 2, _goes_on, kind, "auto", tmp_path):
        # three ranks add thirds, and a large rate makes more of it; one and two are equal but for the order of sums
        torch.testing.assert_close(found, plain, rtol=1e-3, atol=1e-5 if world == 2 else 1e-3)


def _name_in_a_file(name: str) -> str:
    """PEFT leaves the adapter's own name out."""
    return name.replace(".default", "").replace("lora_magnitude_vector.weight", "lora_magnitude_vector").replace(
        "modules_to_save.", ""
    )  # fmt: skip


def _plain_trained(kind: str, steps: int) -> Tensor:
    model = _adapted(kind)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for step in range(steps):
        tokens = _tokens(step)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return _logits(model)
