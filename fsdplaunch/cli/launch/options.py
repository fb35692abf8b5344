"""What one `fsdplaunch launch` is asked to do: its own options, and these with configuration and script."""

from collections.abc import Sequence
from dataclasses import dataclass

from fsdplaunch.config.load.load import LoadedConfig
from fsdplaunch.config.schema.config import Config
from fsdplaunch.launch.plan import LaunchTarget
from fsdplaunch.launch.schedulers.launch_command import launch_words

PROGRAM = ("-P", "-m", "fsdplaunch")
"""What follows the interpreter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """The command line's own options, beside the configuration.

    Attributes:
        module: The target is a module, as in `python -m`.
        no_python: The target is a program of its own.
        dry_run: Print the plan; start nothing.
        check_only: Check this machine; start nothing.
        allow_unsharded: Accept a script that never shards a model.
        as_json: Print one JSON object on stdout, and nothing else there.
        route: Hand the run to a scheduler, `slurm` or `kubernetes`, instead of starting it here.
        follow: Show the submitted run's output until it ends.
        noted: Options of accelerate or torchrun that were given and change nothing.
    """

    module: bool = False
    no_python: bool = False
    dry_run: bool = False
    check_only: bool = False
    allow_unsharded: bool = False
    as_json: bool = False
    route: str | None = None
    follow: bool = False
    noted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """One launch, as it was requested.

    Attributes:
        loaded: The configuration and where it comes from.
        target: What every rank runs.
        options: The command line's own options.
        overrides: `KEY=VALUE` texts of the command line.
    """

    loaded: LoadedConfig
    target: LaunchTarget
    options: LaunchOptions
    overrides: Sequence[str] = ()

    @property
    def config(self) -> Config:
        """Return the configuration's values."""
        return self.loaded.config

    @property
    def starts_nothing(self) -> bool:
        """Return whether the launch only shows or checks something."""
        return self.options.dry_run or self.options.check_only

    def words(
        self, program: Sequence[str], config: str | None, *, overrides: Sequence[str] = (), as_json: bool = False
    ) -> list[str]:
        """Return the same launch as a command line for another launcher; see `launch_words`."""
        loose = self.options.allow_unsharded
        return launch_words(
            program, self.target, config=config, overrides=overrides, allow_unsharded=loose, as_json=as_json
        )
