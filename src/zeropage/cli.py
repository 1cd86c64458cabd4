"""The command line: look at the machine or at a checkpoint, run the example, convert what others saved.

Commands are thin: they read their options, call one function and print.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import zeropage
from zeropage import environment
from zeropage.checkpoint import convert_deepspeed, render
from zeropage.checkpoint import inspect as look_into
from zeropage.errors import ZeropageError

__all__ = ["app", "demo_program"]

app = typer.Typer(
    name="zeropage",
    help="ZeRO stage 3 for PyTorch, with parameters as demand-paged memory.",
    no_args_is_help=True,
    add_completion=False,
)


class DtypeChoice(str, Enum):
    """What floating-point tensors are converted to."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class BenchPrecision(str, Enum):
    """What a step is expected in."""

    fp32 = "fp32"
    bf16 = "bf16"


class TransportChoice(str, Enum):
    """How ranks reach each other's slices; `auto` takes the first that can run."""

    auto = "auto"
    shared = "shared"
    collective = "collective"
    local = "local"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"zeropage {zeropage.__version__}")
        raise typer.Exit


@contextmanager
def _errors_as_text() -> Iterator[None]:
    """An error of the library ends the command with its message instead of a traceback."""
    try:
        yield
    except ZeropageError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options that come before a command."""


@app.command()
def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show versions, devices, memory limits, and which transports can run here and why not."""
    found = environment.collect()
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
    else:
        Console().print(environment.render(found))


@app.command()
def bench(
    ranks: Annotated[
        int | None, typer.Option(help="Ranks to start; the number of cores, at most 8, if absent.")
    ] = None,
    parameters: Annotated[float, typer.Option(help="Parameters of the model whose step time is expected.")] = 1e9,
    tokens: Annotated[int, typer.Option(help="Its tokens, of one rank in one step.")] = 2048,
    precision: Annotated[BenchPrecision, typer.Option(help="Its precision.")] = BenchPrecision.bf16,
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="Activations are computed again.")] = False,
    folder: Annotated[Path, typer.Option(help="A folder on the disk to measure.")] = Path("."),
    disk_size: Annotated[str, typer.Option(help="What is written there, at most.")] = "1GiB",
    sizes: Annotated[str, typer.Option(help="Units that are gathered and reduced.")] = "1MiB,16MiB,128MiB",
    seconds: Annotated[float, typer.Option(help="How long each figure is measured.")] = 0.3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Measure this machine: collectives, memory, disk, arithmetic; and the step time to expect of a model."""
    from zeropage import bench as machine  # torch.distributed and the engine are wanted by few commands
    from zeropage.bench.expect import Model
    from zeropage.bench.settings import default_ranks
    from zeropage.weights.plan import size_of

    with _errors_as_text(), Console(stderr=True).status("measuring, about half a minute ..."):
        settings = machine.Settings(
            ranks=default_ranks() if ranks is None else ranks,
            sizes=tuple(size_of(size, "--sizes") for size in sizes.split(",")),
            seconds=seconds,
            folder=folder,
            disk_bytes=size_of(disk_size, "--disk-size"),
            model=Model(parameters, tokens, precision.value, checkpointing),
        )
        found = machine.measure(settings)
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
    else:
        Console().print(machine.render(found))


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the first run.")] = 2,
    transport: Annotated[TransportChoice, typer.Option(help="Transport of the first run.")] = (TransportChoice.auto),
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps; the checkpoint is half-way.")] = 40,
    text: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Train on this file instead of Python's library."),
    ] = None,
    out: Annotated[Path, typer.Option(file_okay=False, help="Where results and the picture go.")] = Path("demo"),
) -> None:
    """Distil SmolLM2-135M into a small Llama over several ranks, resume on one, and show the memory."""
    command = [sys.executable, str(demo_program()), "--ranks", str(ranks), "--transport", transport.value]
    command += ["--steps", str(steps), "--out", str(out)]
    command += [] if text is None else ["--text", str(text)]
    raise typer.Exit(subprocess.run(command).returncode)


@app.command()
def inspect(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a folder of several (the latest then).")],
    verify: Annotated[bool, typer.Option(help="Read every byte and compare checksums.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show what is inside a checkpoint and what it needs on 1, 2, 4 and 8 ranks."""
    with _errors_as_text():
        found = look_into(checkpoint, verify=verify)
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2, default=str))
    else:
        Console().print(render(found))


@app.command()
def import_deepspeed(
    ckpt: Annotated[Path, typer.Argument(help="The folder that DeepSpeed saved into.")],
    out: Annotated[Path, typer.Argument(help="Where the checkpoint for `Engine.load` goes.")],
    tag: Annotated[str | None, typer.Option(help="Which one; the latest if absent.")] = None,
) -> None:
    """Convert a DeepSpeed ZeRO checkpoint: weights, fp32 masters, optimizer, counters, loss scale."""
    with _errors_as_text():
        found = convert_deepspeed(ckpt, out, tag)
    typer.echo(
        f"{out / found.tag}: step {found.global_step}, {found.num_parameters} trained parameters "
        f"(ZeRO stage {found.stage}, {found.world} ranks)"
    )


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A folder that Engine.save wrote, or one tag's folder in it.")],
    out: Annotated[Path, typer.Argument(help="Where the safetensors files go.")],
    max_shard_size: Annotated[str, typer.Option(help='Bytes of a file: "5GB", "512MiB", or a number.')] = "5GB",
    dtype: Annotated[
        DtypeChoice | None, typer.Option(help="Convert floating-point tensors (default: as saved).")
    ] = None,
) -> None:
    """Write the model of a checkpoint as Hugging Face safetensors, in this process alone, part by part."""
    with _errors_as_text():
        zeropage.export(checkpoint, out, max_shard_size, None if dtype is None else dtype.value)


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []},
    add_help_option=False,
)
def run(
    arguments: Annotated[list[str] | None, typer.Argument(help="See `zeropage run --help`.")] = None,
) -> None:
    """Start a program on several ranks: torchrun, with SLURM, hostfiles and the deepspeed launcher's options."""
    from zeropage import launching  # torchrun's modules are wanted by this command alone

    with _errors_as_text():
        launching.main(arguments or ["--help"])


def demo_program() -> Path:
    """The file of the example, in a checkout and in an installed package alike."""
    return Path(__file__).with_name("_examples") / "distill.py"
