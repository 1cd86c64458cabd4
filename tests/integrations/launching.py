"""Starting a program on some ranks as a user does, and what it has told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import zeropage

__all__ = ["ACCELERATE", "PROGRAMS", "TORCHRUN", "ds_config", "launch", "started"]

SOURCE = Path(zeropage.__file__).parents[1]
PROGRAMS = Path(__file__).with_name("programs")

TORCHRUN = ("-m", "zeropage.deepspeed", "torchrun", "--nproc-per-node", "{ranks}", "--standalone")
ACCELERATE = (
    "-m", "zeropage.deepspeed", "-m", "accelerate.commands.launch", "--use_deepspeed", "--num_processes", "{ranks}",
    "--num_machines", "1", "--main_process_port", "0", "--dynamo_backend", "no",
)  # fmt: skip
"""What stands after `python`, up to the options that a test adds, the program and its arguments."""


def ds_config(path: Path, **changes: Any) -> Path:
    """A configuration as the documentation of the Trainer shows it, with `auto` where it can be."""
    settings = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "steps_per_print": 1e5,
        "wall_clock_breakdown": False,
    }
    path.write_text(json.dumps({**settings, **changes}, indent=2))
    return path


def launch(
    program: str,
    folder: Path,
    *arguments: object,
    ranks: int = 2,
    launcher: tuple[str, ...] = TORCHRUN,
    timeout: float = 300.0,
    expect_failure: bool = False,
) -> list[dict[str, Any]]:
    """Run a program of `programs/` in `folder`; what its ranks told, by rank. Its first argument is `folder`."""
    done = started(program, folder, *arguments, ranks=ranks, launcher=launcher, timeout=timeout)
    assert (done.returncode != 0) == expect_failure, done.stdout + done.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def started(
    program: str,
    folder: Path,
    *arguments: object,
    ranks: int = 2,
    launcher: tuple[str, ...] = TORCHRUN,
    timeout: float = 300.0,
) -> subprocess.CompletedProcess[str]:
    """Run it to its end, whatever that is."""
    command = [part.format(ranks=ranks) for part in launcher]
    keep = {name: value for name, value in os.environ.items() if name in ("HOME", "LD_LIBRARY_PATH")}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # an active environment
    return subprocess.run(
        [sys.executable, *command, str(PROGRAMS / program), str(folder), *map(str, arguments)],
        cwd=folder,
        env={**keep, "PATH": path, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
