"""Decides where the ranks are, and lets torchrun start them.

Three situations: one host; several, where the same command is started on each; and inside `srun`, where SLURM has
started one process a host (then this starts the ranks of the host) or one process a rank (then this is the rank).
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from zeropage.deepspeed.running import prepare_children
from zeropage.errors import ConfigError
from zeropage.launching.hosts import Hosts, first_host, parse_hostfile, select, trim
from zeropage.launching.options import parse

__all__ = ["main", "plan"]

_PORT = 29500


def main(arguments: Sequence[str]) -> None:
    """Start the program that `arguments` (those of `zeropage run`) tell of, and wait for its end.

    Raises:
        ConfigError: see `plan`.
    """
    settings = plan(arguments, os.environ)
    if settings.is_rank:
        _run_here(settings)
    else:
        try:
            torchrun.run(settings)
        except ChildFailedError as error:
            sys.exit(str(error))


def plan(arguments: Sequence[str], environment: MutableMapping[str, str]) -> argparse.Namespace:
    """The namespace for torchrun. `environment`, which the ranks will have, is completed.

    `is_rank` in it says that this process itself is to be a rank.

    Raises:
        ConfigError: an option is refused; hosts or slots do not fit; this host is none of those given.
    """
    settings = parse(arguments)
    settings.is_rank = False
    if settings.deepspeed:
        prepare_children(environment)
    if settings.enable_each_rank_log not in (None, "None"):
        settings.log_dir, settings.redirects = settings.enable_each_rank_log, "3"
    if "SLURM_STEP_NUM_TASKS" in environment and not settings.hosts and settings.hostfile is None:
        _plan_in_srun(settings, environment)
    else:
        _plan_on_hosts(settings, environment)
    if _is_like_deepspeed(settings) and not settings.no_local_rank:
        settings.training_script_args = ["--local_rank=${local_rank}", *settings.training_script_args]
    return settings


# -- hosts that are named, or this one alone


def _plan_on_hosts(settings: argparse.Namespace, environment: MutableMapping[str, str]) -> None:
    if settings.launcher.lower() not in ("", "pdsh"):
        raise ConfigError(
            f"--launcher {settings.launcher}: start the ranks with it yourself, each as `python -m zeropage.deepspeed "
            "SCRIPT` (SLURM's and Open MPI's variables are understood); `zeropage run` is for one host, for the same "
            "command on each of several hosts, and for inside srun"
        )
    hosts = _hosts(settings)
    here = _this_host(settings, list(hosts))
    slots = hosts[here]
    if _chooses_slots(settings):
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slots))
    if not _leaves_ranks_to_torchrun(settings):
        settings.nproc_per_node = str(len(slots))
    if len(hosts) > 1:
        counts = {len(slots) for slots in hosts.values()}
        if len(counts) > 1:
            raise ConfigError(
                "torchrun wants as many ranks on each host; use --num_gpus or --include to make them equal"
            )
        settings.nnodes, settings.node_rank = str(len(hosts)), list(hosts).index(here)
        settings.master_addr = _given(settings.master_addr) or next(iter(hosts))
        settings.master_port = settings.master_port or _PORT
        others = ", ".join(name for name in hosts if name != here)
        print(
            f"zeropage: host {settings.node_rank} of {len(hosts)} ({here}); needs the same on {others}", file=sys.stderr
        )


def _hosts(settings: argparse.Namespace) -> Hosts:
    """All hosts with their slots; those of this host are counted if nothing lists them."""
    ranks = _ranks_on_a_host(settings)
    if (settings.num_nodes or settings.num_gpus) and (settings.include or settings.exclude):
        raise ConfigError("--num_nodes and --num_gpus cannot be given together with --include or --exclude")
    if settings.hostfile is not None:
        path = Path(settings.hostfile)
        if not path.is_file():
            raise ConfigError(f"--hostfile {path}: no such file")
        return trim(
            select(parse_hostfile(path.read_text()), settings.include, settings.exclude), settings.num_nodes, ranks
        )
    count = ranks if ranks is not None else max(1, torch.cuda.device_count())
    names = settings.hosts.split(",") if settings.hosts else ["localhost"]
    if settings.num_nodes is not None and settings.num_nodes > len(names):
        raise ConfigError(f"--num_nodes {settings.num_nodes}: name the hosts, with --hostfile or --hosts")
    return trim(select({name: range(count) for name in names}, settings.include, settings.exclude), None, None)


def _ranks_on_a_host(settings: argparse.Namespace) -> int | None:
    """What was asked for, by any of the options; None if nothing was."""
    for asked in (settings.ranks, settings.num_gpus):
        if asked is not None:
            return int(asked)
    per_node = str(settings.nproc_per_node)
    return int(per_node) if per_node.isdigit() and per_node != "1" else None  # "1" is torchrun's default


def _leaves_ranks_to_torchrun(settings: argparse.Namespace) -> bool:
    """For words like "gpu" and "auto"."""
    return not str(settings.nproc_per_node).isdigit()


def _this_host(settings: argparse.Namespace, names: list[str]) -> str:
    if len(names) == 1:
        return names[0]  # --node_rank is torchrun's own affair then
    if settings.node_rank or settings.no_ssh:
        if not 0 <= settings.node_rank < len(names):
            raise ConfigError(f"--node_rank {settings.node_rank}: there are {len(names)} hosts")
        return str(names[settings.node_rank])
    mine = {socket.gethostname(), socket.getfqdn(), socket.gethostname().split(".")[0]}
    found = [name for name in names if name in mine or name.split(".")[0] in mine]
    if len(found) != 1:
        raise ConfigError(
            f"this host ({socket.gethostname()}) is none of {', '.join(names)}; start the same command on each of them "
            "with --node_rank 0, 1, ... (nothing is started by ssh)"
        )
    return found[0]


def _chooses_slots(settings: argparse.Namespace) -> bool:
    return bool(settings.include or settings.exclude) and torch.cuda.is_available()


def _is_like_deepspeed(settings: argparse.Namespace) -> bool:
    """Whether an option was used that only the deepspeed launcher has: its scripts expect `--local_rank`."""
    return any((settings.num_gpus, settings.num_nodes, settings.hostfile, settings.include, settings.exclude))


def _given(address: str | None) -> str | None:
    """The address if the user gave one (torchrun's default is this host)."""
    return None if address in (None, "", "127.0.0.1", "localhost") else address


# -- SLURM


def _plan_in_srun(settings: argparse.Namespace, environment: MutableMapping[str, str]) -> None:
    tasks, hosts = int(environment["SLURM_STEP_NUM_TASKS"]), int(environment.get("SLURM_STEP_NUM_NODES", 1))
    master = _given(settings.master_addr) or first_host(environment.get("SLURM_STEP_NODELIST", "localhost"))
    port = settings.master_port or _PORT + int(environment.get("SLURM_JOB_ID", 0)) % 1000
    if tasks == hosts:
        settings.nnodes, settings.node_rank = str(hosts), int(environment.get("SLURM_NODEID", 0))
        settings.master_addr, settings.master_port = master, port
        settings.nproc_per_node = str(len(_hosts(settings)["localhost"]))
        return
    if settings.ranks is not None and settings.ranks * hosts != tasks:
        raise ConfigError(
            f"srun has started {tasks} tasks on {hosts} hosts, which are ranks; --ranks {settings.ranks} does not "
            "agree: leave it out, or start one task a host (--ntasks-per-node=1)"
        )
    settings.is_rank = True
    environment.update(
        RANK=environment["SLURM_PROCID"],
        WORLD_SIZE=str(tasks),
        LOCAL_RANK=environment["SLURM_LOCALID"],
        LOCAL_WORLD_SIZE=re.split(r"[(,]", environment.get("SLURM_STEP_TASKS_PER_NODE", str(tasks)))[0],
        MASTER_ADDR=master,
        MASTER_PORT=str(port),
    )


def _run_here(settings: argparse.Namespace) -> None:
    """Be the rank: become the program."""
    local = os.environ["LOCAL_RANK"]
    arguments = [part.replace("${local_rank}", local) for part in settings.training_script_args]
    if settings.no_python:
        os.execvp(settings.training_script, [settings.training_script, *arguments])
    python = [sys.executable, "-u", *(["-m"] if settings.module else []), settings.training_script, *arguments]
    os.execv(python[0], python)
