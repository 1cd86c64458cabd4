"""DeepSpeed's launcher, by the name that programs call it by, and constants that libraries read of it."""

import importlib
import os
import sys
from collections.abc import Sequence

from zeropage.errors import ConfigError

__all__ = ["DEFAULT_PORT", "ENVIRONMENT_FILE", "MIN_SWAPPABLE_BYTES", "main"]

DEFAULT_PORT = 29500
"""Where ranks meet if nothing else is said."""

ENVIRONMENT_FILE = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
"""The file that Accelerate writes environment variables for other hosts into."""

MIN_SWAPPABLE_BYTES = 1024 * 1024
"""Below this, DeepSpeed does not move a tensor to disk."""


def main(args: Sequence[str] | None = None) -> None:
    """`deepspeed ARGUMENTS`: `zeropage run --deepspeed ARGUMENTS`. Default: the arguments of this process."""
    launching = importlib.import_module("zeropage.launching")  # stands above this package
    try:
        launching.main(["--deepspeed", *(sys.argv[1:] if args is None else args)])
    except ConfigError as error:
        sys.exit(f"zeropage: {error}")
