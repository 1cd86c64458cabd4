"""Every error that zeropage raises on purpose.

    ZeropageError
     x ConfigError                      (ValueError)
     |  x TransportUnavailableError
     x OutOfMemoryError                 (MemoryError)
     x DivergenceError                  (RuntimeError)
     x PeerLostError                    (RuntimeError)
     |  x PeerTimeoutError              (TimeoutError)
     x PageError                        (RuntimeError)
     |  x UninitializedPageError
     |  x StaleValueError
     |  x UnsupportedOperationError     (NotImplementedError)
     x AdoptionError                    (RuntimeError)
     x GradientError                    (RuntimeError)
     x NonFiniteError                   (ArithmeticError)
     x CheckpointError                  (RuntimeError)
     x OffloadError                     (OSError)

`except zp.errors.ZeropageError` catches all of them; the built-in class in brackets lets code that
knows nothing of zeropage catch the kind of failure that it expects. A message says what happened, to
which parameter and module, on which ranks, and what to write instead.
"""

__all__ = [
    "AdoptionError",
    "CheckpointError",
    "ConfigError",
    "DivergenceError",
    "GradientError",
    "NonFiniteError",
    "OffloadError",
    "OutOfMemoryError",
    "PageError",
    "PeerLostError",
    "PeerTimeoutError",
    "StaleValueError",
    "TransportUnavailableError",
    "UninitializedPageError",
    "UnsupportedOperationError",
    "ZeropageError",
]


class ZeropageError(Exception):
    """Base of every error that zeropage raises on purpose."""


class ConfigError(ZeropageError, ValueError):
    """A setting is unknown, has a wrong value, or cannot take effect."""


class TransportUnavailableError(ConfigError):
    """The transport that was asked for cannot run on these ranks, hosts or devices."""


class OutOfMemoryError(ZeropageError, MemoryError):
    """The memory that is needed was compared with the memory available, and it does not fit."""


class DivergenceError(ZeropageError, RuntimeError):
    """Ranks asked for different collective things, which this transport cannot serve."""


class PeerLostError(ZeropageError, RuntimeError):
    """Another rank died, raised or left while this one needed it."""


class PeerTimeoutError(PeerLostError, TimeoutError):
    """Another rank did not answer within `timeout_s`."""


class PageError(ZeropageError, RuntimeError):
    """A paged tensor was used in a way that its page cannot serve."""


class UninitializedPageError(PageError):
    """A page was read before anything was ever written to it."""


class StaleValueError(PageError):
    """A lazy cast or view was read after the page under it had changed."""


class UnsupportedOperationError(PageError, NotImplementedError):
    """An operation has no meaning for a paged tensor; the message says what to write instead."""


class AdoptionError(ZeropageError, RuntimeError):
    """A parameter could not be turned into a page."""


class GradientError(ZeropageError, RuntimeError):
    """A gradient could not be accumulated, reduced or handed out."""


class NonFiniteError(ZeropageError, ArithmeticError):
    """A loss or a gradient is infinite or not a number, and skipping the step cannot help."""


class CheckpointError(ZeropageError, RuntimeError):
    """A checkpoint is missing, incomplete or does not fit the model that should load it."""


class OffloadError(ZeropageError, OSError):
    """What is offloaded to disk could not be kept there or read back; names the file and the bytes."""
