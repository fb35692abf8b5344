"""What both the list of nodes and the rest of a configuration say: neither may hide the other. Pure."""

from collections.abc import Iterator, Mapping, Sequence

from fsdplaunch.config.load.layers import ValueOrigin
from fsdplaunch.config.schema.config import Config
from fsdplaunch.config.schema.walk import Path as KeyPath
from fsdplaunch.config.world_size import node_range
from fsdplaunch.errors import UsageError
from fsdplaunch.launch.schedulers.ssh.hosts import SshHost

_HERE = ("flag", "env")
"""Layers that are about this very run; a file may be another launcher's, which always writes one node."""


def check_list(config: Config, hosts: Sequence[SshHost], origins: Mapping[KeyPath, ValueOrigin]) -> None:
    """Refuse what would otherwise be overruled by the list of nodes in silence.

    Args:
        config: Resolved.
        hosts: The nodes.
        origins: Which layer decided each key.

    Raises:
        UsageError: Configuration and list contradict each other.
    """
    for message, hint in _contradictions(config, hosts, origins):
        raise UsageError(message, hint=hint)


def _contradictions(
    config: Config, hosts: Sequence[SshHost], origins: Mapping[KeyPath, ValueOrigin]
) -> Iterator[tuple[str, str]]:
    def set_by(*path: str) -> str | None:
        """Return who sets a key, when it is set for this run."""
        origin = origins.get(path)
        return origin.text if origin is not None and origin.layer in _HERE else None

    count, (least, most) = len(hosts), node_range(config)
    named = f"ssh names {count} node{'s' if count > 1 else ''}"
    if config.launch.nodes is not None and not least <= count <= most:
        yield f"launch.nodes is {config.launch.nodes}, but {named}", "make the two agree"
    if config.num_machines != count and (set_by("num_machines") or config.num_machines > 1):
        yield f"num_machines is {config.num_machines}, but {named}", "leave num_machines out"
    if who := set_by("machine_rank"):
        yield f"machine_rank is set ({who}), but the list of nodes numbers them", "leave machine_rank out"
    slots = [host.slots for host in hosts if host.slots]
    if isinstance(config.num_processes, int) and len(slots) == count and config.num_processes != sum(slots):
        words = f"num_processes is {config.num_processes}, but the hostfile's slots are {sum(slots)}"
        yield words, "leave num_processes out"
    asked = config.launch.workers_per_node
    if isinstance(config.num_processes, int) and not slots and asked is None and config.num_processes % count:
        words = f"num_processes is {config.num_processes}, which cannot be split evenly, but {named}"
        yield words, "leave num_processes out, or set each node's workers in a hostfile: NAME slots=N"
    other = next((host for host in hosts if host.slots and host.slots != asked), None)
    if other is not None and (who := set_by("launch", "workers_per_node")):
        words = f"launch.workers_per_node is {asked} ({who}), but {other.name} has slots={other.slots}"
        yield words, "leave one of them out"
