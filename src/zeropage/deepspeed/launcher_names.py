"""Constants that libraries read from DeepSpeed's launcher and runtime."""

import os

__all__ = ["DEFAULT_PORT", "ENVIRONMENT_FILE", "MIN_SWAPPABLE_BYTES"]

DEFAULT_PORT = 29500
"""Where ranks meet if nothing else is said."""

ENVIRONMENT_FILE = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
"""The file that Accelerate writes environment variables for other hosts into."""

MIN_SWAPPABLE_BYTES = 1024 * 1024
"""Below this, DeepSpeed does not move a tensor to disk."""
