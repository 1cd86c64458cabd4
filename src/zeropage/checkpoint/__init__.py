"""Saving and loading an engine, in the format of `torch.distributed.checkpoint`."""

from zeropage.checkpoint.elastic import LoadResult, Stateful, begin_save, end_save, load_checkpoint
from zeropage.checkpoint.inspect import inspect, render
from zeropage.checkpoint.saving import Save

__all__ = ["LoadResult", "Save", "Stateful", "begin_save", "end_save", "inspect", "load_checkpoint", "render"]
