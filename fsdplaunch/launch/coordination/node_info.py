"""What each node says of itself when it arrives, and what keeps nodes from running together."""

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from fsdplaunch.launch.coordination.network import reach
from fsdplaunch.launch.coordination.protocol import Message
from fsdplaunch.launch.preflight import Finding

_NAMED = 3
"""How many differing keys to name."""
FULL_MESH = 16
"""Up to so many nodes, every one tries every other; beyond, the one after it and node 0."""
_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """One node, as it presents itself.

    Attributes:
        host: Its name.
        address: Where the others reach it.
        rank: The number it was given; None when it is to be assigned one.
        workers: Worker processes it will start.
        versions: Of fsdplaunch, torch and Python.
        config: Its configuration as texts, by key; what may differ between nodes left out.
        command: What its workers run.
        script: Digest of the script's text; empty for modules and programs.
        obstacles: What keeps it from starting.
        probe: Port and word of its probe.
        folder: Where it keeps the run's files.
    """

    host: str
    address: str
    rank: int | None = None
    workers: int = 1
    versions: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)
    command: Sequence[str] = ()
    script: str = ""
    obstacles: Sequence[str] = ()
    probe: tuple[int, str] = (0, "")
    folder: str = ""

    def to_message(self) -> Message:
        """Return it as it is sent."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> "NodeInfo":
        """Read what another node sent.

        Raises:
            TypeError: Something is missing.
        """
        known = {entry.name for entry in fields(cls)}
        return cls(**{name: value for name, value in message.items() if name in known})

    @property
    def name(self) -> str:
        """Return how people know the node: its name, and its address where that says more."""
        return self.host if self.host == self.address else f"{self.host} ({self.address})"


def assign_ranks(arrived: Sequence[NodeInfo]) -> list[int]:
    """Return every node's rank: the one it was configured with, else the lowest that is free, in order of arrival.

    Args:
        arrived: The nodes; the first one is the one the others came to, and becomes 0 when it has none.
    """
    taken = {one.rank for one in arrived if one.rank is not None}
    free = (number for number in range(len(arrived) + len(taken)) if number not in taken)
    return [next(free) if one.rank is None else one.rank for one in arrived]


def find_incompatibilities(arrived: Sequence[NodeInfo], *, most: int) -> list[Finding]:
    """Return everything that keeps these nodes from running together.

    Args:
        arrived: The nodes; the first one is what the others are compared with.
        most: How many may take part.
    """
    first, others = arrived[0], arrived[1:]
    found = [*_obstacles(arrived), *_ranks(arrived, most), *_workers(arrived)]
    for other in others:
        found += [*_versions(first, other), *_config(first, other), *_script(first, other)]
    return found


def _obstacles(arrived: Sequence[NodeInfo]) -> Iterator[Finding]:
    for one in arrived:
        for obstacle in one.obstacles:
            message, _, hint = obstacle.partition("\n")
            yield Finding(message=f"{one.name} cannot start: {message}", hint=hint or "see that node's output")


def _ranks(arrived: Sequence[NodeInfo], most: int) -> Iterator[Finding]:
    counts = Counter(one.rank for one in arrived if one.rank is not None)
    for rank, count in sorted(counts.items()):
        if count > 1:
            names = " and ".join(one.name for one in arrived if one.rank == rank)
            yield Finding(
                message=f"{names} are both configured as node {rank}",
                hint="give each node a rank of its own (--machine-rank), or none: it is then assigned",
            )
        elif rank >= most:
            name = next(one.name for one in arrived if one.rank == rank)
            yield Finding(
                message=f"{name} is configured as node {rank}, but there are {most}",
                hint="nodes count from 0",
            )


def _workers(arrived: Sequence[NodeInfo]) -> Iterator[Finding]:
    idle = [one.name for one in arrived if one.workers < 1]
    if idle:
        yield Finding(message=f"{', '.join(idle)} would start no workers", hint="set launch.workers_per_node")


def _versions(first: NodeInfo, other: NodeInfo) -> Iterator[Finding]:
    for program in ("fsdplaunch", "torch", "python"):
        here, there = first.versions.get(program), other.versions.get(program)
        if here != there:
            what = f"{there or 'missing'} on {other.name} and {here or 'missing'} on {first.name}"
            yield Finding(
                message=f"{program} is {what}",
                hint="install the same versions on every node",
                fatal=program != "python",
            )


def _config(first: NodeInfo, other: NodeInfo) -> Iterator[Finding]:
    if first.config != other.config:
        names = sorted(
            name for name in {*first.config, *other.config} if first.config.get(name) != other.config.get(name)
        )
        differences = [
            f"{name} is {_text(other.config.get(name))} there and {_text(first.config.get(name))} on {first.host}"
            for name in names[:_NAMED]
        ]
        more = f"; and {len(names) - _NAMED} more keys differ" if len(names) > _NAMED else ""
        yield Finding(
            message=f"{other.name} has another configuration: {', '.join(differences)}{more}",
            hint="use the same file, options and FSDPLAUNCH_ variables on every node",
        )
    if list(first.command) != list(other.command):
        yield Finding(
            message=f"{other.name} would run {_command(other)}, and {first.host} {_command(first)}",
            hint="give every node the same script and arguments",
        )


def _text(value: str | None) -> str:
    return "left out" if value is None else repr(value)


def _command(one: NodeInfo) -> str:
    text = shlex.join(one.command)
    return text if len(text) <= 120 else text[:117] + "..."  # noqa: PLR2004


def _script(first: NodeInfo, other: NodeInfo) -> Iterator[Finding]:
    if first.script and other.script and first.script != other.script:
        yield Finding(
            message=f"the script on {other.name} is not the same text as on {first.name}",
            hint="copy it there again",
            fatal=False,
        )


def reachability_targets(nodes: Sequence[tuple[int, NodeInfo]]) -> list[Message]:
    """Return the nodes as the others need to know them in order to try them.

    Args:
        nodes: Rank and description of each.
    """
    return [
        {"rank": rank, "name": one.name, "address": one.address, "port": one.probe[0], "word": one.probe[1]}
        for rank, one in sorted(nodes, key=lambda pair: pair[0])
    ]


def targets(count: int, own: int) -> list[int]:
    """Return the places in the list that one node tries.

    Args:
        count: Nodes.
        own: This one's place.
    """
    if count <= FULL_MESH:
        return [place for place in range(count) if place != own]
    return sorted({0, (own + 1) % count} - {own})


def try_to_reach(nodes: Sequence[Message]) -> list[str]:
    """Try the others; return a sentence for each that cannot be reached.

    Args:
        nodes: As node 0 sent them.
    """
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        answers = pool.map(lambda one: reach(one["address"], one["port"], one["word"]), nodes)
    return [f"{one['name']}: {wrong}" for one, wrong in zip(nodes, answers, strict=True) if wrong]


def unreachable(reached: Mapping[str, Sequence[str] | None]) -> list[Finding]:
    """Return what is in the way, by what each node found.

    Args:
        reached: By node, the others it could not reach; None when it never answered.
    """
    found = []
    for name, failed in reached.items():
        if failed is None:
            found.append(Finding(message=f"{name} did not answer any more", hint="see that node's output"))
        found += [
            Finding(
                message=f"{name} cannot reach {other}",
                hint="the workers connect on free ports: a firewall, or the address of a network the nodes do "
                "not share? set launch.local_address or launch.network_interface there",
            )
            for other in failed or ()
        ]
    return found
