"""The command that starts a node's agent: torchrun's own options, so that it can be read with torchrun's help."""

from pathlib import Path

from fsdplaunch.config.schema.config import Config
from fsdplaunch.config.schema.walk import variable_of
from fsdplaunch.errors import UsageError
from fsdplaunch.launch.entry_points import AGENT

DEFAULT_PORT = 29500


def agent_command(config: Config, *, python: str, run_id: str, run_dir: Path, workers: int) -> list[str]:
    """Return the agent's command line, up to what the workers are to run.

    Args:
        config: Resolved configuration.
        python: The interpreter that agent and workers run in.
        run_id: Unique per run and attempt.
        run_dir: The run's folder.
        workers: Workers on this node.

    Raises:
        UsageError: Nothing says where the nodes meet, or which one this is.
    """
    launch = config.launch
    return [
        python,
        "-u",
        str(AGENT),
        f"--nnodes={launch.nodes or config.num_machines}",
        f"--nproc-per-node={workers}",
        f"--max-restarts={launch.max_restarts}",
        f"--monitor-interval={launch.monitor_interval_seconds}",
        f"--role={launch.role}",
        *([f"--event-log-handler={launch.event_log}"] if launch.event_log else []),
        *_rendezvous(config, launch.rendezvous_id or run_id),
        f"--log-dir={run_dir}",
    ]


def _rendezvous(config: Config, name: str) -> list[str]:
    """Return where the agents meet. `is_host` and the local address are always given: torchrun's guesses hang."""
    endpoint = config.launch.rendezvous_endpoint
    if config.num_machines == 1:
        address = config.launch.local_address or "127.0.0.1"
        return [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={endpoint or f'{address}:{config.main_process_port or 0}'}",
            f"--rdzv-id={name}",
            f"--rdzv-conf={_settings(config, is_host='1')}",
            f"--local-addr={address}",
        ]
    if endpoint is None and config.main_process_ip:
        endpoint = f"{config.main_process_ip}:{config.main_process_port or DEFAULT_PORT}"
    if endpoint is None:
        msg = f"num_machines is {config.num_machines}, but nothing says where the nodes meet"
        raise UsageError(msg, hint="set main_process_ip (and main_process_port) to node 0's address")
    if config.machine_rank is None:
        msg = f"num_machines is {config.num_machines}, but nothing says which node this is"
        raise UsageError(
            msg, hint=f"set {variable_of('machine_rank')} on each node: 0 on the first, 1 on the next"
        )
    local = [f"--local-addr={config.launch.local_address}"] if config.launch.local_address else []
    if config.rdzv_backend == "static":
        host, _, port_text = endpoint.rpartition(":")
        place = [f"--master-addr={host}", f"--master-port={port_text}", f"--node-rank={config.machine_rank}"]
        settings = f"--rdzv-conf={_settings(config, limit='timeout')}"
        return [
            "--rdzv-backend=static",
            *place,
            f"--rdzv-id={config.launch.rendezvous_id or endpoint}",
            settings,
            *local,
        ]
    return [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={config.launch.rendezvous_id or endpoint}",
        f"--rdzv-conf={_settings(config, is_host=str(int(config.machine_rank == 0)))}",
        *local,
    ]


def _settings(config: Config, *, limit: str = "join_timeout", **fixed: str) -> str:
    """Return torch's rendezvous settings; what the configuration sets goes last and wins."""
    timeout = max(1, round(config.launch.rendezvous_timeout_seconds))
    settings = fixed | {limit: str(timeout)} | config.launch.rendezvous_options
    return ",".join(f"{name}={value}" for name, value in settings.items())


def join_port(config: Config) -> int:
    """Return the configured port; 0 when any will do."""
    if config.launch.rendezvous_endpoint:
        return int(config.launch.rendezvous_endpoint.rpartition(":")[2])
    return config.main_process_port or (DEFAULT_PORT if config.num_machines > 1 else 0)


def opens_port(config: Config) -> bool:
    """Return whether this node is the one that listens there."""
    return config.num_machines == 1 or config.machine_rank == 0
