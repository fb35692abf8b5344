"""Who tries to reach whom before a run, and what it means when somebody cannot."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from fsdplaunch.launch.coordination.network import reach
from fsdplaunch.launch.coordination.node_info import NodeInfo
from fsdplaunch.launch.coordination.wire_types import Message
from fsdplaunch.launch.finding import Finding

FULL_MESH = 16
"""Up to so many nodes, every one tries every other; beyond, the one after it and node 0."""
_AT_ONCE = 16


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
