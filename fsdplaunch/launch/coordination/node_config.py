"""A run on several nodes, this one's part: configuration and agreement -> the plan for this node."""

from dataclasses import replace

from fsdplaunch.config.schema.config import Config
from fsdplaunch.config.schema.endpoints import join_endpoint
from fsdplaunch.config.world_size import node_range
from fsdplaunch.launch.coordination.interfaces import RunAssignment
from fsdplaunch.launch.coordination.join import LAST_CALL_SECONDS
from fsdplaunch.launch.coordination.placement import NodePlacement

ATTEMPTS = 3
"""Missed keep-alives after which torch's rendezvous drops a node."""


def provisional_config(config: Config, place: NodePlacement, *, address: str) -> Config:
    """Return the configuration with everything that is known before joining, for a dry run and for checks.

    Args:
        config: Resolved.
        place: This node's.
        address: Node 0's, or what stands for it.
    """
    return _placed(
        config,
        endpoint=join_endpoint(place.host or address, place.port),
        rank=place.rank or 0,
        nodes=place.least,
        address=None,
        run_id=None,
    )


def agreed_config(config: Config, assignment: RunAssignment) -> Config:
    """Return the configuration with what the nodes agreed on.

    Args:
        config: Resolved.
        assignment: As joining ended.
    """
    return _placed(
        config,
        endpoint=assignment.store,
        rank=assignment.rank,
        nodes=assignment.nodes,
        address=assignment.address,
        run_id=assignment.run_id,
    )


def _placed(
    config: Config, *, endpoint: str, rank: int, nodes: int, address: str | None, run_id: str | None
) -> Config:
    launch = replace(
        config.launch,
        rendezvous_endpoint=endpoint,
        rendezvous_id=run_id or config.launch.rendezvous_id,
        local_address=address or config.launch.local_address,
        rendezvous_options=_options(config),
    )
    return replace(
        config,
        num_machines=nodes,
        machine_rank=rank,
        main_process_ip=None,
        main_process_port=None,
        launch=launch,
    )


def _options(config: Config) -> dict[str, str]:
    """Return torch's settings; for an elastic run, such that a lost node is dropped when we count it as lost."""
    least, most = node_range(config)
    if least == most:
        return dict(config.launch.rendezvous_options)
    interval = max(1, round(config.launch.machine_timeout_seconds / ATTEMPTS))
    defaults = {
        "last_call_timeout": f"{LAST_CALL_SECONDS:.0f}",
        "keep_alive_interval": str(interval),
        "keep_alive_max_attempt": str(ATTEMPTS),
    }
    return defaults | config.launch.rendezvous_options
