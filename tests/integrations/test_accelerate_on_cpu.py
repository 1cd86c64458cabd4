"""Accelerate, and the Trainer through it, see all ranks of a host without an accelerator, and share the data out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zeropage

ROOT = Path(zeropage.__file__).parents[1]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="on hosts without an accelerator only"),
]

STATE = """
import json, os, pathlib, sys
import torch
from torch.utils.data import DataLoader
{make}
loader = accelerator.prepare_data_loader(DataLoader(torch.arange(8), batch_size=2))
accelerator.wait_for_everyone()
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps({{
    "processes": accelerator.num_processes, "index": accelerator.process_index, "device": str(accelerator.device),
    "type": accelerator.distributed_type, "batches": [batch.tolist() for batch in loader],
    "gathered": accelerator.gather(torch.tensor([accelerator.process_index])).tolist(),
}}))
"""
CONFIG = "{'zero_optimization': {'stage': 3}, 'train_micro_batch_size_per_gpu': 1}"
PLUGIN = f"""
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config={CONFIG}))
"""
AGAIN = (
    PLUGIN
    + """
from accelerate.state import AcceleratorState
AcceleratorState._reset_state(reset_partial_state=True)  # as every TrainingArguments does
"""
    + PLUGIN
)
TRAINER = f"""
from transformers import TrainingArguments
from accelerate import Accelerator
arguments = TrainingArguments(sys.argv[1] + "/out", deepspeed={CONFIG}, report_to=[])
assert (arguments.world_size, arguments.process_index) == (2, int(os.environ["RANK"])), arguments.world_size
accelerator = Accelerator(deepspeed_plugin=arguments.deepspeed_plugin)
"""
LAUNCHED = "from accelerate import Accelerator\naccelerator = Accelerator()"

RUN = ("-c", "from zeropage.cli import app; app(prog_name='zeropage')", "run", "--ranks", "2", "--deepspeed")
ACCELERATE = (
    "-m", "zeropage.deepspeed", "-m", "accelerate.commands.launch", "--use_deepspeed", "--num_processes", "2",
    "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--zero_stage", "3",
)  # fmt: skip


def _found(make: str, folder: Path, launcher: tuple[str, ...]) -> list[dict[str, Any]]:
    (folder / "program.py").write_text(STATE.format(make=make))
    keep = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LD_LIBRARY_PATH")}
    done = subprocess.run(
        [sys.executable, *launcher, "program.py", str(folder)],
        cwd=folder, env={**keep, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / str(rank)).read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("make", "launcher"),
    [
        pytest.param(PLUGIN, RUN, id="accelerator"),
        pytest.param(AGAIN, RUN, id="accelerator made anew"),
        pytest.param(TRAINER, RUN, id="trainer"),
        pytest.param(LAUNCHED, ACCELERATE, id="accelerate launch"),
    ],
)
def test_every_rank_gets_its_own_part_of_the_data(make: str, launcher: tuple[str, ...], tmp_path: Path) -> None:
    found = _found(make, tmp_path, launcher)
    for rank, seen in enumerate(found):
        assert (seen["processes"], seen["index"], seen["device"], seen["type"]) == (2, rank, "cpu", "DEEPSPEED")
        assert seen["gathered"] == [0, 1]
    assert sorted(sample for seen in found for batch in seen["batches"] for sample in batch) == list(range(8))
    assert found[0]["batches"] != found[1]["batches"]
