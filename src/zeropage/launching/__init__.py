"""`zeropage run`: starts a program on several ranks, by torchrun's own means."""

from zeropage.launching.run import main

__all__ = ["main"]
