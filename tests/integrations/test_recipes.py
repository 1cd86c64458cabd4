"""The text of docs/recipes.md runs, on one rank and on two, with the same result."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

import zeropage as zp
from tests.harness import run
from tests.harness.pool import ROOT

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
tqdm = pytest.importorskip("tqdm").tqdm

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it
SAMPLES = 4  # of a batch, on all ranks together
STEPS = 3


def _blocks(heading: str) -> list[str]:
    """The snippets below a heading of the page, up to the next one."""
    page = (ROOT / "docs" / "recipes.md").read_text()
    [section] = re.findall(rf"^#+ {re.escape(heading)}$(.*?)(?=^##|\Z)", page, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"^```python\n(.*?)^```$", section, flags=re.DOTALL | re.MULTILINE)


LORA, DPO = "LoRA with PEFT", "DPO with a reference model"
GENERATION, HANDOVER = "Generation during training", "Handing weights to an inference engine"


def _mine(whole: Tensor) -> Tensor:
    """This rank's samples of a batch."""
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def _tokens(seed: int) -> Tensor:
    return torch.randint(1, 41, (SAMPLES, 9), generator=torch.Generator().manual_seed(seed))


def _pair(step: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    counts = (torch.arange(9) > 3).float().expand(SAMPLES, 9)
    return (_mine(_tokens(2 * step)), _mine(counts)), (_mine(_tokens(2 * step + 1)), _mine(counts))


def _names(folder: Path) -> dict[str, Any]:
    """What the page takes for granted: imports, and data."""
    os.chdir(folder)
    tqdm.monitor_interval = 0  # its thread would outlive this case
    torch.manual_seed(0)
    tokens = [_mine(_tokens(step)) for step in range(STEPS)]
    return {
        "AutoModelForCausalLM": transformers.AutoModelForCausalLM,
        "F": F,
        "LoraLayer": peft.tuners.lora.LoraLayer,
        "batches": [{"input_ids": each, "labels": each} for each in tokens],
        "dist": dist,
        "pairs": [_pair(step) for step in range(STEPS)],
        "peft": peft,
        "prompts": {"input_ids": _mine(_tokens(50))[:, :4], "attention_mask": _mine(torch.ones(SAMPLES, 4))},
        "torch": torch,
        "zp": zp,
    }


def _values(model: Any) -> dict[str, Tensor]:
    return {name: zp.full(parameter).detach() for name, parameter in model.named_parameters()}


def _adapts(folder: Path) -> dict[str, Any]:
    names = _names(folder)
    [program] = _blocks(LORA)
    exec(program, names)
    dist.barrier()
    trained = _values(names["model"])

    # its reference is the policy without its adapter
    definition = _blocks(DPO)[0].split("\n\n\n")[0]
    names["chosen"], names["rejected"] = names["pairs"][0]
    exec(definition, names)
    exec(_blocks(DPO)[1], names)
    reference = names["expected"]

    sent: dict[str, Tensor] = {}
    names["send"] = sent.__setitem__
    exec(_blocks(HANDOVER)[1], names)
    names["engine"].close()
    return {"trained": trained, "sent": sent, "reference": reference}


def _prefers(folder: Path) -> dict[str, Tensor]:
    names = _names(folder)
    exec(_blocks(DPO)[0], names)
    found = _values(names["policy"])
    names["engine"].close()
    return found


def _generates(folder: Path, transport: str) -> dict[str, Any]:
    names = _names(folder)
    with zp.init({"transport": transport, "timeout_s": 30}):
        model = names["model"] = transformers.AutoModelForCausalLM.from_pretrained("base")
    model.generation_config.eos_token_id = list(range(12 + 16 * dist.get_rank()))  # ranks end at different lengths
    engine = zp.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in names["batches"]:
        engine.backward(engine(**batch).loss)
        engine.step()
        for block in _blocks(GENERATION):
            exec(block, names)
        assert torch.equal(names["said"], names["said_whole"])
    sent: dict[str, Tensor] = {}
    names["send"] = lambda name, value: sent.update({name: value.detach().clone()})
    exec(_blocks(HANDOVER)[0], names)
    said = names["said"]
    dist.barrier()
    engine.close()
    return {"sent": sent, "said": said}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("recipes")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=41, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
    )
    transformers.LlamaForCausalLM(config).save_pretrained(made / "base")
    return made


def _base(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "base")


def _close(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(got[name], value, rtol=1e-3, atol=1e-5, msg=lambda m, k=name: f"{k}: {m}")


def test_lora(folder: Path) -> None:
    one, *two = run(1, _adapts, folder) + run(2, _adapts, folder)
    for found in two:
        _close(found["trained"], one["trained"])
    assert_close(torch.cat([found["reference"] for found in two]), one["reference"])

    loaded = peft.PeftModel.from_pretrained(_base(folder), folder / "adapter")  # in a process without ranks
    merged = loaded.merge_and_unload().state_dict()
    assert not torch.equal(
        merged["model.layers.0.self_attn.q_proj.weight"], _base(folder).model.layers[0].self_attn.q_proj.weight
    ), "the adapter does something"
    for found in (one, *two):
        for name, value in found["sent"].items():
            assert_close(value, merged[name], msg=lambda m, k=name: f"{k}: {m}")
    assert (folder / "checkpoints" / "latest").exists()


def test_dpo(folder: Path) -> None:
    one, *two = run(1, _prefers, folder) + run(2, _prefers, folder)
    assert not torch.equal(one["model.norm.weight"], _base(folder).model.norm.weight)
    for found in two:
        _close(found, one)


@pytest.mark.parametrize("transport", ["shared", "collective"])
def test_generation_ends_where_each_rank_ends(transport: str, folder: Path) -> None:
    ranks = run(2, _generates, folder, transport)
    lengths = [found["said"].shape[1] for found in ranks]
    assert lengths[0] != lengths[1], "ranks stop at different lengths"

    plain = _base(folder)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(STEPS):
        tokens = _tokens(step)
        plain(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    plain.eval()
    for rank, found in enumerate(ranks):
        _close(found["sent"], expected)
        plain.generation_config.eos_token_id = list(range(12 + 16 * rank))
        said = plain.generate(
            _tokens(50)[:, :4].chunk(2)[rank], attention_mask=torch.ones(SAMPLES // 2, 4), max_new_tokens=12
        )
        assert torch.equal(found["said"], said)
