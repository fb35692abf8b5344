"""What a run is called, and the folder it gets: fresh, or as whoever started all its launchers named it."""

import secrets
import time
from collections.abc import Mapping
from pathlib import Path

GROUP_RUN = "FSDPLAUNCH_GROUP_RUN"
"""Contract variable, not a key: the run's name, where the one who started all nodes' launchers chose it.

With a / at its end it is the name of a folder only, in which every start gets a name and a folder of its own: for
schedulers that start a run again without saying so.
"""


def fresh_run_id() -> str:
    """Return a name for a run: when it was started, and a few characters of its own."""
    return f"{time.strftime('%Y-%m-%d_%H%M%S')}-{secrets.token_hex(2)}"


def run_name(environ: Mapping[str, str]) -> tuple[str, Path]:
    """Return the run's name and its folder inside launch.log_dir: given by the one who started us, else fresh.

    Args:
        environ: The launcher's.
    """
    given = environ.get(GROUP_RUN, "")
    if has_fixed_name(environ):
        return given.replace("/", "-"), Path(given)
    name = fresh_run_id()
    return name, Path(given) / name


def has_fixed_name(environ: Mapping[str, str]) -> bool:
    """Return whether all nodes of the run know its name from the one who started their launchers.

    Args:
        environ: This launcher's.
    """
    given = environ.get(GROUP_RUN, "")
    return bool(given) and not given.endswith("/")
