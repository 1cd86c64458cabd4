"""Worker processes that are started once for a test session, and `run`, which gives them a case.

    results = run(2, scenario, 3, flag=True)        # scenario(3, flag=True) on ranks 0 and 1

Every case gets a fresh gloo process group of exactly its world, the environment variables of torchrun, the
same seed and the warning filters of the test. One rule: a case always ends. At its time limit each rank
that is not done writes down its stack, is killed and replaced, and the test fails with `Hang`.
"""

from __future__ import annotations

import functools
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.harness.worker import SIGNAL_FOR_STACKS, Case, Failure, Reply, current_warning_filters

__all__ = ["Failure", "Hang", "Pool", "RankDied", "RankError", "run", "shutdown"]

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 180.0
"""How long a worker may take to import torch."""

LOOK_INTERVAL_S = 0.1
"""How often the pool looks whether a silent worker is still alive."""


@dataclass(frozen=True, slots=True)
class RankDied:
    """What stands in the place of a result when the process of a rank ended."""

    rank: int
    exit_code: int
    output: str

    @property
    def reason(self) -> str:
        """How the process ended, for people."""
        if self.exit_code < 0:
            return f"killed by {signal.Signals(-self.exit_code).name}"
        return f"exited with status {self.exit_code}"


class RankError(Exception):
    """A case failed on some ranks; the message holds the traceback of each of them."""

    def __init__(self, failures: dict[int, Failure | RankDied]) -> None:
        self.failures = failures
        super().__init__("\n".join(map(_describe, failures.values())))


class Hang(Exception):
    """A case was not done at its time limit; the message holds the stacks of the ranks that were not."""

    def __init__(self, limit_s: float, stacks: dict[int, str], done: dict[int, Any]) -> None:
        self.stacks = stacks
        parts = [f"not done after {limit_s:g} s: ranks {sorted(stacks)}; done: ranks {sorted(done)}"]
        parts += [f"--- rank {rank} ---\n{text}" for rank, text in sorted(stacks.items())]
        parts += [_describe(end) for _, end in sorted(done.items()) if isinstance(end, (Failure, RankDied))]
        super().__init__("\n".join(parts))


