"""Parts that are only named, never imported: programs that a launch starts, and what its workers preload."""

from collections.abc import Sequence
from pathlib import Path

from fsdplaunch.config.resolve import uses_xla
from fsdplaunch.config.schema.config import Config

AGENT = Path(__file__).parents[1] / "agent" / "main.py"
"""Started by its path: with -m, python would look in the current folder first, and find modules of the user's."""
BOOTSTRAP = "fsdplaunch.runtime.bootstrap"
"""The module that is every Python worker's entry."""
SSH_REMOTE = "fsdplaunch.cli.ssh_remote"
"""The module that an ssh connection starts on the other node."""
NETWORK_TEST = "fsdplaunch.doctor.network_test"
"""The module that workers run for `fsdplaunch doctor --network`."""
PLAIN_RUN = "fsdplaunch.comparison.record"
"""The module that `fsdplaunch check --compare` runs the script in, as one process."""
PRELOADED = (
    "fsdplaunch.runtime.device",
    "fsdplaunch.runtime.sharding_watch",
    "fsdplaunch.runtime.api.prepare",
    "fsdplaunch.runtime.torch_internals.late_imports",
)
"""What every rank of a sharded run comes to need; the first optimizer alone would import the compiler in each."""


def is_python(command: Sequence[str]) -> bool:
    """Return whether workers run the bootstrap, and not a program of its own."""
    return tuple(command[:2]) == ("-m", BOOTSTRAP)


def is_forked(config: Config, command: Sequence[str]) -> bool:
    """Return whether workers are to be forked from a preloaded interpreter."""
    return bool(config.launch.preload) and is_python(command)


def preload_lists(config: Config, command: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what to import before the fork server is forked, and in it; `command` is the workers'."""
    if not is_forked(config, command):
        return (), ()
    sharding = PRELOADED if config.distributed_type == "FSDP" and not uses_xla(config) else ()
    return ("torch", "torch.distributed"), (BOOTSTRAP, *sharding, *config.launch.preload)
