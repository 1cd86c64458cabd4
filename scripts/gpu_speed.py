"""Step time, tokens a second and memory of large models on one GPU, each way in a process of its own.

python scripts/gpu_speed.py MODEL WAY    one of them; a line of JSON at the end
"""

from __future__ import annotations

import importlib.util
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import psutil  # noqa: E402
import torch  # noqa: E402

from benchmarks import models  # noqa: E402
from benchmarks.competitors.base import optimizer_settings  # noqa: E402

__all__ = ["Outcome", "measure_speed", "table"]

MODELS = ("1B", "8B")
WAYS = ("zeropage, offload", "DeepSpeed, offload", "plain torch")
TOKENS = 2048
COUNTED = 3  # steps, after one to warm up
HOST_BYTES = {"zeropage, offload": 16, "DeepSpeed, offload": 18, "plain torch": 0}  # a parameter
DEVICE_BYTES = {"zeropage, offload": 0, "DeepSpeed, offload": 0, "plain torch": 18}


@dataclass(frozen=True)
class Outcome:
    """Seconds of a step (median), and bytes; `problem` says why there are none."""

    model: str
    way: str
    step: float = 0.0
    device_peak: int = 0
    host_peak: int = 0
    problem: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_a_second": TOKENS / self.step if self.step else 0.0}


def measure_speed(end: float) -> list[Outcome]:
    """All of them, as long as there is time (`end`: of `time.monotonic`)."""
    found = []
    for model in MODELS:
        for way in WAYS:
            problem = _why_not(model, way)
            outcome = Outcome(model, way, problem=problem) if problem else _in_a_process(model, way, end)
            print(f"{model}, {way}: {outcome.problem or f'{outcome.step:.2f} s a step'}", flush=True)
            found.append(outcome)
    return found


def _why_not(model: str, way: str) -> str:
    if way.startswith("DeepSpeed") and importlib.util.find_spec("deepspeed") is None:
        return "not installed"
    for place, each, there in (
        ("host", HOST_BYTES, psutil.virtual_memory().available),
        ("GPU", DEVICE_BYTES, torch.cuda.mem_get_info()[0]),
    ):
        needed = each[way] * models.SHAPES[model].numel
        if needed > there:
            return f"needs {needed / 1e9:.0f} GB of {place} memory, {there / 1e9:.0f} are free"
    return ""


def _in_a_process(model: str, way: str, end: float) -> Outcome:
    left = end - time.monotonic()
    if left < 20:
        return Outcome(model, way, problem="no time left")
    command = [sys.executable, str(Path(__file__)), model, way]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=left)
    except subprocess.TimeoutExpired:
        return Outcome(model, way, problem=f"not done in {left:.0f} s")
    if done.returncode:
        return Outcome(model, way, problem=(done.stderr.strip().splitlines() or ["it said nothing"])[-1][:200])
    return Outcome(**json.loads(done.stdout.strip().splitlines()[-1]))


def table(outcomes: list[Outcome]) -> str:
    lines = [
        "| model | | s a step | tokens/s | GPU memory, peak | host memory, peak |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for one in outcomes:
        if one.problem:
            lines.append(f"| {one.model} | {one.way} | {one.problem} | | | |")
        else:
            sizes = f"{one.device_peak / 1e9:.1f} GB | {one.host_peak / 1e9:.1f} GB"
            lines.append(f"| {one.model} | {one.way} | {one.step:.2f} | {TOKENS / one.step:.0f} | {sizes} |")
    return "\n".join(lines)


# -- in the process


def _zeropage(name: str) -> Callable[[torch.Tensor], None]:
    import zeropage as zp

    config = {
        "precision": "bf16", "offload": {"parameters": "host", "optimizer": "host"}, "reduce_dtype": "bf16",
        "bucket_bytes": 256 << 20,
    }  # fmt: skip
    with torch.device("cuda"), zp.init(config):
        model = models.build(name, checkpointing=True)
    engine = zp.Engine(model, torch.optim.AdamW(model.parameters(), fused=True, **optimizer_settings()))

    def step(batch: torch.Tensor) -> None:
        engine.backward(engine(batch))
        engine.step()

    return step


def _deepspeed(name: str) -> Callable[[torch.Tensor], None]:
    import deepspeed

    place = {"device": "cpu", "pin_memory": True}
    adam = optimizer_settings()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
        "optimizer": {"type": "AdamW", "params": {**adam, "betas": list(adam["betas"])}},
        "steps_per_print": 1 << 30,
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = models.build(name, checkpointing=True)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(batch: torch.Tensor) -> None:
        engine.backward(engine(batch))
        engine.step()

    return step


def _plain(name: str) -> Callable[[torch.Tensor], None]:
    from benchmarks.competitors.plain import Masters

    with torch.device("cuda"):
        model = models.build(name, checkpointing=True).bfloat16()
    masters = Masters([(parameter, 0, parameter.numel()) for parameter in model.parameters()])

    def step(batch: torch.Tensor) -> None:
        model(batch).backward()
        masters.step()
        model.zero_grad()

    return step


_MAKERS = dict(zip(WAYS, (_zeropage, _deepspeed, _plain), strict=True))


def run_one(model: str, way: str) -> Outcome:
    step = _MAKERS[way](model)
    times = []
    with torch.device("cuda"):
        for index in range(1 + COUNTED):
            batch = _batch(model, index)
            torch.cuda.synchronize()
            began = time.perf_counter()
            step(batch)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Outcome(model, way, sorted(times[1:])[COUNTED // 2], torch.cuda.max_memory_allocated(), peak)


def _batch(model: str, index: int) -> torch.Tensor:
    with torch.device("cpu"):  # its generator is one of the host
        return models.tokens(model, TOKENS, index, 0).cuda()


if __name__ == "__main__":
    print(json.dumps(asdict(run_one(*sys.argv[1:]))))
