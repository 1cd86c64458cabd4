"""All ranks go on, or none does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from zeropage.errors import CheckpointError
from zeropage.transport import Transport

__all__ = ["one_verdict", "raise_together", "told"]


@contextmanager
def one_verdict(transport: Transport, what: str) -> Iterator[None]:
    """If the body raises on any rank, raise CheckpointError on all of them (collective).

    The body makes no collective call itself.
    """
    problem = ""
    try:
        yield
    except (Exception, CheckpointException) as error:
        problem = told(error)
    raise_together(transport, what, problem)


def told(error: BaseException) -> str:
    """What went wrong. torch's `CheckpointException`, which is no Exception, tells it by rank, with stacks."""
    failures = error.failures.values() if isinstance(error, CheckpointException) else [(error,)]
    return "; ".join(dict.fromkeys(str(failure[0]) or type(failure[0]).__name__ for failure in failures))


def raise_together(transport: Transport, what: str, problem: str) -> None:
    """Raise CheckpointError on all ranks if any has a problem (collective); "" is none."""
    answers = transport.meet(what, problem.encode()[:4000])
    told = [(rank, answer.decode(errors="replace")) for rank, answer in enumerate(answers) if answer]
    if told:
        rank, text = told[0]
        raise CheckpointError(text if len(told) == len(answers) else f"rank {rank}: {text}")
