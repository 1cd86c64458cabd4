"""`zeropage.transformers.Trainer` and `zeropage.accelerate.Accelerator`, on two ranks beside plain training alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from tests.integrations.launching import launch  # noqa: E402  after the packages that they import
from tests.integrations.programs.parts import arguments, llama, losses, tokens  # noqa: E402

PLAIN_TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "{ranks}", "--standalone")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("native")
    _plain(folder / "plain", max_steps=5, save_strategy="steps", save_steps=2).train()
    return folder, launch("trainer_native.py", folder, launcher=PLAIN_TORCHRUN).told


@pytest.fixture
def seen(life: tuple[Path, list[dict[str, Any]]]) -> dict[str, Any]:
    first, other = life[1]
    assert first == other, "the ranks tell the same"
    return first


def _plain(folder: Path, model: Any = None, **changes: Any) -> Any:
    return transformers.Trainer(
        model=llama() if model is None else model,
        args=arguments(folder, per_device_train_batch_size=4, **changes),
        train_dataset=tokens(24),
        eval_dataset=tokens(10, seed=1),
    )


def test_trainer_from_the_first_evaluation_to_the_saved_model(seen: dict[str, Any], life: Any, tmp_path: Path) -> None:
    assert seen["sharded"] and not seen["wrapped"]
    plain = _plain(tmp_path, gradient_accumulation_steps=4, max_grad_norm=0.3)
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


def test_model_made_under_init_with_activation_checkpointing(seen: dict[str, Any], tmp_path: Path) -> None:
    plain = _plain(tmp_path)
    plain.train()
    assert seen["init"] == pytest.approx(losses(plain), rel=1e-5)


def test_resumed_is_equal_to_the_bit(seen: dict[str, Any], life: Any) -> None:
    assert seen["resumed"] == seen["whole"][-3:]
    whole = load_file(life[0] / "whole/end/model.safetensors")
    resumed = load_file(life[0] / "resumed/model.safetensors")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_over_messages(seen: dict[str, Any], life: Any, tmp_path: Path) -> None:
    plain = _plain(tmp_path, max_steps=5)
    plain.train()
    assert seen["far"] == pytest.approx(losses(plain), rel=1e-5)
    assert seen["far evaluated"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)
    assert seen["far resumed"] == seen["far"][-3:]
    saved = transformers.LlamaForCausalLM.from_pretrained(life[0] / "far/end")
    for name, value in plain.model.state_dict().items():
        assert torch.allclose(saved.state_dict()[name], value, atol=1e-5), name


def test_on_from_a_checkpoint_of_the_ordinary_trainer(seen: dict[str, Any], tmp_path: Path) -> None:
    plain = _plain(tmp_path, max_steps=5)
    plain.train()
    assert seen["from a plain one"] == pytest.approx(losses(plain)[-3:], rel=1e-5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_lora_on_a_sharded_base(seen: dict[str, Any], life: Any, tmp_path: Path) -> None:
    assert seen["frozen kept"]
    base = transformers.LlamaForCausalLM.from_pretrained(life[0] / "model")
    tuned = peft.PeftModel.from_pretrained(base, life[0] / "adapter")
    plain = _plain(tmp_path, tuned)
    assert plain.evaluate()["eval_loss"] == pytest.approx(seen["lora after"], rel=1e-5)
    assert seen["lora after"] != pytest.approx(seen["after"], rel=1e-4), "the adapter has been trained"
    files = sorted(path.name for path in (life[0] / "lora/checkpoint-4").iterdir())
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 1e-2), ("fp16", 1e-3)])
def test_16_bits_cast_parameters_only(precision: str, tolerance: float, seen: dict[str, Any], tmp_path: Path) -> None:
    plain = _plain(tmp_path)
    plain.train()
    assert seen[precision] == pytest.approx(losses(plain), rel=tolerance) and seen[precision] != losses(plain)
    assert seen[precision + " dtypes"] == [{"bf16": "torch.bfloat16", "fp16": "torch.float16"}[precision]]
    buffer = plain.model.model.rotary_emb.inv_freq
    assert seen[precision + " buffer"] == [str(buffer.dtype), buffer.tolist()]


def test_best_model_is_loaded_at_the_end(seen: dict[str, Any]) -> None:
    of_steps = seen["of each step"]
    assert min(of_steps) != of_steps[-1], "or this shows nothing"
    assert seen["best"] == min(of_steps) == seen["evaluated at the end"]


def test_ranks_that_accelerate_does_not_see_are_an_error(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("on hosts without an accelerator only")
    run = launch("unseen_ranks.py", tmp_path, launcher=PLAIN_TORCHRUN)
    for told in run.told:
        assert told["error"].startswith("2 ranks were started, and Accelerate takes itself for 1")


# -- Accelerator


def _loop() -> dict[str, Any]:
    """Four steps of two micro-batches of six samples, plain."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 17), nn.LayerNorm(17), nn.Tanh(), nn.Linear(17, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    seen: dict[str, Any] = {"losses": [], "norms": [], "rates": []}
    batches = torch.randn(48, 5, generator=torch.Generator().manual_seed(1)).split(3)
    for number in range(8):
        parts = [model(half).square().mean() for half in batches[2 * number : 2 * number + 2]]
        loss = sum(parts) / 2
        (loss / 2).backward()
        seen["losses"].append(loss.item())
        if number % 2:
            seen["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        seen["rates"].append(scheduler.get_last_lr()[0])
    return seen | {"model": model}


def test_accelerator(tmp_path: Path) -> None:
    first, other = launch("accelerate_native.py", tmp_path, "none", launcher=PLAIN_TORCHRUN).told
    assert first == other
    plain = _loop()
    for what in ("losses", "norms", "rates"):
        assert first[what] == pytest.approx(plain[what], rel=1e-5), what
    assert first["wrapped"] == "Sequential", "no wrapper around it"
    end = torch.load(tmp_path / "end.pt")
    for name, value in plain["model"].named_parameters():
        assert torch.allclose(end[name], value, atol=1e-6), name
    again = launch("accelerate_native.py", tmp_path, "none", tmp_path / "state", launcher=PLAIN_TORCHRUN).told[0]
    assert again["losses"] == first["losses"][4:] and again["rates"] == first["rates"][4:]
    assert again["norms"] == first["norms"][2:]
    for name, value in torch.load(tmp_path / "end.pt").items():
        assert torch.equal(value, end[name]), name


@pytest.mark.slow
def test_accelerator_in_fp16(tmp_path: Path) -> None:
    told = launch("accelerate_native.py", tmp_path, "fp16", launcher=PLAIN_TORCHRUN).told[0]
    plain = _loop()
    assert told["losses"] == pytest.approx(plain["losses"], rel=2e-2)
    assert told["norms"] == pytest.approx(plain["norms"], rel=2e-2)
    assert "loss scale" in told["part"], "a part of the gradient cannot be clipped there"


@pytest.mark.slow
def test_clipping_and_overflow_in_fp16(tmp_path: Path) -> None:
    """The second step overflows on one rank; the others are those of a plain training that is clipped too."""
    first, other = launch("accelerate_fp16.py", tmp_path, launcher=PLAIN_TORCHRUN).told
    assert first == other
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 17), nn.Tanh(), nn.Linear(17, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    batches = torch.randn(24, 5, generator=torch.Generator().manual_seed(1)).split(6)
    norms: list[float | None] = []
    rates = []
    for step in range(4):
        if step == 1:
            norms.append(None)
        else:
            model(batches[step]).square().mean().backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
    assert first["skipped"] == [False, True, False, False]
    assert first["scales"] == [256.0, 128.0, 128.0, 128.0]
    assert first["rates"] == rates, "the schedule waits for the skipped step"
    for got, wanted in zip(first["norms"], norms, strict=True):
        assert got == (None if wanted is None else pytest.approx(wanted, rel=1e-2))
    end = torch.load(tmp_path / "end.pt")
    for name, value in model.named_parameters():
        assert torch.allclose(end[name], value, atol=1e-3), f"{name}: the steps changed values by 0.02 each"


@pytest.mark.slow
def test_accelerator_state_on_one_rank(tmp_path: Path) -> None:
    two = launch("accelerate_native.py", tmp_path, "none", launcher=PLAIN_TORCHRUN).told[0]
    state = tmp_path / "state"
    one = launch("accelerate_native.py", tmp_path, "none", state, ranks=1, launcher=PLAIN_TORCHRUN).told[0]
    assert one["losses"] == pytest.approx(two["losses"][4:], rel=1e-5)
    assert one["norms"] == pytest.approx(two["norms"][2:], rel=1e-5)
