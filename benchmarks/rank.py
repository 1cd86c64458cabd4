"""One rank of one competitor: does work when told, and waits for the next word without using the processor.

    python -m benchmarks.rank CORE

A line of JSON on standard input is a command, and gets a line of JSON as its answer; whatever libraries print goes to
standard error. `open` names a class as `module:Class` and what to make it with; `window` asks for some repetitions.
"""

from __future__ import annotations

import cProfile
import importlib
import json
import os
import resource
import sys
import time
import traceback
from typing import Any, TextIO

from benchmarks.measure import pin


class Rank:
    def __init__(self) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.work: Any = None

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        return getattr(self, "do_" + command.pop("do"))(**command)  # type: ignore[no-any-return]

    def do_start(self, libraries: list[str]) -> dict[str, Any]:
        """Import what the competitor needs and join the group, so that memory can be looked at before any model."""
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        torch.set_num_interop_threads(1)
        dist.init_process_group("gloo", rank=self.rank, world_size=self.world)
        for name in libraries:
            importlib.import_module(name)
        return {"pid": os.getpid()}

    def do_open(self, work: str, job: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        from benchmarks.competitors.base import Job

        module, name = work.split(":")
        began = time.perf_counter()
        maker = getattr(importlib.import_module(module), name)
        self.work = maker(Job.of(job, self.rank, self.world), **options)
        return {"seconds": time.perf_counter() - began}

    def do_window(self, first: int, count: int, together: bool) -> dict[str, Any]:
        """`together`: ranks start each repetition at the same time, for work that does not keep them in step."""
        import torch.distributed as dist

        walls, processor, results, start = [], [], [], _used()
        for index in range(first, first + count):
            self.work.prepare(index)
            if together:
                dist.barrier()
            used, began = _used(), time.perf_counter()
            results.append(self.work.once(index))
            walls.append(time.perf_counter() - began)
            processor.append(_used() - used)
        return {"walls": walls, "processor": processor, "results": results, "used": _used() - start}

    def do_facts(self) -> dict[str, Any]:
        return self.work.facts()  # type: ignore[no-any-return]

    def do_profile(self, first: int, count: int, path: str) -> dict[str, Any]:
        """Where the program's own thread spends processor time: waiting and other programs do not count."""
        profile = cProfile.Profile(time.thread_time)
        for index in range(first, first + count):
            self.work.prepare(index)
            profile.enable()
            self.work.once(index)
            profile.disable()
        profile.dump_stats(f"{path}.{self.rank}")
        return {}

    def do_close(self) -> dict[str, Any]:
        if self.work is not None:
            self.work.close()
            self.work = None
        return {}


def _used() -> float:
    """Processor seconds of all threads, in the program and in the kernel."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime


def main(commands: TextIO, answers: TextIO) -> None:
    rank = Rank()
    for line in commands:
        try:
            answer = {"ok": rank.answer(json.loads(line))}
        except Exception:  # told to the runner, which then ends all ranks
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    pin(int(sys.argv[1]))
    mine = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(sys.stdin, mine)
    mine.flush()
    sys.stderr.flush()
    os._exit(0)  # some libraries hang or abort when they are torn down
