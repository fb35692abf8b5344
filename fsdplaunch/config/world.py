"""How many workers a configuration means, as far as the file alone can tell."""

from fsdplaunch.config.schema import Config


def workers_per_node(config: Config) -> int | None:
    """Workers on each machine, or None when that depends on the machine's GPUs."""
    said = config.launch.workers_per_node
    if isinstance(said, int):
        return said
    if said is None and isinstance(config.num_processes, int) and config.num_processes % config.num_machines == 0:
        return config.num_processes // config.num_machines
    return None


def world_size(config: Config) -> int | None:
    """Workers over all machines, or None when that depends on the machines' GPUs."""
    if isinstance(config.num_processes, int):
        return config.num_processes
    said = config.launch.workers_per_node
    return said * config.num_machines if isinstance(said, int) else None
