"""All ranks go on, or none does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from zeropage.errors import CheckpointError
from zeropage.transport import Transport

__all__ = ["one_verdict", "raise_together"]


@contextmanager
def one_verdict(transport: Transport, what: str) -> Iterator[None]:
    """If the body raises on any rank, raise CheckpointError on all of them (collective).

    The body makes no collective call itself.
    """
    problem = ""
    try:
        yield
    except CheckpointException as error:  # torch's own, which is no Exception
        problem = "; ".join(dict.fromkeys(_told(failure[0]) for failure in error.failures.values()))
    except Exception as error:
        problem = _told(error)
    raise_together(transport, what, problem)


def _told(error: BaseException) -> str:
    return str(error) or type(error).__name__


def raise_together(transport: Transport, what: str, problem: str) -> None:
    """Raise CheckpointError on all ranks if any has a problem (collective); "" is none."""
    answers = transport.meet(what, problem.encode()[:4000])
    told = [(rank, answer.decode(errors="replace")) for rank, answer in enumerate(answers) if answer]
    if told:
        rank, text = told[0]
        raise CheckpointError(text if len(told) == len(answers) else f"rank {rank}: {text}")
