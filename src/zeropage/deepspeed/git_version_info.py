"""`deepspeed.git_version_info`: what this is built on."""

from __future__ import annotations

import torch

from zeropage.deepspeed.alias import VERSION

__all__ = ["accelerator_name", "compatible_ops", "git_branch", "git_hash", "installed_ops", "torch_info", "version"]

version = VERSION
git_hash = "unknown"
git_branch = "unknown"
installed_ops: dict[str, bool] = {}
compatible_ops: dict[str, bool] = {}
accelerator_name = "cuda" if torch.version.cuda else "cpu"


def _major_minor(text: str | None) -> str:
    return ".".join((text or "0.0").split("+")[0].split(".")[:2])


torch_info = {
    "version": _major_minor(torch.__version__),
    "cuda_version": _major_minor(torch.version.cuda),
    "nccl_version": "0.0",
    "hip_version": _major_minor(torch.version.hip),
    "bf16_support": True,
}
