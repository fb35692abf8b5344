"""`fsdplaunch launch`: begin the agent's interpreter, and import meanwhile what plans the run."""

from contextlib import nullcontext
from typing import Any

from fsdplaunch.launch.agent_process import agent_begun


def launch_script(**options: Any) -> int:
    """Do what `launch.launch_script` does; the options are those of the command."""
    elsewhere = options["slurm"] or options["kubernetes"] or options["as_json"]
    starts_nothing = options["dry_run"] or options["check_only"] or options["script"] is None
    with nullcontext() if elsewhere or starts_nothing else agent_begun():
        from fsdplaunch.cli import launch

        return launch.launch_script(**options)
