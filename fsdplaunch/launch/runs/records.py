"""What stands in a run's folder about the run: only what its launcher could have written is believed.

The folder may lie where others write, and what it names is signalled, cancelled, and given to commands.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdplaunch.run_dir import JOB, RESULT, read_json

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,250}[a-z0-9])?")
"""Of an object in a cluster; none begins with a dash, as an option does."""
_JOB = re.compile(r"[0-9]{1,20}(_[0-9]{1,10})?")
_NEEDED = {
    "here": ("host", "pid"),
    "ssh": ("host", "pid"),
    "slurm": ("job",),
    "kubernetes": ("kind", "name"),
}


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _matches(pattern: re.Pattern[str]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and bool(pattern.fullmatch(value))


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "route": lambda value: isinstance(value, str) and value in _NEEDED,
    "host": _is_text,
    "pid": lambda value: type(value) is int and value > 1,
    "since": lambda value: value is None or type(value) is int,
    "hosts": lambda value: isinstance(value, list) and all(map(_is_text, value)),
    "job": _matches(_JOB),
    "kind": lambda value: value in ("job", "trainjob"),
    "name": _matches(_NAME),
    "namespace": lambda value: value is None or _matches(_NAME)(value),
}


def read_job(run_dir: Path) -> dict[str, Any]:
    """Return how a run was started and what its scheduler knows it by; empty where that cannot be believed."""
    job = read_json(run_dir / JOB)
    needed = _NEEDED.get(str(job.get("route")), ("route",))
    is_sound = all(name in job for name in needed)
    is_sound = is_sound and all(check(job[name]) for name, check in _CHECKS.items() if name in job)
    return job if is_sound else {}


def read_end(folder: Path) -> dict[str, Any] | None:
    """Return how one start of a run ended, as its launcher wrote it; None where nothing sound stands."""
    result = read_json(folder / RESULT)
    return result if type(result.get("exit_code")) is int else None
