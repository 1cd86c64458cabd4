"""Where a DeepSpeed configuration comes from: a dict, a path to JSON with comments, or base64 of JSON.

Everything ends as one plain dict; a key that is given twice in one object is an error, since one of the two
values would be lost without a word.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeropage.errors import ConfigError

__all__ = ["load_config", "parse_json"]

# A string, or one of the three kinds of comment, or a comma before a closing bracket.
_PIECE = re.compile(
    r'"(?:\\.|[^"\\])*"|//[^\n]*|(?:(?<=\s)|^)\#[^\n]*|/\*.*?\*/|,(?=(?:\s|//[^\n]*|/\*.*?\*/)*[}\]])',
    re.DOTALL | re.MULTILINE,
)


def load_config(config: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """`config` as a dict: itself copied, the JSON file that it names, or the JSON that it encodes in base64.

    Raises:
        ConfigError: no such file and no base64; not JSON; a key given twice.
    """
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, (str, Path)):
        raise ConfigError(
            "expected a DeepSpeed configuration as a dict, a path to a JSON file or base64 of JSON, "
            f"got {type(config).__name__}"
        )
    path = Path(config)
    if _is_file(path):
        return parse_json(path.read_text(encoding="utf-8"), f"DeepSpeed config file {path}")
    return parse_json(_from_base64(str(config)), "DeepSpeed config in base64")


def parse_json(text: str, origin: str) -> dict[str, Any]:
    """The object in `text`: JSON with `//`, `#` and `/* */` comments and trailing commas. `origin` names it."""
    try:
        value = json.loads(_PIECE.sub(_keep_strings, text), object_pairs_hook=_unique_keys)
    except ValueError as error:
        raise ConfigError(f"{origin}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{origin}: expected a JSON object, got {type(value).__name__}")
    return value


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # base64 of a long text is no name that a file could have
        return False


def _from_base64(text: str) -> str:
    try:
        return base64.urlsafe_b64decode(text).decode("utf-8")
    except (binascii.Error, UnicodeError, ValueError) as error:
        raise ConfigError(
            f"{text!r} is neither a path to an existing DeepSpeed config file nor base64 of one"
        ) from error


def _keep_strings(piece: re.Match[str]) -> str:
    found = piece.group()
    return found if found.startswith('"') else "\n" * found.count("\n")  # line numbers in errors stay true


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    settings = dict(pairs)
    if len(settings) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"duplicate keys: {sorted({key for key in keys if keys.count(key) > 1})}")
    return settings
