"""The inside of a worker process: it waits for cases, runs each in a fresh world, and cleans up after it.

One rule: a case sees nothing of the case before. Whatever cannot be cleaned (a thread that goes on, a
process group that does not close) makes the worker say that it is dirty, and the pool replaces it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import os
import pickle
import random
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy
import torch
import torch.distributed as dist

THREAD_GRACE_S = 2.0
"""How long threads of a case may take to end after it."""

GROUP_TIMEOUT = timedelta(seconds=15)
"""How long a collective waits for a peer."""

SEED = 0

SIGNAL_FOR_STACKS = signal.SIGUSR1


@dataclass(frozen=True, slots=True)
class WarningFilter:
    """One entry of `warnings.filters`, with patterns as text."""

    action: str
    message: str
    category: type[Warning]
    module: str
    line: int


@dataclass(frozen=True, slots=True)
class Case:
    """All that one rank needs to know to take part in one case."""

    number: int
    call: bytes
    """The pickled (function, args, kwargs); unpickled only after `sys_path` is in place."""

    sys_path: tuple[str, ...]
    filters: tuple[WarningFilter, ...]
    environment: dict[str, str]
    """What torchrun would set: the rank, the world and the address of the store."""

    process_group: bool

    @property
    def rank(self) -> int:
        return int(self.environment["RANK"])


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that ended a case on one rank."""

    rank: int
    type: str
    message: str
    traceback: str
    bases: tuple[str, ...]
    """The names of all classes that the exception is an instance of."""

    def is_a(self, name: str) -> bool:
        """Whether the exception is an instance of the class called `name`."""
        return name in self.bases


@dataclass(frozen=True, slots=True)
class Reply:
    """What a rank sends back: the pickled result or a `Failure`, and whether it should be replaced."""

    outcome: bytes | Failure
    dirty: bool


class LeftoverError(Exception):
    """A case ended well, but an exception was lost in a thread, a `__del__` or a callback."""


def main(fd: int, stacks: str) -> None:
    """Serve cases that come through the socket `fd` until it is closed."""
    _die_with_parent()
    faulthandler.enable()
    with open(stacks, "w") as file, Connection(fd) as pool:
        torch.set_num_threads(1)
        with contextlib.suppress(ImportError):
            import zeropage  # noqa: F401  imported once, so that no case pays for it
        with contextlib.suppress(ImportError):
            import tqdm

            tqdm.tqdm.monitor_interval = 0  # its monitor is a thread that outlives every bar
        _exempt_modules_from_gc()
        pool.send_bytes(b"ready")
        while True:
            try:
                case = pickle.loads(pool.recv_bytes())
            except EOFError:
                return
            faulthandler.unregister(SIGNAL_FOR_STACKS)  # the case before may have taken the signal: Lightning does
            faulthandler.register(SIGNAL_FOR_STACKS, file=file, all_threads=True)
            pool.send_bytes(pickle.dumps(serve(case)))


def serve(case: Case) -> Reply:
    """Run one case and clean up, whatever happened in it."""
    threads, environment, folder = set(threading.enumerate()), dict(os.environ), os.getcwd()
    outcome: bytes | Failure
    try:
        with _warning_filters(case.filters), _lost_exceptions() as lost:
            try:
                outcome = _run(case)
            finally:
                group_closed = _close_process_group()
                gc.collect()
        if lost:
            raise LeftoverError("\n".join(lost))
    except BaseException as error:  # also SystemExit: the worker lives on
        outcome = _failure(case.rank, error)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    _reset_torch()
    gc.collect()
    return Reply(outcome, dirty=not (group_closed and _join(threads)))


def _run(case: Case) -> bytes:
    sys.path[:] = case.sys_path
    os.environ.update(case.environment)
    _seed(SEED)
    if case.process_group:
        _open_process_group(case)
    loaded = len(sys.modules)
    function, args, kwargs = pickle.loads(case.call)
    if len(sys.modules) > loaded:
        _exempt_modules_from_gc()
    return pickle.dumps(function(*args, **kwargs))


def _exempt_modules_from_gc() -> None:
    """A collection after each case looks at what the case made, not at all of torch: 70 ms each time."""
    gc.collect()
    gc.freeze()


def _failure(rank: int, error: BaseException) -> Failure:
    kind = type(error)
    # The traceback's frames would keep the whole case alive.
    text = "".join(traceback.format_exception(error))
    traceback.clear_frames(error.__traceback__)
    return Failure(rank, kind.__name__, str(error), text, tuple(base.__name__ for base in kind.__mro__))


def _open_process_group(case: Case) -> None:
    world = int(case.environment["WORLD_SIZE"])
    store = dist.PrefixStore(f"case {case.number}", _store_client(int(case.environment["MASTER_PORT"])))
    dist.init_process_group("gloo", store=store, rank=case.rank, world_size=world, timeout=GROUP_TIMEOUT)
    # A rank that is connected must not end its case, and close, while another is still connecting.
    if store.add("connected", 1) == world:
        store.set("all connected", "yes")
    store.wait(["all connected"], GROUP_TIMEOUT)


@functools.cache
def _store_client(port: int) -> dist.TCPStore:
    """One connection for all cases: making one asks for the name of its address, which may take 5 s."""
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=GROUP_TIMEOUT)


def _close_process_group() -> bool:
    """Whether nothing is left of any process group."""
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception:
        traceback.print_exc()
        return False
    # A group that failed to start stays counted, and ranks that count differently never meet again.
    return dist.distributed_c10d._world.group_count == 0


def _join(before: set[threading.Thread]) -> bool:
    """Wait a moment for the threads that the case started; whether all of them ended."""
    deadline = time.monotonic() + THREAD_GRACE_S
    started = [thread for thread in threading.enumerate() if thread not in before]
    for thread in started:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in started)


def _seed(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def _reset_torch() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    if torch.are_deterministic_algorithms_enabled():  # setting it imports the whole of inductor
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _warning_filters(filters: tuple[WarningFilter, ...]) -> Iterator[None]:
    """The warning filters of the test that sent the case: what is an error there is one here."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for entry in reversed(filters):
            warnings.filterwarnings(
                entry.action,  # type: ignore[arg-type]
                entry.message,
                entry.category,
                entry.module,
                entry.line,
            )
        yield


def current_warning_filters() -> tuple[WarningFilter, ...]:
    """The filters in force here and now, in a form that can be sent."""

    def pattern(value: Any) -> str:
        return "" if value is None else value.pattern if isinstance(value, re.Pattern) else str(value)

    return tuple(
        WarningFilter(action, pattern(message), category, pattern(module), line)
        for action, message, category, module, line in warnings.filters
    )


@contextlib.contextmanager
def _lost_exceptions() -> Iterator[list[str]]:
    """Collect exceptions that Python can only print: of threads, of `__del__`, of callbacks."""
    lost: list[str] = []

    def unraisable(args: Any) -> None:
        text = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
        lost.append(f"{args.err_msg or 'Exception ignored in'} {args.object!r}\n{text}")

    def in_thread(args: Any) -> None:
        text = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
        lost.append(f"Exception in thread {args.thread and args.thread.name}\n{text}")

    hooks = sys.unraisablehook, threading.excepthook
    sys.unraisablehook, threading.excepthook = unraisable, in_thread
    try:
        yield lost
    finally:
        sys.unraisablehook, threading.excepthook = hooks


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when the test session dies, also while a case hangs."""
    parent = os.getppid()
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the test session is gone")
