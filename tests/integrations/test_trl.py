"""Trainers of TRL with a DeepSpeed configuration, on two ranks: logs and saved models equal those of a plain run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from tests.integrations.launching import ds_config, launch

pytest.importorskip("trl")

TRAINERS = (
    "sft", "sft-lora", "sft-lora-head", "dpo", "dpo-precomputed", "dpo-reference", "dpo-following", "dpo-lora",
    "dpo-lora-precomputed", "grpo", "grpo-lora", "grpo-ungathered", "rloo", "kto", "reward",
)  # fmt: skip
TIMED = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos", "step_time"}
"""What may differ between two runs; all else that a trainer logs is compared."""

pytestmark = pytest.mark.slow


class Runs:
    """The program run plainly and on two ranks: several trainers in one process, which imports TRL once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = ds_config(folder / "ds.json", bf16={"enabled": "auto"}, fp16={"enabled": "auto"})
        for kind in ("plain", "ranks"):
            (folder / kind).mkdir()
        with ThreadPoolExecutor() as pool:
            plain = pool.submit(launch, "trl_trainers.py", folder / "plain", "-", *TRAINERS, ranks=1, launcher=())
            ranks = pool.submit(launch, "trl_trainers.py", folder / "ranks", config, *TRAINERS)
            [self.plain], self.ranks = plain.result().told, ranks.result().told

    def same_weights(self, expected: str, got: str) -> None:
        weights, found = load_file(self.folder / expected), load_file(self.folder / got)
        assert weights.keys() == found.keys()
        for name, value in weights.items():
            assert_close(found[name], value, rtol=1e-3, atol=1e-4, msg=lambda m, k=name: f"{k}: {m}")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("trl"))


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trainer_logs_and_saves_what_a_plain_run_does(trainer: str, runs: Runs) -> None:
    expected, got = runs.plain[trainer], runs.ranks[0][trainer]
    assert len(expected["logs"]) == 5, "four steps and the end"
    for plain, entry in zip(expected["logs"], got["logs"], strict=True):
        assert plain.keys() == entry.keys()
        for key in plain.keys() - TIMED:
            assert_close(float(entry[key]), float(plain[key]), rtol=1e-4, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")
    assert any(entry.get("grad_norm", 0) > 1e-3 for entry in expected["logs"]), "the run trains something"

    file = f"{trainer}/model/{'adapter_model' if 'lora' in trainer else 'model'}.safetensors"
    runs.same_weights(f"plain/{file}", f"ranks/{file}")
    for rank, told in enumerate(runs.ranks):
        runs.same_weights(f"plain/{trainer}/handed0.safetensors", f"ranks/{trainer}/handed{rank}.safetensors")
        said = told[trainer]["generated"]
        assert said == expected["generated"][: len(said)]
        assert trainer == "reward" or len(said) > 4, "more than the prompt"