def run(world: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Call `function(*args, **kwargs)` on ranks 0..world-1 at once; the results in the order of ranks.

    `function` is defined at the top level of a module, since it is sent by name; arguments and results
    are pickled. Three keywords go to the pool (see `Pool.run`) and not to the function: `timeout`,
    `expect_errors` and `process_group`.

    Raises:
        RankError: an exception or the end of the process on a rank, unless `expect_errors`.
        Hang: some ranks were not done within `timeout` seconds.
    """
    return _session_pool().run(world, function, *args, **kwargs)


def shutdown() -> None:
    """End the workers, if any were started."""
    if _session_pool.cache_info().currsize:
        _session_pool().shutdown()
        _session_pool.cache_clear()


@functools.cache
def _session_pool() -> Pool:
    return Pool()


class Pool:
    """The workers, one for each rank that was ever needed. Rank r is always worker r."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="zeropage-tests-")
        self._store = _new_store()
        self._case_number = 0
        self._workers: dict[int, _Worker] = {}

    def run(
        self,
        world: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        expect_errors: bool = False,
        process_group: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """See `run`. With `expect_errors` a `Failure` or `RankDied` stands where no result came back.

        Without `process_group` the variables of torchrun are set and the case starts its own group.
        """
        call = _pickle_call(function, args, kwargs)
        workers = self._team(world)
        self._case_number += 1
        # A case that starts its own group gets a store of its own, so that no key is left over from others.
        store = self._store if process_group else _new_store()
        for rank, worker in enumerate(workers):
            worker.send(
                Case(
                    number=self._case_number,
                    call=call,
                    sys_path=tuple(sys.path),
                    filters=current_warning_filters(),
                    environment=_torchrun_environment(rank, world, store.port),
                    process_group=process_group,
                )
            )
        ends = self._wait_for(workers, timeout)
        failures = {rank: end for rank, end in enumerate(ends) if isinstance(end, (Failure, RankDied))}
        if failures and not expect_errors:
            raise RankError(failures)
        return [pickle.loads(end) if isinstance(end, bytes) else end for end in ends]

    def shutdown(self) -> None:
        """End all workers."""
        for worker in self._workers.values():
            worker.end()
        self._workers.clear()
        self._folder.cleanup()

    def _team(self, world: int) -> list[_Worker]:
        """The first `world` workers, all alive; those that are missing start at the same time."""
        started = []
        for rank in range(world):
            if rank not in self._workers or not self._workers[rank].is_alive():
                self._discard(rank)
                self._workers[rank] = _Worker(rank, Path(self._folder.name))
                started.append(self._workers[rank])
        for worker in started:
            worker.wait_until_ready()
        return [self._workers[rank] for rank in range(world)]

    def _wait_for(self, workers: Sequence[_Worker], limit_s: float) -> list[bytes | Failure | RankDied]:
        deadline = time.monotonic() + limit_s
        ends: dict[int, bytes | Failure | RankDied] = {}
        while len(ends) < len(workers):
            pending = [worker for worker in workers if worker.rank not in ends]
            if time.monotonic() > deadline:
                self._give_up(limit_s, pending, ends)
            wait([worker.pipe for worker in pending], timeout=LOOK_INTERVAL_S)
            for worker in pending:
                end = self._end_of(worker)
                if end is not None:
                    ends[worker.rank] = end
        return [ends[worker.rank] for worker in workers]

    def _end_of(self, worker: _Worker) -> bytes | Failure | RankDied | None:
        """How the case ended on this rank; `None` while it has not."""
        alive = worker.is_alive()  # asked first: a worker may answer and then die
        reply = worker.receive()
        if reply is not None:
            if reply.dirty:
                self._discard(worker.rank)
            return reply.outcome
        if alive:
            return None
        exit_code, output = worker.end(), worker.output()
        self._discard(worker.rank)
        return RankDied(worker.rank, exit_code, output)

    def _give_up(self, limit_s: float, pending: Sequence[_Worker], ends: dict[int, Any]) -> None:
        for worker in pending:
            worker.ask_for_stacks()
        time.sleep(0.5)
        stacks = {worker.rank: worker.stacks() + worker.output() for worker in pending}
        for worker in pending:
            self._discard(worker.rank)
        raise Hang(limit_s, stacks, ends)

    def _discard(self, rank: int) -> None:
        worker = self._workers.pop(rank, None)
        if worker is not None:
            worker.end()


class _Worker:
    """One process and the socket to it. Its output goes to a file, shown when something went wrong."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank = rank
        self._log = folder / f"rank{rank}-{time.monotonic_ns()}.log"
        self._stacks = self._log.with_suffix(".stacks")
        self._case_start = 0
        ours, theirs = socket.socketpair()
        with open(self._log, "wb") as log, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(self._stacks)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=_worker_environment(),
            )
        self.pipe = Connection(ours.detach())

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not self.pipe.poll(LOOK_INTERVAL_S):
            if not self.is_alive() or time.monotonic() > deadline:
                self.end()
                raise RuntimeError(f"worker {self.rank} did not start:\n{self.output()}")
        try:
            self.pipe.recv_bytes()
        except EOFError:
            self.end()
            raise RuntimeError(f"worker {self.rank} did not start:\n{self.output()}") from None

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, case: Case) -> None:
        self._case_start = self._log.stat().st_size
        self.pipe.send_bytes(pickle.dumps(case))

    def receive(self) -> Reply | None:
        """The reply, if it is there."""
        try:
            if self.pipe.poll():
                reply = pickle.loads(self.pipe.recv_bytes())
                assert isinstance(reply, Reply)
                return reply
        except (EOFError, OSError):
            self._process.wait(START_LIMIT_S)  # it closed its end: it is about to be gone
        return None

    def output(self) -> str:
        """What the process printed since the case began."""
        with open(self._log, errors="replace") as log:
            log.seek(self._case_start)
            text = log.read()
        return f"output of rank {self.rank}:\n{text}" if text else ""

    def ask_for_stacks(self) -> None:
        self._process.send_signal(SIGNAL_FOR_STACKS)

    def stacks(self) -> str:
        return self._stacks.read_text(errors="replace")

    def end(self) -> int:
        """Kill the process if it is alive; its exit code."""
        self._process.kill()
        self.pipe.close()
        return self._process.wait()


_PROGRAM = "import sys; from tests.harness.worker import main; main(int(sys.argv[1]), sys.argv[2])"


def _worker_environment() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, sys.path)]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _pickle_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((function, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"{error}. Cases run in other processes: define functions and classes at the top level of the "
            "test module, and use functools.partial in place of a lambda."
        ) from error


def _new_store() -> dist.TCPStore:
    """Like torchrun, the pool hosts the store on a port that the system picks: no port is guessed."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _torchrun_environment(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _describe(end: Failure | RankDied) -> str:
    if isinstance(end, RankDied):
        return f"--- rank {end.rank} {end.reason} ---\n{end.output}"
    return f"--- rank {end.rank} raised {end.type} ---\n{end.traceback}"
