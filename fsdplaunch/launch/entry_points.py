"""Parts that are only named, never imported: programs that a launch starts, and what its workers preload."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fsdplaunch.features import LAYERS, SEQUENCES

if TYPE_CHECKING:
    from fsdplaunch.config.schema.config import Config

AGENT = Path(__file__).parents[1] / "agent" / "main.py"
"""Started by its path: with -m, python would look in the current folder first, and find modules of the user's."""
PLAN_BY = "--plan-by="
"""Stands before the descriptor by which an agent that was begun early gets its command line and variables."""
BOOTSTRAP = "fsdplaunch.runtime.bootstrap"
"""The module that is every Python worker's entry."""
SSH_REMOTE = "fsdplaunch.cli.ssh_remote"
"""The module that an ssh connection starts on the other node."""
NETWORK_TEST = "fsdplaunch.doctor.network_test"
"""The module that workers run for `fsdplaunch doctor --network`."""
PLAIN_RUN = "fsdplaunch.comparison.record"
"""The module that `fsdplaunch check --compare` runs the script in, as one process."""
PRELOADED = ("fsdplaunch.runtime.measuring", "fsdplaunch.runtime.collectives.gloo")
"""What every Python worker imports beside the bootstrap, whatever its script is."""
PRELOADED_TO_SHARD = (
    "fsdplaunch.runtime.api.prepare",
    "fsdplaunch.runtime.compat",
    "fsdplaunch.runtime.state_dict.full_state",
    "fsdplaunch.runtime.torch_internals.late_imports",
)
"""The same of a sharded run; the first optimizer alone would import the compiler in each."""
PRELOADED_HOOKS = ("fsdplaunch.runtime.auto.install",)
"""The same of a script that the bootstrap shards."""


def is_python(command: Sequence[str]) -> bool:
    """Return whether workers run the bootstrap, and not a program of its own."""
    return tuple(command[:2]) == ("-m", BOOTSTRAP)


def is_forked(config: "Config", command: Sequence[str]) -> bool:
    """Return whether workers are to be forked from a preloaded interpreter."""
    return bool(config.launch.preload) and is_python(command)


def preload_lists(config: "Config", command: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what to import before the fork server is forked, and in it; `command` is the workers'."""
    from fsdplaunch.config.resolve import uses_xla

    if not is_forked(config, command):
        return (), ()
    then = [BOOTSTRAP, *PRELOADED]
    if config.distributed_type == "FSDP" and not uses_xla(config):
        sizes = config.parallelism_config
        then += PRELOADED_TO_SHARD
        then += [LAYERS] if sizes.parallelism_config_tp_size > 1 else []
        then += [SEQUENCES] if sizes.parallelism_config_cp_size > 1 else []
        then += PRELOADED_HOOKS if config.launch.shard in ("auto", "always") else ()
        then += ["fsdplaunch.runtime.auto.batch.divided_pass"] if config.launch.keep_global_batch else []
    return ("torch", "torch.distributed"), (*then, *config.launch.preload)
