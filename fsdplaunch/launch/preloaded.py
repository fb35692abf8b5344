"""What an agent and its workers import before a script runs. Pure, for the launcher and the agent."""

from collections.abc import Sequence

from fsdplaunch.config.schema.config import Config
from fsdplaunch.config.xla import uses_xla
from fsdplaunch.launch.entry_points import BOOTSTRAP, PRELOADED

_TORCH = ("torch", "torch.distributed")
_BOOTSTRAP = ("-m", BOOTSTRAP)


def is_python(command: Sequence[str]) -> bool:
    """Return whether workers run the bootstrap, and not a program of its own."""
    return tuple(command[:2]) == _BOOTSTRAP


def is_forked(config: Config, command: Sequence[str]) -> bool:
    """Return whether workers are to be forked from a preloaded interpreter."""
    return bool(config.launch.preload) and is_python(command)


def preload_lists(config: Config, command: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what to import before the fork server is forked, and in it.

    Args:
        config: Resolved configuration.
        command: The workers' command, which follows the agent's options.
    """
    if not is_forked(config, command):
        return (), ()
    sharding = PRELOADED if config.distributed_type == "FSDP" and not uses_xla(config) else ()
    return _TORCH, (BOOTSTRAP, *sharding, *config.launch.preload)
