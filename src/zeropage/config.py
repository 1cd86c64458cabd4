"""The settings, as frozen pydantic models: `Config` and its two sections.

One rule: a setting either takes effect or raises. An unknown key, a value of the wrong type (nothing is
coerced: "yes" is no boolean, "3" no number) and a setting that another one makes pointless are all a
`ConfigError` that names the key, before anything was built. pydantic's own error never leaves this file.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from zeropage.errors import ConfigError

__all__ = ["Config", "LossScaleConfig", "OffloadConfig", "OffloadTarget", "Precision", "TransportName"]

MIB = 1 << 20

Precision = Literal["fp32", "bf16", "fp16"]
OffloadTarget = Literal["none", "host", "disk"]
TransportName = Literal["auto", "shared", "collective", "local"]


class _Section(BaseModel):
    """What all sections share: frozen, strict, no unknown keys, `ConfigError` instead of pydantic's own."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    if not TYPE_CHECKING:  # type checkers see the keyword arguments that pydantic declares

        def __init__(self, **settings: Any) -> None:
            try:
                self.__pydantic_validator__.validate_python(settings, self_instance=self)
            except ValidationError as error:
                raise _as_config_error(type(self), error) from None

        # pydantic calls an overridden `__init__` for nested sections too, and would lose the key path.
        # Its own mark for an `__init__` that only validates keeps nested sections on the direct way.
        __init__.__pydantic_base_init__ = True


class LossScaleConfig(_Section):
    """How the loss is scaled while training in fp16."""

    dynamic: bool = True
    """Whether the scale follows the overflows seen; if false it stays at `initial`."""

    initial: PositiveFloat = 65536.0
    """The scale of the first step (a factor)."""

    window: PositiveInt = 1000
    """How many steps in a row without an overflow double the scale."""

    hysteresis: PositiveInt = 2
    """The overflow, counted since the last full clean window, from which on each one halves the scale."""

    min: PositiveFloat = 1.0
    """The scale never falls below this factor."""

    @model_validator(mode="after")
    def _check_effect(self) -> LossScaleConfig:
        if not self.dynamic:
            idle = sorted({"window", "hysteresis", "min"} & self.model_fields_set)
            if idle:
                raise ValueError(f"{_and(idle)} cannot take effect with dynamic=false; remove it or set dynamic=true")
        elif self.min > self.initial:
            raise ValueError(f"min ({self.min:g}) is greater than initial ({self.initial:g})")
        return self


class OffloadConfig(_Section):
    """Where shards live that there is no room for. On a CUDA device "host" takes effect for both at once: slices, sums
    of gradients, masters and states lie in host memory together, and the optimizer steps there. On a CPU everything
    is there already; other devices have no such way, and say so."""

    parameters: OffloadTarget = "none"
    """Where the parameter shards live: "none" is on the device of the parameter, "disk" in files of `folder`."""

    optimizer: OffloadTarget = "none"
    """Where fp32 masters and optimizer states live; with "disk" an engine streams them through memory at each step."""

    folder: Path | None = Field(default=None, strict=False)
    """The folder for what is offloaded to disk; each rank of each job makes a subfolder of its own, and removes it."""

    buffer_bytes: PositiveInt = 64 * MIB
    """How many bytes of memory a rank takes to read ahead from the disk and to write behind."""

    @model_validator(mode="after")
    def _check_effect(self) -> OffloadConfig:
        if "disk" in (self.parameters, self.optimizer):
            if self.folder is None:
                raise ValueError("offloading to 'disk' needs a folder; name one with offload.folder")
            return self
        idle = sorted({"folder", "buffer_bytes"} & self.model_fields_set)
        if idle:
            raise ValueError(
                f"{_and(idle)} cannot take effect: it does only where parameters or optimizer are offloaded to 'disk'; "
                "remove it"
            )
        return self


