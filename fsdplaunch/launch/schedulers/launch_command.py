"""What a launcher on another node is to run: `fsdplaunch launch` with everything set. Pure.

Every route builds its command here, as a list of words; each route quotes that list in its own way, or not at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fsdplaunch.launch.plan import LaunchTarget

_OWN_KEYS = ("machine_rank", "local_address", "launch.local_address")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCommand:
    """One `fsdplaunch launch` command line.

    Attributes:
        target: What every rank runs.
        config: The file to read; None for the default one.
        overrides: `KEY=VALUE` texts.
        allow_unsharded: Accept a script that never shards a model.
        as_json: Print the result as JSON.
    """

    target: LaunchTarget
    config: str | None = None
    overrides: Sequence[str] = ()
    allow_unsharded: bool = False
    as_json: bool = False

    def words(self, program: Sequence[str]) -> list[str]:
        """Return the command line.

        Args:
            program: What starts fsdplaunch.
        """
        flags = [
            *(["--json"] if self.as_json else []),
            *(["--config", self.config] if self.config else []),
            *(word for override in self.overrides for word in ("--set", override)),
            *(["--module"] if self.target.is_module else []),
            *([] if self.target.is_python else ["--no-python"]),
            *(["--allow-unsharded"] if self.allow_unsharded else []),
        ]
        script = self.target.name
        return [
            *program,
            "launch",
            *flags,
            *(["--"] if script.startswith("-") else []),
            script,
            *self.target.arguments,
        ]


def shared_overrides(overrides: Sequence[str]) -> list[str]:
    """Return those of the command line's overrides that hold for every node."""
    return [one for one in overrides if one.partition("=")[0].strip() not in _OWN_KEYS]
