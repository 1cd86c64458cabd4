"""Makes `import deepspeed` mean zeropage: one finder on `sys.meta_path` for modules and for the distribution.

The one place with state of the whole process: `sys.meta_path` and `sys.modules`. It imports nothing but Python's own
library until a module named deepspeed is asked for, since `python -m zeropage.deepspeed` installs it at the start of
every Python process that the program starts (site/sitecustomize.py reads this file by its path).

Programs look for DeepSpeed in three ways, and all are answered: `import`, `importlib.util.find_spec` and
`importlib.metadata`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from email.message import Message
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["VERSION", "AliasFinder", "Namespace", "install", "installed", "look_up", "uninstall"]

VERSION = "0.19.8+zeropage"
"""What `deepspeed.__version__` and `importlib.metadata.version("deepspeed")` say: the release whose names these are."""

REPLACE = "ZEROPAGE_REPLACE_DEEPSPEED"
"""Environment variable: "1" lets `install` take the place of a DeepSpeed that is installed, "0" forbids it."""

_ROOT = "deepspeed"

# What a library concludes when it is imported and never asks again: the module, and what shows that it found nothing.
_CONCLUSIONS: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "transformers.integrations.deepspeed": lambda names: names["HfDeepSpeedConfig"].__mro__[1] is object,
    "accelerate.accelerator": lambda names: "DeepSpeedEngineWrapper" not in names,
}


def install(*, replace: bool | None = None) -> None:
    """Let `import deepspeed` and everything below it mean zeropage, in this process, from now on. Idempotent.

    To be called before transformers and accelerate are imported: they look for DeepSpeed once, then.

    Args:
        replace: whether to take the place of a real DeepSpeed that is installed too. Default: what the environment
            variable ZEROPAGE_REPLACE_DEEPSPEED says ("1" or "0"), else an error that tells of the choice.

    Raises:
        ConfigError: a real DeepSpeed is imported already, or installed and not to be replaced; or a library has
            looked for DeepSpeed already and found none.
    """
    if installed():
        return
    _refuse_real_modules()
    if not _may_replace(replace):
        _refuse_real_installation()
    _refuse_late_call()
    sys.meta_path.insert(0, AliasFinder())
    importlib.invalidate_caches()


def uninstall() -> None:
    """Undo `install`: forget the finder and the modules that it made. Objects taken from them go on working."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not _is_ours(finder)]
    for name in [name for name, module in sys.modules.items() if isinstance(module, Namespace)]:
        del sys.modules[name]


def installed() -> bool:
    """Whether `install` is in effect."""
    return any(_is_ours(finder) for finder in sys.meta_path)


def look_up(module: str, name: str) -> Any:
    """What the module of DeepSpeed has under this name (see names.py, which knows nothing of this file).

    Raises:
        AttributeError: there is no such name.
    """
    return _names().look_up(module, name, _namespace)


class Namespace(ModuleType):
    """A module named like one of DeepSpeed, whose names are looked up in the table of names when they are asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__version__", "__compatible_ops__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = look_up(self.__name__, name)
        if not isinstance(value, Namespace):
            self.__dict__[name] = value
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_names().public_names(self.__name__)})


class AliasFinder(MetaPathFinder):
    """Finds modules named deepspeed and below, and the distribution named deepspeed."""

    zeropage = VERSION  # tells a finder of ours from others, also one that was read from the file a second time

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _ROOT and not fullname.startswith(f"{_ROOT}."):
            return None
        if fullname != _ROOT and not _names().is_module(fullname):
            return None
        # Packages all, so that any of them may have modules below; __path__ is empty: only this finder finds those.
        return ModuleSpec(fullname, _NamespaceLoader(), origin=str(Path(__file__)), is_package=True)

    def find_distributions(
        self,
        context: DistributionFinder.Context = DistributionFinder.Context(),  # noqa: B008  (as in importlib)
    ) -> Iterable[Distribution]:
        if context.name is None or context.name.lower().replace("_", "-") == _ROOT:
            yield _AliasDistribution()


class _NamespaceLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Namespace(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = f"{module.__name__}, as zeropage provides it."


class _AliasDistribution(Distribution):
    """The metadata of a distribution that lives in memory only."""

    def read_text(self, filename: str) -> str | None:
        if filename == "top_level.txt":
            return _ROOT
        if filename not in ("METADATA", "PKG-INFO"):
            return None
        about = Message()
        about["Metadata-Version"] = "2.1"
        about["Name"] = _ROOT
        about["Version"] = VERSION
        about["Summary"] = "zeropage under the names of DeepSpeed"
        return about.as_string()

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path


def _namespace(name: str) -> ModuleType:
    """The module `name`: the imported one if the alias is installed, else one that hangs below `zeropage.deepspeed`."""
    return importlib.import_module(name) if installed() else Namespace(name)


def _names() -> Any:
    """The table of names; it needs torch, so it is loaded when the first module is asked for."""
    return importlib.import_module("zeropage.deepspeed.names")


def _is_ours(finder: object) -> bool:
    return type(finder).__name__ == AliasFinder.__name__ and "zeropage" in vars(type(finder))


# -- reasons not to


def _refuse_real_modules() -> None:
    module = sys.modules.get(_ROOT)
    if module is not None and not isinstance(module, Namespace):
        raise _config_error(
            f"DeepSpeed itself is imported already ({module.__file__}), and half of each would be neither. Call "
            "zeropage.deepspeed.install() before anything imports deepspeed, or start the program with "
            "`python -m zeropage.deepspeed`."
        )


def _may_replace(replace: bool | None) -> bool:
    return os.environ.get(REPLACE) == "1" if replace is None else replace


def _refuse_real_installation() -> None:
    found = PathFinder.find_spec(_ROOT)
    if found is not None and found.origin is not None:
        raise _config_error(
            f"DeepSpeed itself is installed ({found.origin}). Say which one `import deepspeed` should mean: "
            f"zeropage.deepspeed.install(replace=True), or {REPLACE}=1 in the environment, takes its place in this "
            "process and leaves it installed; without that, use it as it is."
        )


def _refuse_late_call() -> None:
    for name, found_nothing in _CONCLUSIONS.items():
        module = sys.modules.get(name)
        if module is not None and found_nothing(vars(module)):
            raise _config_error(
                f"{name} was imported before and has concluded that there is no DeepSpeed, for good. Call "
                "zeropage.deepspeed.install() before the first import of transformers and accelerate, or start "
                "the program with `python -m zeropage.deepspeed`."
            )


def _config_error(message: str) -> Exception:
    errors = importlib.import_module("zeropage.errors")
    error: Exception = errors.ConfigError(message)
    return error
