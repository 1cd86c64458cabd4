"""Distil SmolLM2-135M-Instruct into a small Llama over several ranks, then go on with it on one.

    python examples/distill.py --ranks 2          # or: zeropage demo --ranks 2

`train` below is what there is to learn here. It is an ordinary training loop: the models are made inside
`zp.init()`, which leaves each rank with its own slices of them, and optimizer, scheduler and loss are those
of plain PyTorch. No module is wrapped and no layer is named.

The program is a chain of processes. Each knows nothing but the files that the ones before it left in --out:

    prepare   this process unpacks the teacher's weights and tokenizes the text
    train     RANKS processes train for STEPS steps, and save a checkpoint half-way
    resume    ONE process loads that checkpoint and takes the second half again, on the same global batches
    plain     one process trains for a few steps without zeropage, to measure the memory that this needs

Then `distill_report` compares the losses of both second halves, and the memory with zeropage and without.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn
from transformers.utils import logging as transformers_logging

import zeropage as zp

import distill_report
from distill_meter import Meter, Task
from distill_models import distillation_loss, load_teacher, make_optimizer, make_student, micro_batch, prepare
from distill_report import Bytes, Record

CLIP_NORM = 1.0
PLAIN_STEPS = 3
TAG = "half-way"


# ------------------------------------------------------------------------------- the training, with zeropage


def train(task: Task, *, resume: bool) -> Record:
    """Train from the start and save half-way, or load that checkpoint and train the second half."""
    meter = Meter(task)
    config = zp.Config(
        transport=task.transport,
        accumulate=task.num_micro_batches // task.world,
        clip_grad_norm=CLIP_NORM,
    )
    with zp.init(config):
        teacher = load_teacher(task.out)
        student = make_student()
    optimizer, scheduler = make_optimizer(student, task.steps)
    engine = zp.Engine(student, optimizer, config, lr_scheduler=scheduler)
    if resume:
        engine.load(task.out / "checkpoint", tag=TAG)

    tokens = torch.load(task.out / "tokens.pt")["ids"]
    first, losses = engine.global_step, []
    with meter.progress(task.steps - first, "resumed" if resume else "training") as show:
        for step in range(first, task.steps):
            if step == task.half and not resume:
                engine.save(task.out / "checkpoint", tag=TAG)
            loss = 0.0
            for index in range(task.rank, task.num_micro_batches, task.world):
                inputs, targets = micro_batch(tokens, step, index)
                with torch.no_grad():
                    wanted = teacher(input_ids=inputs).logits
                part = distillation_loss(engine(input_ids=inputs).logits, wanted, targets)
                meter.sample()
                engine.backward(part)
                meter.sample()
                held = engine.memory()
                engine.step()
                loss += part.item() / config.accumulate
            losses.append(loss)
            show(loss, engine.grad_norm)

    nbytes = Bytes(
        parameters=held.parameters + sum(zp.local(p).nbytes for p in teacher.parameters()),
        gradients=held.gradients,
        optimizer=held.optimizer,
        frames=held.peak_frames,
    )
    engine.close()
    return meter.record("resume" if resume else "train", first, losses, nbytes)


# --------------------------------------------------------------------------------- the same in plain PyTorch


def train_plain(task: Task) -> Record:
    """A few steps of the same training with everything in one process, as every rank of DDP has it."""
    meter = Meter(task)
    teacher = load_teacher(task.out)
    student = make_student()
    optimizer, scheduler = make_optimizer(student, task.steps)
    tokens = torch.load(task.out / "tokens.pt")["ids"]
    losses = []
    with meter.progress(PLAIN_STEPS, "plain") as show:
        for step in range(PLAIN_STEPS):
            loss = 0.0
            for index in range(task.num_micro_batches):
                inputs, targets = micro_batch(tokens, step, index)
                with torch.no_grad():
                    wanted = teacher(input_ids=inputs).logits
                part = distillation_loss(student(input_ids=inputs).logits, wanted, targets)
                meter.sample()
                (part / task.num_micro_batches).backward()
                meter.sample()
                loss += part.item() / task.num_micro_batches
            norm = nn.utils.clip_grad_norm_(student.parameters(), CLIP_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss)
            show(loss, float(norm))

    teacher_numel = sum(p.numel() for p in teacher.parameters())
    numel = sum(p.numel() for p in student.parameters())
    computed = Bytes(parameters=2 * teacher_numel + 4 * numel, gradients=4 * numel, optimizer=8 * numel, frames=0)
    return meter.record("plain", 0, losses, computed)


# --------------------------------------------------------------------------------------------- the processes


def main() -> None:
    """Run every phase, or the one phase that this process was started for."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    options = parse_options()
    if options.phase is None:
        run_all(options)
    else:
        run_phase(options)


def run_all(options: argparse.Namespace) -> None:
    """Prepare, start the phases one after the other, then compare and report."""
    console, began = distill_report.console(), time.perf_counter()
    options.out.mkdir(parents=True, exist_ok=True)
    for leftover in ("checkpoint", "records"):
        shutil.rmtree(options.out / leftover, ignore_errors=True)
    with console.status("unpacking the teacher and tokenizing the text ..."):
        prepare(options.out, options.text)

    console.rule(f"distilling over {options.ranks} ranks, a checkpoint after step {options.steps // 2}")
    launch("train", options, world=options.ranks)
    console.rule("resuming on one rank, from that checkpoint")
    launch("resume", options, world=1)
    console.rule(f"{PLAIN_STEPS} steps without zeropage")
    launch("plain", options, world=1)

    distill_report.show(console, options.out, seconds=time.perf_counter() - began)


def launch(phase: str, options: argparse.Namespace, world: int) -> None:
    """Start one phase over `world` processes and wait for it.

    A process of any phase gets as many threads as a rank of the first run: their number decides in which
    order a matrix product is summed, and with it the last bits that the comparison looks at. Huge pages spare
    the kernel most of the work of giving fresh memory to large, short-lived tensors, here logits.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // options.ranks)
    settings = {"OMP_NUM_THREADS": str(threads), "THP_MEM_ALLOC_ENABLE": "1"}
    command = [sys.executable]
    if world > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    command += [__file__, "--phase", phase, "--ranks", str(options.ranks), "--steps", str(options.steps)]
    command += ["--transport", options.transport if phase == "train" else "auto", "--out", str(options.out)]
    done = subprocess.run(command, env={**os.environ, **settings})
    if done.returncode != 0:
        raise SystemExit(f"the phase {phase!r} failed, see above")


def run_phase(options: argparse.Namespace) -> None:
    """Be one rank of one phase, and leave a record."""
    task = Task(
        out=options.out,
        steps=options.steps,
        num_micro_batches=options.ranks,
        transport=options.transport,
        rank=int(os.environ.get("RANK", "0")),
        world=int(os.environ.get("WORLD_SIZE", "1")),
    )
    if options.phase == "plain":
        record = train_plain(task)
    else:
        record = train(task, resume=options.phase == "resume")
    record.write(options.out)


def parse_options() -> argparse.Namespace:
    """The command line; `--phase` is for the processes that this program starts itself."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes of the first run")
    parser.add_argument("--transport", default="auto", help="auto, shared, collective or local")
    parser.add_argument("--steps", type=int, default=40, help="the checkpoint is half-way")
    parser.add_argument("--text", type=Path, help="train on this file instead of Python's library")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="where the results and the picture go")
    parser.add_argument("--phase", choices=("train", "resume", "plain"), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
