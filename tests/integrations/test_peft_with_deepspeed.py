"""K61, K04: methods of PEFT in programs written for DeepSpeed, on a base that `from_pretrained` shards as it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.testing import assert_close

from tests.integrations.launching import launch

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from tests.integrations.programs import peft_parts as parts  # noqa: E402  after the packages that it imports

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),  # peft asks for it
    pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*rank_pattern keys did not match.*:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]
CLOSE = {"rtol": 1e-4, "atol": 2e-5}
METHODS = [method for method in parts.METHODS if method != "trainable tokens"]
"""Under DeepSpeed PEFT makes trainable tokens on a GPU, whatever there is."""


class Programs:
    """The program, once for each way that was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._told: dict[str, list[dict[str, Any]]] = {}
        for method in METHODS:
            torch.manual_seed(0)
            parts.base(method).save_pretrained(folder / f"base {method}")

    def told(self, when: str) -> list[dict[str, Any]]:
        if when not in self._told:
            (self.folder / when).mkdir()
            self._told[when] = launch("peft_with_deepspeed.py", self.folder, when, *METHODS).told
        return self._told[when]

    def base(self, method: str) -> nn.Module:
        return transformers.AutoModelForCausalLM.from_pretrained(self.folder / f"base {method}")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return Programs(tmp_path_factory.mktemp("peft"))


def _plain(programs: Programs, method: str, folder: Path) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Losses of both ranks, and logits at the same points of the program."""
    model = parts.attach(programs.base(method), method)
    optimizer = parts.optimizer(model)
    losses: list[list[float]] = [[], []]
    for step in range(parts.STEPS):
        both = [parts.loss(model, step, rank) for rank in range(2)]
        for mine, each in zip(losses, both, strict=True):
            mine.append(each.item())
        (sum(both) / 2).backward()
        parts.allocate(model, method, step)
        optimizer.step()
        optimizer.zero_grad()
    out = {"trained": parts.logits(model)}
    with model.disable_adapter():
        out["without"] = parts.logits(model)
    model.save_pretrained(folder)
    out["loaded"] = parts.logits(peft.PeftModel.from_pretrained(programs.base(method), folder))
    if method in parts.MERGED:
        model.merge_adapter()
        out["merged"] = parts.logits(model)
        model.unmerge_adapter()
        out["unloaded"] = parts.logits(model.merge_and_unload())
    return losses, out


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("method", METHODS)
def test_a_method_does_what_it_does_in_plain_peft(method: str, when: str, programs: Programs, tmp_path: Path) -> None:
    told = programs.told(when)
    losses, logits = _plain(programs, method, tmp_path / "plain")
    for rank, (mine, seen) in enumerate(zip(losses, told, strict=True)):
        assert_close(seen[method], mine, **CLOSE)
        found = load_file(programs.folder / when / f"{method} {rank}.safetensors")
        assert found.keys() == logits.keys()
        for at, value in logits.items():
            assert_close(found[at], value, **CLOSE, msg=lambda m, k=at: f"{k}: {m}")

    if when == "after":
        base = parts.logits(programs.base(method)).sum().item()
        assert [seen[f"{method} base"] for seen in told] == pytest.approx([base, base], rel=1e-4, abs=1e-4)

    # what it saved is read by plain PEFT and plain transformers, in this process
    loaded = peft.PeftModel.from_pretrained(programs.base(method), programs.folder / when / method)
    assert_close(parts.logits(loaded), logits["loaded"], **CLOSE)
    if method in parts.MERGED:
        whole = transformers.AutoModelForCausalLM.from_pretrained(programs.folder / when / f"{method} whole")
        assert_close(parts.logits(whole), logits["unloaded"], **CLOSE)
