"""Names of DeepSpeed that libraries import at the start and that have no counterpart here."""

from __future__ import annotations

from typing import Any

from zeropage.errors import UnsupportedOperationError

__all__ = ["stand_in"]


def stand_in(name: str, reason: str) -> type:
    """A class under that name which can be imported, subclassed and asked `isinstance`, and raises when it is called.

    Functions get one too: a call is what makes the difference.
    """

    def refuse(cls: type, *arguments: Any, **options: Any) -> Any:
        raise UnsupportedOperationError(f"{name} has no counterpart in zeropage: {reason}")

    module, _, short = name.rpartition(".")
    return type(short, (), {"__new__": refuse, "__module__": module, "__doc__": f"Out of scope: {reason}"})
