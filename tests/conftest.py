"""What every test session needs: one thread a process, so that sums have one order, and the workers' end."""

from collections.abc import Iterator

import pytest
import torch

from tests.harness import shutdown


@pytest.fixture(scope="session", autouse=True)
def _workers() -> Iterator[None]:
    """Workers are started by the first test that calls `run`, and ended with the session."""
    torch.set_num_threads(1)
    yield
    shutdown()
