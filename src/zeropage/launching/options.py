"""The options of `zeropage run`: torchrun's own, a few more, and those of the `deepspeed` launcher.

What the `deepspeed` launcher has and this one does not do is refused with the reason; docs/deepspeed.md lists all.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from torch.distributed.run import get_args_parser

from zeropage.errors import ConfigError

__all__ = ["LAUNCHER_OPTIONS", "parse"]

LAUNCHER_OPTIONS: Mapping[str, str] = {
    "--num_gpus": "ranks on each host",
    "--num_accelerators": "the same",
    "--num_nodes": "the first hosts of the hostfile",
    "--hostfile": "hosts and their slots; with several, start the same command on each",
    "--include": "hosts and slots to use",
    "--exclude": "hosts and slots not to use",
    "--master_addr": "the host that ranks meet at; default: the first",
    "--master_port": "the port that ranks meet at",
    "--node_rank": "which of the hosts this is; default: found by its name",
    "--no_ssh": "accepted: nothing is started by ssh",
    "--no_ssh_check": "accepted: nothing is started by ssh",
    "--force_multi": "accepted: one host needs no other launcher",
    "--launcher": "accepted for one host; other launchers start ranks themselves, see the error",
    "--module": "the script is a module",
    "--no_python": "the script is a program",
    "--no_local_rank": "scripts get `--local_rank=N` where one of the options above is used; with this, never",
    "--enable_each_rank_log": "a folder: each rank's output goes to a file of its own",
    "--log_level": "accepted: the level of this command's own messages",
    "--quiet": "the same",
}

_REFUSED: Mapping[str, str] = {
    "--launcher_args": "no other launcher is started; start it yourself, with `python -m zeropage.deepspeed SCRIPT`",
    "--autotuning": "there is nothing to tune; leave it out",
    "--bind_cores_to_rank": "let each rank call os.sched_setaffinity, or start it under taskset or numactl",
    "--bind_core_list": "let each rank call os.sched_setaffinity, or start it under taskset or numactl",
    "--save_pid": "the launcher is the process that you started, so its id is the shell's $!",
    "--ssh_port": "nothing is started by ssh; start the same command on each host",
    "--venv_script": "nothing is started by ssh; activate the environment on each host",
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """torchrun's namespace, with more in it.

    Raises:
        ConfigError: an option of the `deepspeed` launcher that is refused.
    """
    parser = get_args_parser()
    parser.prog = "zeropage run"
    parser.description = "Start SCRIPT on several ranks: torchrun, with the options of the deepspeed launcher."
    ours = parser.add_argument_group("zeropage")
    ours.add_argument("--ranks", type=int, help="Ranks on each host; default: as many as GPUs, or 1.")
    ours.add_argument("--hosts", default="", help="All hosts, with commas; start the same command on each.")
    ours.add_argument("--deepspeed", action="store_true", help="`import deepspeed` means zeropage in the program.")
    theirs = parser.add_argument_group("as the deepspeed launcher")
    theirs.add_argument("--num_gpus", "--num_accelerators", type=int, dest="num_gpus")
    theirs.add_argument("--num_nodes", type=int)
    theirs.add_argument("-H", "--hostfile")
    theirs.add_argument("-i", "--include", default="")
    theirs.add_argument("-e", "--exclude", default="")
    theirs.add_argument("--launcher", default="")
    theirs.add_argument("--enable_each_rank_log")
    theirs.add_argument("--no_local_rank", action="store_true")
    theirs.add_argument("--no_ssh", action="store_true")
    theirs.add_argument("--no_ssh_check", action="store_true")
    theirs.add_argument("--force_multi", action="store_true")
    theirs.add_argument("--log_level")
    theirs.add_argument("-q", "--quiet", action="store_true")
    for option, reason in _REFUSED.items():
        theirs.add_argument(option, action=_Refuse, nargs="?", const="", help=f"Refused: {reason}.")
    return parser.parse_args(list(arguments))


class _Refuse(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        raise ConfigError(f"{option} of the deepspeed launcher is not available here: {_REFUSED[str(option)]}")
