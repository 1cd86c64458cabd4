"""PURE. Which hosts run how many ranks: hostfiles, and DeepSpeed's `--include` and `--exclude`.

A hostfile has a line `NAME slots=N` for each host. A filter is `NAME[:SLOT[,SLOT ...]][@...]`; slots are GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from zeropage.errors import ConfigError

__all__ = ["first_host", "parse_hostfile", "select", "trim"]

Hosts = dict[str, list[int]]
"""The slots of each host, in the order of ranks."""


def parse_hostfile(text: str) -> Hosts:
    """The hosts that `text` lists.

    Raises:
        ConfigError: a line that is none, a host twice, or no host at all.
    """
    hosts: Hosts = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        match = re.fullmatch(r"(\S+)\s+slots=(\d+)", line)
        if match is None:
            raise ConfigError(f"hostfile, line {number}: expected `NAME slots=N`, got {line!r}")
        if match[1] in hosts:
            raise ConfigError(f"hostfile, line {number}: host {match[1]!r} is listed twice")
        hosts[match[1]] = list(range(int(match[2])))
    if not hosts:
        raise ConfigError("hostfile: no host is listed")
    return hosts


def select(hosts: Mapping[str, Sequence[int]], include: str = "", exclude: str = "") -> Hosts:
    """The hosts and slots that the filters leave, in the order of `hosts`.

    Raises:
        ConfigError: both filters, or one that names a host or slot which is not there.
    """
    if include and exclude:
        raise ConfigError("--include and --exclude cannot be given together")
    if not include and not exclude:
        return {name: list(slots) for name, slots in hosts.items()}
    named = _parse_filter(include or exclude)
    for name, slots in named.items():
        if name not in hosts:
            raise ConfigError(
                f"--{'include' if include else 'exclude'}: host {name!r} is not one of {', '.join(hosts)}"
            )
        missing = sorted(set(slots) - set(hosts[name]))
        if missing:
            raise ConfigError(
                f"--{'include' if include else 'exclude'}: host {name!r} has no slot {missing[0]}, only "
                f"{', '.join(map(str, hosts[name]))}"
            )
    if include:
        chosen = {name: named[name] or list(hosts[name]) for name in hosts if name in named}
    else:
        chosen = {name: [s for s in slots if s not in _excluded(named, name, slots)] for name, slots in hosts.items()}
    left = {name: slots for name, slots in chosen.items() if slots}
    if not left:
        raise ConfigError("the filter leaves no host")
    return left


def trim(hosts: Mapping[str, Sequence[int]], num_hosts: int | None, num_slots: int | None) -> Hosts:
    """The first `num_hosts` hosts, with `num_slots` slots each.

    Raises:
        ConfigError: there are fewer hosts.
    """
    if num_hosts is not None and num_hosts > len(hosts):
        raise ConfigError(f"--num_nodes {num_hosts}: the hostfile lists {len(hosts)}")
    names = list(hosts)[:num_hosts]
    return {name: list(hosts[name]) if num_slots is None else list(range(num_slots)) for name in names}


def first_host(node_list: str) -> str:
    """The first host of a SLURM node list: `a[03-05,9],b1` begins with a03."""
    match = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\](\S*?))?(?:,|$)", node_list)
    if match is None:
        raise ConfigError(f"SLURM node list {node_list!r} cannot be read; set MASTER_ADDR to the first host")
    return match[1] + (match[2] or "") + (match[3] or "")


def _parse_filter(text: str) -> Hosts:
    named: Hosts = {}
    for part in text.split("@"):
        name, _, slots = part.partition(":")
        try:
            numbers = [int(slot) for slot in slots.split(",")] if slots else []
        except ValueError:
            raise ConfigError(f"filter {part!r}: slots are numbers with commas between them") from None
        named[name] = sorted({*named.get(name, []), *numbers})
    return named


def _excluded(named: Mapping[str, Sequence[int]], name: str, slots: Sequence[int]) -> Sequence[int]:
    if name not in named:
        return ()
    return named[name] or slots
