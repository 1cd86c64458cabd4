"""Saving and loading an engine, in the format of `torch.distributed.checkpoint`; reading what DeepSpeed has saved."""

from zeropage.checkpoint.contents import Stateful
from zeropage.checkpoint.deepspeed import Converted, convert_deepspeed, opened
from zeropage.checkpoint.inspect import inspect, render
from zeropage.checkpoint.loading import LoadResult, load_checkpoint
from zeropage.checkpoint.saving import Save, begin_save, end_save

__all__ = [
    "Converted", "LoadResult", "Save", "Stateful", "begin_save", "convert_deepspeed", "end_save", "inspect",
    "load_checkpoint", "opened", "render",
]  # fmt: skip
