"""Python runs this at the start of every process whose PYTHONPATH begins here: `python -m zeropage.deepspeed` does so.

It installs the alias and then lets the program's own sitecustomize run, if there is one.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path


def _install() -> None:
    """Read alias.py by its path: importing the package would import torch, in every child process there is."""
    name = "zeropage.deepspeed.alias"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "alias.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    module.install()


def _run_the_next_one() -> None:
    here = Path(__file__).parent
    spec = PathFinder.find_spec("sitecustomize", [entry for entry in sys.path if Path(entry).resolve() != here.resolve()])
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("ZEROPAGE_AS_DEEPSPEED") == "1":
    _install()
_run_the_next_one()