class Config(_Section):
    """All settings of zeropage; `Config.of` also makes one from a dict or a JSON file."""

    precision: Precision | None = None
    """The dtype that trainable parameters are cast to; absent keeps the dtype of each one."""

    cast_frozen: Literal[False, True, "wide"] = False
    """Whether `precision` casts frozen parameters too; "wide" casts those of 32 and 64 bits only, and keeps no exact
    values for them. Buffers are never cast."""

    loss_scale: LossScaleConfig = LossScaleConfig()
    """How the loss is scaled; takes effect with precision "fp16" only."""

    clip_grad_norm: PositiveFloat | None = None
    """The global 2-norm that averaged gradients are scaled down to; absent never clips."""

    accumulate: PositiveInt = 1
    """How many micro-batches make one optimizer step."""

    reduce_dtype: Precision = "fp32"
    """The dtype in which gradients are summed over ranks and micro-batches."""

    resident_bytes: NonNegativeInt | None = None
    """How many bytes of gathered parameters may stay on a rank; absent is twice the largest bucket."""

    bucket_bytes: PositiveInt = 16 * MIB
    """How many bytes of pages or gradients one message carries, at most, unless one page alone is larger."""

    readahead: bool = True
    """Whether pages that the last steps predict are gathered before they are asked for."""

    offload: OffloadConfig = OffloadConfig()
    """Where shards live that there is no room for. On a CUDA device "host" takes effect for both at once: slices, sums
    of gradients, masters and states lie in host memory together, and the optimizer steps there. On a CPU everything
    is there already; other devices have no such way, and say so."""

    transport: TransportName = "auto"
    """How ranks exchange slices: "auto" is "local" for one rank, "shared" for ranks on one host with
    parameters on CPU, and "collective" otherwise."""

    timeout_s: PositiveFloat = 600.0
    """How many seconds a rank waits for another one before it raises."""

    deterministic: bool = True
    """Whether gradients are added in the order of ranks, so that two runs give the same bits."""

    skip_nonfinite: bool = False
    """Whether a step whose gradient is not finite is skipped in bf16 and fp32 too; fp16 always skips it."""

    seed: int | None = None
    """The seed set on every rank when parameters are made; absent leaves the generators of torch alone."""

    poison_frames: bool = False
    """Debug mode: freed frames are overwritten, so that a stale read shows."""

    @model_validator(mode="after")
    def _check_effect(self) -> Config:
        if "loss_scale" in self.model_fields_set and self.precision != "fp16":
            raise ValueError(
                f"loss_scale takes effect only with precision='fp16', and precision is {self.precision!r}; "
                "remove loss_scale or set precision='fp16'"
            )
        if self.cast_frozen and self.precision is None:
            raise ValueError("cast_frozen cannot take effect without precision; name the precision to cast to")
        return self

    @classmethod
    def of(cls, value: Config | Mapping[str, Any] | str | Path | None) -> Config:
        """The config that `value` means: itself, a mapping, a path to a JSON file, or the defaults.

        Raises:
            ConfigError: the file cannot be read, or a setting is unknown, wrong or without effect.
        """
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if isinstance(value, (str, Path)):
            return cls._from_file(Path(value))
        if isinstance(value, Mapping):
            return cls._from_mapping(value)
        raise ConfigError(
            f"config: expected a zp.Config, a mapping, a path to a JSON file or None, got {type(value).__name__}"
        )

    @classmethod
    def _from_mapping(cls, settings: Mapping[str, Any]) -> Config:
        try:
            return cls.model_validate(dict(settings))
        except ValidationError as error:
            raise _as_config_error(cls, error) from None

    @classmethod
    def _from_file(cls, path: Path) -> Config:
        try:
            settings = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique_keys)
        except OSError as error:
            raise ConfigError(f"config file {path}: {error.strerror or error}") from error
        except ValueError as error:
            raise ConfigError(f"config file {path}: not valid JSON ({error})") from error
        if not isinstance(settings, dict):
            raise ConfigError(f"config file {path}: expected a JSON object, got {type(settings).__name__}")
        try:
            return cls._from_mapping(settings)
        except ConfigError as error:
            raise ConfigError(f"config file {path}: {error}") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for key, value in pairs:
        if key in settings:
            raise ValueError(f"key {key!r} is given twice")
        settings[key] = value
    return settings


def _as_config_error(section: type[BaseModel], error: ValidationError) -> ConfigError:
    """All the problems that pydantic found, one a line, each with its key path and what to write."""
    return ConfigError("\n".join(_explain(section, details) for details in error.errors()))


def _explain(section: type[BaseModel], details: ErrorDetails) -> str:
    path = ".".join(str(part) for part in details["loc"])
    where = f"config key {path!r}" if path else "config"
    if details["type"] == "extra_forbidden":
        return f"{where}: unknown key{_did_you_mean(section, details['loc'])}"
    message = details["msg"].removeprefix("Value error, ")
    if details["type"] == "value_error":
        return f"{where}: {message}"
    return f"{where}: {message[0].lower()}{message[1:]}, got {details['input']!r}"


def _did_you_mean(section: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    """A hint at the nearest key of the section that `loc` points into."""
    *parents, wrong = loc
    for parent in parents:
        annotation = section.model_fields[str(parent)].annotation
        assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
        section = annotation
    close = difflib.get_close_matches(str(wrong), section.model_fields, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known keys are {', '.join(sorted(section.model_fields))}"


def _and(keys: Iterable[str]) -> str:
    return " and ".join(keys)
