"""How `from_pretrained(ignore_mismatched_sizes=True)` keeps its word while `HfDeepSpeedConfig` says ZeRO-3.

[Note: transformers and mismatched sizes] transformers has a loader of its own for ZeRO-3, which knows nothing of
`ignore_mismatched_sizes`: rank 0 raises the error that recommends the flag, though it was given, and the other ranks
go on. It takes that loader if the configuration object, which it reaches by a weak reference, answers yes to
`is_zero3()`. Its ordinary loader honours the flag, and is right for a sharded model too: each weight that it sets is
paged as it is set. So transformers is handed, by its own setter, a view of the configuration object, which answers no
to that one function when the flag is given, and is the object itself in all else. Nothing is replaced in transformers.

Looked at and left, since each does more, or less. The flag is in a local variable of the loader and nowhere else, so
who asks has to be looked at; counting the questions after `zero.Init` would break with the next one that transformers
adds. An `is_zero3` set on the configuration object itself goes along when TRL copies the arguments, and keeps the
object alive in a cycle, while transformers relies on its end. transformers hands `zero.Init` the dict of the
configuration and not the object, so that this is read where `set_hf_deepspeed_config` has put it. Inside the loader
of ZeRO-3, mismatches could be left aside only for everybody, with the flag or without. If a release moves these
names, the flag has no effect again, and rank 0 raises as it did: tests/integrations/test_third_report.py would tell.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

__all__ = ["keep_loading_flags"]

_LOADER = "_load_pretrained_model"


class _View:
    """What transformers sees of a configuration object. Lives as long as that one does."""

    def __init__(self, config: Any) -> None:
        self._viewed = weakref.ref(config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._viewed(), name)

    def is_zero3(self) -> bool:
        config = self._viewed()
        asked_by = sys._getframe(2)  # over transformers' is_deepspeed_zero3_enabled
        return config is not None and bool(config.is_zero3()) and not _ignores_mismatches(asked_by)


def keep_loading_flags() -> None:
    """To be called when transformers begins to make a sharded model; harmless otherwise, and when called again."""
    module = sys.modules.get("transformers.integrations.deepspeed")
    reference = None if module is None else module._hf_deepspeed_config_weak_ref
    config = None if reference is None else reference()
    if module is None or config is None or isinstance(config, _View):
        return
    view = _View(config)
    weakref.finalize(config, _let_go, view).atexit = False  # holds the view until then
    module.set_hf_deepspeed_config(view)


def _ignores_mismatches(frame: FrameType) -> bool:
    """Whether this is the loader, told to leave aside what does not fit."""
    if frame.f_code.co_name != _LOADER:
        return False
    settings = frame.f_locals.get("load_config")
    return settings is not None and bool(settings.ignore_mismatched_sizes)


def _let_go(view: _View) -> None:
    """The view goes with the object that it shows."""
