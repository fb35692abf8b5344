"""Which machines take part, as torch's rendezvous sees it: numbered as we number them, restarted when one is lost.

In the agent, beside `elastic`. Every replaced name is looked for first: a torch without it keeps its own ways.
"""

import os
import signal
from typing import Any

from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from fsdplaunch.launch.crew import Crew
from fsdplaunch.launch.run_folder import MACHINES, read_json

_Node: Any = getattr(dynamic_rendezvous, "_NodeDesc", object)
_Handler: Any = dynamic_rendezvous.DynamicRendezvousHandler


class NumberedNode(_Node):  # type: ignore[misc]
    """A machine that sorts by its number; torch sorts by the text of the address, where 10.0.0.10 < 10.0.0.2.

    Ranks follow that order, so rank 0 runs on machine 0, and neighbouring ranks on neighbouring machines.
    """

    def __lt__(self, other: Any) -> bool:
        """Lower numbers first; the number is kept in `local_id`."""
        return bool((self.local_id, self.addr, self.pid) < (other.local_id, other.addr, other.pid))


class _Numbering:
    """Stands in for torch's generator of machine descriptions."""

    def __init__(self, number: int) -> None:
        self._number = number

    def generate(self, local_addr: str | None = None) -> Any:
        """Describe this machine."""
        import socket

        return NumberedNode(local_addr or socket.getfqdn(), os.getpid(), self._number)


def order_machines(number: int | None) -> None:
    """Have the rendezvous rank this machine by its number.

    Args:
        number: None leaves the order to torch.
    """
    if number is not None and _Node is not object and hasattr(_Handler, "_node_desc_generator"):
        _Handler._node_desc_generator = _Numbering(number)


def watch_machines(crew: Crew) -> None:
    """Have torch's agent start the workers again when the launcher reports a lost machine.

    The agent asks the rendezvous, at every look at its workers, how many machines wait to join. A lost machine's
    peers hang in a collective, so its loss counts as one, and the workers are killed: they have nothing to save.
    """
    ask = _Handler.num_nodes_waiting
    seen = 0

    def num_nodes_waiting(self: Any) -> int:
        nonlocal seen
        changes = int(read_json(crew.job.run_dir / MACHINES).get("changes", 0))
        if changes > seen:
            seen = changes
            crew.send(signal.SIGKILL)
            return 1
        return int(ask(self))

    _Handler.num_nodes_waiting = num_nodes_waiting
