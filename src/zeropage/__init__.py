"""zeropage: ZeRO-3 training on demand-paged parameters.

Parameters, gradients and optimizer states are cut over the ranks; an operator that touches a parameter
faults it in. `help(zeropage.Engine)` is a place to start, docs/concepts.md explains.
"""

from zeropage import errors
from zeropage.checkpoint import LoadResult
from zeropage.config import Config
from zeropage.construct import init, shard
from zeropage.edit import full, gather, is_paged, local, resident
from zeropage.engine import Engine
from zeropage.estimate import estimate_memory
from zeropage.reports import MemoryReport, StepResult
from zeropage.tensor import PagedTensor
from zeropage.weights import LoadedWeights, export, load_safetensors

__version__ = "0.1.0"

__all__ = [
    "Config",
    "Engine",
    "LoadResult",
    "LoadedWeights",
    "MemoryReport",
    "PagedTensor",
    "StepResult",
    "errors",
    "estimate_memory",
    "export",
    "full",
    "gather",
    "init",
    "is_paged",
    "load_safetensors",
    "local",
    "resident",
    "shard",
]
