"""`transformers.Trainer` with a DeepSpeed configuration, in one program on two ranks, beside a plain Trainer alone.

The plain one takes the batches of both ranks at once; sums have another order then, so that losses agree to rounding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from tests.integrations.launching import ds_config, launch  # noqa: E402  after the packages that they import
from tests.integrations.programs.parts import arguments, llama, losses, tokens  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of the program, and what its ranks have seen."""
    folder = tmp_path_factory.mktemp("life")
    return folder, launch("trainer_life.py", folder, ds_config(folder / "ds.json")).told


@pytest.fixture
def seen(life: tuple[Path, list[dict[str, Any]]]) -> dict[str, Any]:
    first, other = life[1]
    assert first == other, "the ranks tell the same"
    return first


def _plain(folder: Path, **changes: Any) -> Any:
    trainer = transformers.Trainer(
        model=llama(),
        args=arguments(folder, per_device_train_batch_size=4, **changes),
        train_dataset=tokens(24),
        eval_dataset=tokens(10, seed=1),
    )
    return trainer


def test_accumulation_evaluation_prediction_and_saved_model(seen: dict[str, Any], life: Any, tmp_path: Path) -> None:
    plain = _plain(tmp_path, gradient_accumulation_steps=4)
    assert seen["before"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-6)
    plain.train()
    assert seen["accumulated"] == pytest.approx(losses(plain), rel=1e-5)
    norms = [entry["grad_norm"] for entry in plain.state.log_history if "grad_norm" in entry]
    assert seen["norms"] == pytest.approx(norms, rel=1e-4)
    assert seen["after"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)
    predicted = plain.predict(tokens(7, seed=2)).predictions
    assert tuple(seen["predicted"]) == predicted.shape
    assert seen["predicted sum"] == pytest.approx(predicted.astype("float64").sum(), rel=1e-3)
    saved = transformers.LlamaForCausalLM.from_pretrained(life[0] / "model")
    for name, value in plain.model.state_dict().items():
        assert torch.allclose(saved.state_dict()[name], value, atol=1e-5), name


def test_training_after_an_evaluation(seen: dict[str, Any], tmp_path: Path) -> None:
    """transformers goes on with an engine that it has destroyed: an error with DeepSpeed too, and here a clear one."""
    assert "make another Trainer of trainer.model, with TrainingArguments of its own" in seen["said"]
    assert seen["configured optimizer"] == [False, True], "why the arguments have to be new ones, too"
    plain = _plain(tmp_path)
    plain.train()
    assert seen["after evaluation"] == pytest.approx(losses(plain), rel=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_changes_nothing(reentrant: bool, seen: dict[str, Any], tmp_path: Path) -> None:
    plain = _plain(tmp_path)
    plain.train()
    assert seen[f"reentrant {reentrant}"] == pytest.approx(losses(plain), rel=1e-5)


def test_resumed_is_equal_to_the_bit(seen: dict[str, Any], life: Any) -> None:
    assert seen["resumed"] == seen["whole"][-3:]
    whole = load_file(life[0] / "whole/end/model.safetensors")
    resumed = load_file(life[0] / "resumed/model.safetensors")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_larger_vocabulary(seen: dict[str, Any], life: Any) -> None:
    """(That the ranks drew the same new rows is what `seen` looks at.)"""
    assert seen["rows"] == [[37, 16], 37]
    assert seen["all sharded"] and seen["old rows kept"] and seen["new rows trained"]
    assert all(torch.tensor(rows).isfinite().all() for rows in seen["new rows"])
    saved = transformers.LlamaForCausalLM.from_pretrained(life[0] / "resized/end")
    assert saved.config.vocab_size == 37 and saved.lm_head.weight.shape == (37, 16)


def test_bf16_casts_parameters_only(seen: dict[str, Any], tmp_path: Path) -> None:
    plain = _plain(tmp_path)
    plain.train()
    assert seen["bf16"] == pytest.approx(losses(plain), rel=1e-2) and seen["bf16"] != losses(plain)
    assert seen["dtypes"] == ["torch.bfloat16"]
    buffer = plain.model.model.rotary_emb.inv_freq
    assert seen["buffer dtype"] == str(buffer.dtype) == "torch.float32"
    assert seen["buffer"] == buffer.tolist()


def test_best_model_is_loaded_at_the_end(seen: dict[str, Any]) -> None:
    of_steps = seen["of each step"]
    assert min(of_steps) != of_steps[-1], "or this shows nothing"
    assert seen["best"] == min(of_steps) == seen["evaluated at the end"]
