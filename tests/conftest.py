"""What every test session needs: one thread a process, so that sums have one order, and the workers' end."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.harness import shutdown


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is tried on two ranks and on more is slow on more: two cores have to share them."""
    for item in items:
        if (
            isinstance(item, pytest.Function)
            and "callspec" in item.__dict__
            and item.callspec.params.get("world", 0) > 2
        ):
            item.add_marker("slow")


@pytest.fixture(scope="session", autouse=True)
def _workers() -> Iterator[None]:
    """Workers are started by the first test that calls `run`, and ended with the session."""
    torch.set_num_threads(1)
    yield
    shutdown()


@pytest.fixture(autouse=True)
def _leaves_the_process_as_it_was() -> Iterator[None]:
    """A process group or another number of threads would meet the tests that come after, hundreds of them."""
    before = dist.is_initialized(), torch.get_num_threads()
    yield
    assert (dist.is_initialized(), torch.get_num_threads()) == before, "process group, number of threads"
