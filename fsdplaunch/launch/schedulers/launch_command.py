"""What a launcher on another node is to run: `fsdplaunch launch` with everything set. Pure.

Every route builds its command here, as a list of words; each route quotes that list in its own way, or not at all.
"""

from collections.abc import Sequence

from fsdplaunch.launch.plan import LaunchTarget

_OWN_KEYS = ("machine_rank", "local_address", "launch.local_address")


def launch_words(
    program: Sequence[str],
    target: LaunchTarget,
    *,
    config: str | None = None,
    overrides: Sequence[str] = (),
    allow_unsharded: bool = False,
    as_json: bool = False,
) -> list[str]:
    """Return one `fsdplaunch launch` command line.

    Args:
        program: What starts fsdplaunch.
        target: What every rank runs.
        config: The file to read; None for the default one.
        overrides: `KEY=VALUE` texts.
        allow_unsharded: Accept a script that never shards a model.
        as_json: Print the result as JSON.
    """
    flags = [
        *(["--json"] if as_json else []),
        *(["--config", config] if config else []),
        *(word for override in overrides for word in ("--set", override)),
        *(["--module"] if target.is_module else []),
        *([] if target.is_python else ["--no-python"]),
        *(["--allow-unsharded"] if allow_unsharded else []),
    ]
    end = ["--"] if target.name.startswith("-") else []
    return [*program, "launch", *flags, *end, target.name, *target.arguments]


def shared_overrides(overrides: Sequence[str]) -> list[str]:
    """Return those of the command line's overrides that hold for every node."""
    return [one for one in overrides if one.partition("=")[0].strip() not in _OWN_KEYS]
