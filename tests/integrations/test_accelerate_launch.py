"""`accelerate launch --use_deepspeed` on a script without a word of DeepSpeed: a raw loop, and a Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from tests.integrations.launching import ACCELERATE, launch  # noqa: E402  after the packages that they import
from tests.integrations.programs.parts import arguments, llama, losses, tokens  # noqa: E402

OPTIONS = (
    "--mixed_precision", "no", "--zero_stage", "3", "--gradient_accumulation_steps", "2", "--gradient_clipping", "0.5",
    "--zero3_save_16bit_model", "true",
)  # fmt: skip

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("launched")
    told = launch("launched.py", folder, launcher=(*ACCELERATE, *OPTIONS)).told
    assert told[0] == told[1], "the ranks tell the same"
    return folder, told[0]


def test_accumulation_clipping_and_saved_weights(ran: tuple[Path, dict[str, Any]]) -> None:
    """Ten batches in turn for two ranks: five each, the last one a step of its own."""
    folder, seen = ran
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = list(DataLoader(tokens(20), batch_size=2))
    expected, norms = [], []
    for turn in range(5):
        pair = [model(**batch).loss for batch in batches[2 * turn : 2 * turn + 2]]
        expected.append([loss.item() for loss in pair])
        (sum(pair) / 4).backward()
        if turn in (1, 3, 4):
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            for group in optimizer.param_groups:
                group["lr"] = seen["loop"]["rates"][turn - 1]
            optimizer.step()
            optimizer.zero_grad()
    for got, wanted in zip(seen["loop"]["losses"], expected, strict=True):
        assert got == pytest.approx(wanted, rel=1e-5)
    assert seen["loop"]["norms"] == pytest.approx(norms, rel=1e-4)
    saved = transformers.LlamaForCausalLM.from_pretrained(folder / "loop")
    for name, value in model.state_dict().items():
        assert torch.allclose(saved.state_dict()[name], value, atol=1e-4), name


def test_loaded_state_goes_on_to_the_bit(ran: tuple[Path, dict[str, Any]]) -> None:
    first, again = ran[1]["loop"], ran[1]["again"]
    assert again["batches"] == 3
    for what in ("losses", "rates"):
        assert again[what] == first[what][2:]
    assert again["norms"] == first["norms"][1:]
    assert len(ran[1]["evaluated"]) == 20


def test_trainer(ran: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, seen = ran
    assert seen["engine"] == "DeepSpeedEngine"
    plain = transformers.Trainer(
        model=llama(),
        args=arguments(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_grad_norm=0.5),
        train_dataset=tokens(24),
        eval_dataset=tokens(10, seed=1),
    )
    plain.train()
    assert seen["trainer"] == pytest.approx(losses(plain), rel=1e-5)
    assert seen["eval"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)
    saved = transformers.LlamaForCausalLM.from_pretrained(folder / "trainer/end")
    for name, value in plain.model.state_dict().items():
        assert torch.allclose(saved.state_dict()[name], value, atol=1e-4), name
