"""`deepspeed.ops.op_builder`: DeepSpeed compiles kernels of its own; here every operator is torch's.

Programs ask a builder for its NAME and whether it is compatible, and then leave out what needs the kernel.
"""

from __future__ import annotations

from typing import Any

from zeropage.errors import UnsupportedOperationError

__all__ = [
    "COMPATIBLE_OPS",
    "AsyncIOBuilder",
    "CPUAdagradBuilder",
    "CPUAdamBuilder",
    "CPULionBuilder",
    "FusedAdamBuilder",
    "FusedLambBuilder",
    "FusedLionBuilder",
    "GDSBuilder",
    "InferenceBuilder",
    "TransformerBuilder",
    "UtilsBuilder",
]


class Builder:
    """One of DeepSpeed's kernels. `here` tells whether what it is for can be had, by torch's own operators."""

    NAME = ""
    here = False

    def is_compatible(self, verbose: bool = False) -> bool:
        return self.here

    def load(self, verbose: bool = False) -> Any:
        raise UnsupportedOperationError(
            f"there is no kernel {self.NAME!r} to load: zeropage runs torch's own operators. Use the optimizer or "
            "layer by its name instead of loading its kernel."
        )


class CPUAdamBuilder(Builder):
    NAME, here = "cpu_adam", True


class CPUAdagradBuilder(Builder):
    NAME, here = "cpu_adagrad", True


class CPULionBuilder(Builder):
    NAME, here = "cpu_lion", True


class FusedAdamBuilder(Builder):
    NAME, here = "fused_adam", True


class FusedLionBuilder(Builder):
    NAME, here = "fused_lion", True


class UtilsBuilder(Builder):
    NAME, here = "utils", True


class FusedLambBuilder(Builder):
    NAME = "fused_lamb"


class AsyncIOBuilder(Builder):
    NAME = "async_io"


class GDSBuilder(Builder):
    NAME = "gds"


class TransformerBuilder(Builder):
    NAME = "transformer"


class InferenceBuilder(Builder):
    NAME = "transformer_inference"


COMPATIBLE_OPS = {
    **{builder.NAME: builder.here for builder in Builder.__subclasses__()},
    "deepspeed_not_implemented": False,
}
