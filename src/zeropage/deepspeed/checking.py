"""Holds a configuration against the table of keys: what is refused raises, what nobody knows is warned of once."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from zeropage.deepspeed.keys import KEYS, Treatment, names_in
from zeropage.errors import ConfigError

__all__ = ["check_keys"]


def check_keys(settings: Mapping[str, Any]) -> None:
    """Raise for keys that would change results and cannot be honoured; one warning names all unknown ones.

    Raises:
        ConfigError: names each refused key, its value and what to write instead.
    """
    refused, unknown = [], []
    for path, value in _leaves(settings, ""):
        key = KEYS.get(path)
        if key is None:
            unknown.append(f"{path!r}{_did_you_mean(path)}")
        elif key.treatment is Treatment.REFUSED and not key.is_off(value):
            refused.append(f"config key {path!r} = {value!r} cannot be honoured: {key.note}")
    notes = [f"DeepSpeed does not know the configuration key {key}; it has no effect" for key in unknown]
    if settings.get("bfloat16") is not None:
        used = "it is used" if settings.get("bf16") is None else "'bf16' is there and decides"
        notes.append(f"'bfloat16' is an old name (did you mean 'bf16'?); {used}")
    if notes:
        warnings.warn(". ".join(notes), UserWarning, stacklevel=3)
    if refused:
        raise ConfigError("\n".join(refused))


def _leaves(settings: Mapping[str, Any], section: str) -> Iterator[tuple[str, Any]]:
    """Keys with their paths, as deep as the table goes; flat dotted keys (which TRL writes) that it knows pass."""
    for name, value in settings.items():
        path = f"{section}.{name}" if section else str(name)
        if path == "bfloat16" or (not section and "." in path and path in KEYS):
            continue
        inner = any(known.startswith(f"{path}.") for known in KEYS)
        if not inner or path in KEYS:
            yield path, value
        if inner and isinstance(value, Mapping):
            known = set(names_in(path))
            covered = path in KEYS  # the block as a whole is in the table: names in it that are not are its own affair
            yield from _leaves({k: v for k, v in value.items() if not covered or k in known}, path)


def _did_you_mean(path: str) -> str:
    section, _, name = path.rpartition(".")
    close = difflib.get_close_matches(name, names_in(section), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
