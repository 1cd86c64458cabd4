"""The three batch sizes of a DeepSpeed configuration: two of them give the third.

    train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks

The rules are those of DeepSpeed (`DeepSpeedConfig._set_batch_related_parameters`): nothing is rounded in silence,
a product that does not fit is an error that shows all the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zeropage.errors import ConfigError

__all__ = ["BatchSizes"]

_TRAIN, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Samples of a step on all ranks, samples of a micro-batch on one rank, and micro-batches of a step."""

    train: int
    micro: int
    steps: int

    @staticmethod
    def of(settings: Mapping[str, Any], world: int) -> BatchSizes:
        """The sizes that `settings` give on `world` ranks.

        Raises:
            ConfigError: neither batch size is given, one is not a positive whole number, or they do not multiply.
        """
        train, micro, steps = (_number(settings, key) for key in (_TRAIN, _MICRO, _STEPS))
        if train is None and micro is None:
            raise ConfigError(
                f"config needs {_TRAIN!r} or {_MICRO!r}: with {_STEPS!r} and the ranks they give the rest"
            )
        if train is None:
            assert micro is not None
            steps = steps or 1
            return BatchSizes(micro * steps * world, micro, steps)
        if micro is None:
            steps = steps or 1
            micro = train // world // steps
        elif steps is None:
            steps = train // micro // world
        if train != micro * steps * world or not micro or not steps:
            raise ConfigError(
                f"{_TRAIN} is not equal to {_MICRO} * {_STEPS} * ranks: {train} != {micro} * {steps} * {world}. "
                "Change one of the three, or leave one out and it follows from the others."
            )
        return BatchSizes(train, micro, steps)


def _number(settings: Mapping[str, Any], key: str) -> int | None:
    value = settings.get(key)
    if value is None:
        return None
    if value == "auto":
        raise ConfigError(
            f"config key {key!r} is 'auto': only the Hugging Face Trainer and Accelerate put a number there, before "
            "they start the engine. Write the number."
        )
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < 1:
        raise ConfigError(f"config key {key!r} must be a positive whole number, got {value!r}")
    return int(value)
