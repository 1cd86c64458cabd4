"""The third report: `from_pretrained(ignore_mismatched_sizes=True)` under `HfDeepSpeedConfig`, LoRA, `initialize`.

Whatever does not fit, one parameter at a time is in memory, the ranks agree, and what is told is the truth.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("accelerate")
pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from tests.integrations.launching import launch  # noqa: E402  after the packages that they import
from tests.integrations.programs.parts import SIZES  # noqa: E402

WIDE = {
    **SIZES, "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_labels": 3,
}  # fmt: skip
LARGEST = 300 * 64 * 4  # bytes

State = dict[str, torch.Tensor]
CASES: dict[str, tuple[Callable[[State], State], dict[str, Any]]] = {
    "everything fits": (lambda state: state, {}),
    "another vocabulary": (lambda state: state, {"vocab_size": 300}),
    "no head": (lambda state: {key: value for key, value in state.items() if "score" not in key}, {}),
    "half of the layers": (
        lambda state: {key: value for key, value in state.items() if ".2." not in key and ".3." not in key},
        {},
    ),
    "wrong prefix": (lambda state: {"wrong." + key: value for key, value in state.items()}, {}),
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A folder with a checkpoint for each case, and what the ranks have seen."""
    folder = tmp_path_factory.mktemp("pretrained")
    _prepare(folder)
    return folder, launch("pretrained.py", folder, *CASES).told


def _prepare(folder: Path) -> None:
    for name, (edit, changes) in CASES.items():
        torch.manual_seed(0)
        model = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**WIDE))
        model.save_pretrained(folder / name)
        path = folder / name / "model.safetensors"
        save_file(edit(load_file(path)), path, metadata={"format": "pt"})
        (folder / name / "wanted.json").write_text(json.dumps({**WIDE, **changes}))


@pytest.mark.parametrize("name", CASES)
def test_from_pretrained_and_lora(name: str, runs: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, told = runs
    wanted = transformers.LlamaConfig(**{**WIDE, **CASES[name][1]})
    plain, info = transformers.LlamaForSequenceClassification.from_pretrained(
        folder / name, config=wanted, ignore_mismatched_sizes=True, output_loading_info=True
    )
    facts = {key: sorted(str(each) for each in value) for key, value in info.items()}
    for rank in told:
        seen = rank[name]
        assert seen["info"] == facts, "the report is that of an unsharded model"
        assert LARGEST // 2 < seen["peak"] <= LARGEST + 16384
        assert seen["sharded"] and seen["frozen kept"] and seen["buffer"] == "torch.float32"
        assert seen["trained"] == seen["trainable"] > 8
    values = [torch.load(folder / f"{name}-{rank}.pt") for rank in range(2)]
    fresh = {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}
    assert bool(fresh) == (name != "everything fits")
    for key, value in plain.state_dict().items():
        got, other = (each[key] for each in values)
        assert torch.equal(got, other), f"{key}: the ranks agree"
        assert (got.shape, got.dtype) == (value.shape, value.dtype)
        if key not in fresh:
            assert torch.equal(got, value), key
        elif value.dim() == 1:
            assert torch.equal(got, value), f"{key} is set to ones"
        else:
            assert value.std() / 2 < got.std() < value.std() * 2, f"{key} is drawn from the same distribution"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="what is read into host memory goes to the GPU")
def test_on_one_gpu(tmp_path: Path) -> None:
    _prepare(tmp_path)
    told = launch("pretrained.py", tmp_path, *CASES, ranks=1).told[0]
    for name in CASES:
        assert told[name]["devices"] == ["cuda"] and told[name]["trained"] == told[name]["trainable"]
