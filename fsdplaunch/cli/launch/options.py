"""What the command line of `launch` asks for, beside the configuration."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """What the command line asks for, beside the configuration.

    Attributes:
        module: The target is a module, as in `python -m`.
        no_python: The target is a program of its own.
        dry_run: Print the plan; start nothing.
        check_only: Check this machine; start nothing.
        allow_unsharded: Accept a script that never shards a model.
        as_json: Print one JSON object on stdout, and nothing else there.
        route: Hand the run to a scheduler, `slurm` or `kubernetes`, instead of starting it here.
        follow: Show the submitted run's output until it ends.
    """

    module: bool = False
    no_python: bool = False
    dry_run: bool = False
    check_only: bool = False
    allow_unsharded: bool = False
    as_json: bool = False
    route: str | None = None
    follow: bool = False
