"""The network interfaces that gloo and NCCL are to use. Apart from joining, which a lone node does not import."""

from collections.abc import Mapping

from fsdplaunch.config.schema.config import Config
from fsdplaunch.launch.coordination import network


def interface_variables(
    config: Config, address: str, environ: Mapping[str, str], *, alone: bool = False
) -> dict[str, str]:
    """Return the variables that keep gloo, and NCCL where an interface is configured, on the network of the nodes.

    By itself gloo takes the address of this node's own name, which Debian maps to 127.0.1.1. A lone node needs no
    network: there both stay on the loopback interface.

    Args:
        config: Resolved.
        address: This node's, as the others reach it.
        environ: The caller's variables; what is set there stays.
        alone: There is no other node.
    """
    asked = config.launch.network_interface
    name = asked or network.interface_of(address)
    both = asked or alone
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if both else ("GLOO_SOCKET_IFNAME",)
    return {variable: name for variable in names if name and variable not in environ}
