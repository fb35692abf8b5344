"""`fsdplaunch launch`: begin the agent's interpreter, and import meanwhile what plans the run."""

import os
from contextlib import nullcontext, suppress
from typing import Any

from fsdplaunch.errors import LaunchError
from fsdplaunch.features import WARM_CLIENT, feature
from fsdplaunch.launch.agent_process import agent_begun


def launch_script(**options: Any) -> int:
    """Do what `launch.launch_script` does; the options are those of the command."""
    starts_nothing = options["dry_run"] or options["check_only"] or options["script"] is None
    starts_another = options["slurm"] or options["kubernetes"] or options["as_json"]
    with suppress(LaunchError):  # this package was built without warm interpreters
        starts_another = starts_another or feature(WARM_CLIENT).may_be_warm(os.environ)
    with nullcontext() if starts_nothing or starts_another else agent_begun():
        from fsdplaunch.cli import launch

        return launch.launch_script(**options)
