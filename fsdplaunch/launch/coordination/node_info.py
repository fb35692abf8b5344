"""What each node says of itself when it arrives, and what keeps nodes from running together."""

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from fsdplaunch.launch.preflight import Finding

_NAMED = 3
"""How many differing keys to name."""
_COMMAND_LETTERS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """One node, as it presents itself."""

    host: str
    address: str  # where the others reach it
    rank: int | None = None  # the number it was given; None when it is to be assigned one
    workers: int = 1  # worker processes it will start
    versions: Mapping[str, str] = field(default_factory=dict)  # of fsdplaunch, torch and Python
    # Its configuration as texts, by key; what may differ between nodes left out.
    config: Mapping[str, str] = field(default_factory=dict)
    command: Sequence[str] = ()
    script: str = ""  # digest of the script's text; empty for modules and programs
    obstacles: Sequence[str] = ()  # what keeps it from starting
    port: int = 0  # at which it listens while nodes try each other

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> "NodeInfo":
        """Read what another node sent."""
        known = {entry.name for entry in fields(cls)}
        return cls(**{name: value for name, value in message.items() if name in known})

    @property
    def name(self) -> str:
        """Return how people know the node: its name, and its address where that says more."""
        return self.host if self.host == self.address else f"{self.host} ({self.address})"


def assign_ranks(arrived: Sequence[NodeInfo]) -> list[int]:
    """Return every node's rank: its configured one, else the lowest that is free, in order of arrival."""
    taken = {one.rank for one in arrived if one.rank is not None}
    free = (number for number in range(len(arrived) + len(taken)) if number not in taken)
    return [next(free) if one.rank is None else one.rank for one in arrived]


def find_incompatibilities(arrived: Sequence[NodeInfo], *, most: int) -> list[Finding]:
    """Return everything that keeps these nodes from running together, compared with the first."""
    found = []
    for one in arrived:
        for obstacle in one.obstacles:
            message, _, hint = obstacle.partition("\n")
            hint = hint or "see that node's output"
            found.append(Finding(message=f"{one.name} cannot start: {message}", hint=hint))
    counts = Counter(one.rank for one in arrived if one.rank is not None)
    for rank, count in sorted(counts.items()):
        names = " and ".join(one.name for one in arrived if one.rank == rank)
        if count > 1:
            hint = "set a different --machine-rank on each node, or on none: ranks are then assigned"
            found.append(Finding(message=f"{names} are both configured as node {rank}", hint=hint))
        elif rank >= most:
            message = f"{names} is configured as node {rank}, but there are {most}"
            found.append(Finding(message=message, hint="nodes count from 0"))
    if idle := [one.name for one in arrived if one.workers < 1]:
        message = f"{', '.join(idle)} would start no workers"
        found.append(Finding(message=message, hint="set launch.workers_per_node"))
    for other in arrived[1:]:
        found += _differences(arrived[0], other)
    return found


def _differences(first: NodeInfo, other: NodeInfo) -> Iterator[Finding]:
    for program in ("fsdplaunch", "torch", "python"):
        here, there = first.versions.get(program), other.versions.get(program)
        if here != there:
            what = f"{there or 'missing'} on {other.name} and {here or 'missing'} on {first.name}"
            hint = "install the same versions on every node"
            yield Finding(message=f"{program} is {what}", hint=hint, fatal=program != "python")
    if first.config != other.config:
        pairs = {name: (first.config.get(name), other.config.get(name)) for name in {*first.config, *other.config}}
        names = sorted(name for name, (here, there) in pairs.items() if here != there)
        texts = {name: ["left out" if one is None else repr(one) for one in pairs[name]] for name in names}
        differences = [f"{name} is {texts[name][1]} there and {texts[name][0]} on {first.host}" for name in names]
        more = f"; and {len(names) - _NAMED} more keys differ" if len(names) > _NAMED else ""
        message = f"{other.name} has another configuration: {', '.join(differences[:_NAMED])}{more}"
        yield Finding(message=message, hint="use the same file, options and FSDPLAUNCH_ variables on every node")
    if list(first.command) != list(other.command):
        message = f"{other.name} would run {_command(other)}, and {first.host} {_command(first)}"
        yield Finding(message=message, hint="give every node the same script and arguments")
    if first.script and other.script and first.script != other.script:
        message = f"the script on {other.name} differs from that on {first.name}"
        yield Finding(message=message, hint="copy it there again", fatal=False)


def _command(one: NodeInfo) -> str:
    text = shlex.join(one.command)
    return text if len(text) <= _COMMAND_LETTERS else f"{text[: _COMMAND_LETTERS - 3]}..."


def unreachable(tried: Mapping[str, tuple[str, str | None]]) -> list[Finding]:
    """Return what is in the way, by the one that each node tried and why it could not; None: it never answered."""
    hint = (
        "the workers connect on free ports: a firewall, or the address of a network the nodes do not share? "
        "set launch.local_address or launch.network_interface there"
    )
    found = []
    for name, (other, why) in tried.items():
        if why is None:
            found.append(Finding(message=f"{name} stopped answering", hint="see that node's output"))
        elif why:
            found.append(Finding(message=f"{name} cannot reach {other}: {why}", hint=hint))
    return found
