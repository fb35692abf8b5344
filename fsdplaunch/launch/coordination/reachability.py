"""Who tries to reach whom before a run, and what it means when somebody cannot."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from fsdplaunch.launch.coordination.network import reach
from fsdplaunch.launch.coordination.node_info import Incompatibility, NodeInfo
from fsdplaunch.launch.coordination.protocol import Message

FULL_MESH = 16
"""Up to so many machines, every one tries every other; beyond, the one after it and machine 0."""
_AT_ONCE = 16


def reachability_targets(machines: Sequence[tuple[int, NodeInfo]]) -> list[Message]:
    """The machines as the others need to know them in order to try them.

    Args:
        machines: Number and greeting of each.
    """
    return [
        {"rank": rank, "name": one.name, "address": one.address, "port": one.probe[0], "word": one.probe[1]}
        for rank, one in sorted(machines, key=lambda pair: pair[0])
    ]


def targets(count: int, own: int) -> list[int]:
    """The places in the roster that one machine tries.

    Args:
        count: Machines.
        own: This one's place.
    """
    if count <= FULL_MESH:
        return [place for place in range(count) if place != own]
    return sorted({0, (own + 1) % count} - {own})


def check_reach(roster: Sequence[Message], *, own: int) -> list[str]:
    """Try the others; return a sentence for each that cannot be reached.

    Args:
        roster: As machine 0 sent it.
        own: This machine's number.
    """
    place = next((place for place, one in enumerate(roster) if one["rank"] == own), 0)
    chosen = [roster[other] for other in targets(len(roster), place)]
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        answers = pool.map(lambda one: reach(one["address"], one["port"], one["word"]), chosen)
    return [f"{one['name']}: {wrong}" for one, wrong in zip(chosen, answers, strict=True) if wrong]


def unreachable(reached: Mapping[str, Sequence[str] | None]) -> list[Incompatibility]:
    """What is in the way, by what each machine found.

    Args:
        reached: By machine, the others it could not reach; None when it never answered.
    """
    found = []
    for name, failed in reached.items():
        if failed is None:
            found.append(Incompatibility(message=f"{name} did not answer any more", hint="see that node's output"))
        found += [
            Incompatibility(
                message=f"{name} cannot reach {other}",
                hint="the workers connect on free ports: a firewall, or the address of a network the nodes do "
                "not share? set launch.local_address or launch.network_interface there",
            )
            for other in failed or ()
        ]
    return found
