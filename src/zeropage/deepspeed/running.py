"""Runs a whole program, and every process that it starts, with `import deepspeed` meaning zeropage.

Children find out by two environment variables: ZEROPAGE_AS_DEEPSPEED, and a PYTHONPATH that begins with the folder
`site` here, whose sitecustomize.py Python runs at its start. So torchrun, `accelerate launch` and multiprocessing's
spawn need no part in it. (`python -I`, `-E` and `-S` leave PYTHONPATH or sitecustomize out; then nothing is installed.)
"""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from collections.abc import Callable, MutableMapping, Sequence
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path

from zeropage.deepspeed.alias import REPLACE, install
from zeropage.deepspeed.launcher_names import main as launch
from zeropage.errors import ConfigError

__all__ = ["find_command", "main", "prepare", "prepare_children"]

_SITE = Path(__file__).parent / "site"
_USAGE = "usage: python -m zeropage.deepspeed SCRIPT [ARGUMENTS], or -m MODULE [ARGUMENTS], or COMMAND [ARGUMENTS]"


def main(arguments: Sequence[str]) -> None:
    """The command line of `python -m zeropage.deepspeed`."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return
    try:
        program = prepare(arguments)
    except ConfigError as error:
        sys.exit(f"zeropage: {error}")
    program()  # what it raises is its own, and comes with its traceback


def prepare(arguments: Sequence[str]) -> Callable[[], None]:
    """Install the alias, here and for children; what runs the script, the module (after "-m") or the command.

    The command `deepspeed` is DeepSpeed's launcher, as zeropage provides it.

    Raises:
        ConfigError: nothing to run, or it is not there; see `install` too.
    """
    prepare_children(os.environ)
    if arguments[0] == "-m":
        if len(arguments) < 2:
            raise ConfigError(f"-m needs the name of a module; {_USAGE}")
        install()
        return partial(_run_module, arguments[1:])
    if _is_program(Path(arguments[0])):
        install()
        return partial(_run_script, arguments)
    if arguments[0] == "deepspeed":
        return partial(launch, arguments[1:])
    command = find_command(arguments[0])
    if command is None:
        raise ConfigError(
            f"{arguments[0]}: no such file, and no command of that name, neither beside {sys.executable} nor on PATH"
        )
    return partial(_become, command, arguments)


def find_command(name: str) -> str | None:
    """The program that `name` means; one beside this interpreter goes first, whether or not PATH has its folder."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


def prepare_children(environment: MutableMapping[str, str]) -> None:
    """Let Python processes started with `environment` install the alias.

    Whoever asks for it has chosen, so it takes the place of a DeepSpeed that is installed, and says so; with
    ZEROPAGE_REPLACE_DEEPSPEED=0 in the environment it does not.
    """
    environment["ZEROPAGE_AS_DEEPSPEED"] = "1"
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(_SITE)]
    environment["PYTHONPATH"] = os.pathsep.join([str(_SITE), *paths])
    if REPLACE not in environment:
        environment[REPLACE] = "1"
        real = PathFinder.find_spec("deepspeed")
        if real is not None and real.origin is not None:
            print(f"zeropage: `import deepspeed` means zeropage now, and not {real.origin}", file=sys.stderr)


def _is_program(path: Path) -> bool:
    """What `python PATH` runs. (A folder that happens to be named like a command is none.)"""
    return path.is_file() or (path / "__main__.py").is_file()


def _run_script(arguments: Sequence[str]) -> None:
    """As `python SCRIPT`: the script's folder comes first on sys.path."""
    sys.argv = list(arguments)
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


def _run_module(arguments: Sequence[str]) -> None:
    """As `python -m MODULE`: the current folder comes first on sys.path."""
    sys.argv = list(arguments)
    sys.path[0] = os.getcwd()
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


def _become(command: str, arguments: Sequence[str]) -> None:
    """Become the command (`torchrun`, `accelerate launch`): Python in it finds the environment prepared."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command, list(arguments))
