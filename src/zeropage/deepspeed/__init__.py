"""A package shaped like `deepspeed`, every name of it mapped onto zeropage.

`import zeropage.deepspeed as deepspeed` uses it by itself. `install()` lets `import deepspeed` mean it for all
libraries in the process, and `python -m zeropage.deepspeed SCRIPT` does so for a whole program. docs/deepspeed.md
explains; names.py has the table.
"""

import importlib
import importlib.util
from typing import Any

from zeropage.deepspeed.alias import VERSION as __version__
from zeropage.deepspeed.alias import install, installed, look_up, uninstall

__all__ = ["__version__", "install", "installed", "uninstall"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")  # a file of this package comes before the table
    return look_up("deepspeed", name)


def __dir__() -> list[str]:
    names: list[str] = importlib.import_module(f"{__name__}.names").public_names("deepspeed")
    return sorted({*__all__, *names})
