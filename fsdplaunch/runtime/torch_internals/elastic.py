"""How torch's elastic agent describes and orders nodes, waits for them, and names its folder of logs.

Nothing here imports FSDP, which the agent process does without.
"""

from typing import Any

from torch.distributed.elastic.rendezvous import dynamic_rendezvous


def node_description_class() -> Any:
    """Return the class by which torch's rendezvous describes and sorts nodes, None on others."""
    return getattr(dynamic_rendezvous, "_NodeDesc", None)


def set_node_descriptions(generator: Any) -> None:
    """Let torch's rendezvous describe this node by `generator`, without effect on others."""
    handler: Any = dynamic_rendezvous.DynamicRendezvousHandler
    if hasattr(handler, "_node_desc_generator"):
        handler._node_desc_generator = generator


def log_root(specs: Any) -> str:
    """Return the folder that log specifications of torch's agent were made with."""
    return str(specs._root_log_dir)
