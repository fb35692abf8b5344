"""Which torch and torch_xla are installed, and whether they are in the tested range. Imports neither."""

import importlib.util
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fsdplaunch.errors import MachineError

Numbers = tuple[int, int]
"""Major and minor version."""

OLDEST: Numbers = (2, 9)
NEWEST: Numbers = (2, 15)
"""The oldest and the newest torch that the tests passed with. pyproject.toml declares the same range."""
PRINTING_GLOO: tuple[Numbers, ...] = ((2, 9), (2, 10))
"""The versions whose gloo writes a line to standard output for every process group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """An installed torch that is outside of the tested range, or does not go with what else is installed."""

    message: str  # the installed version and what is needed, in one line
    hint: str  # what to install instead
    is_fatal: bool  # it cannot work; a torch that is newer than the range is tried

    @property
    def note(self) -> str:
        """Return both in one line, for runs that go on."""
        return f"{self.message}; {self.hint}"

    def raise_if_fatal(self) -> None:
        """Raise when this torch is too old."""
        if self.is_fatal:
            raise MachineError(self.message, hint=self.hint)


def requirement() -> str:
    """Return the range as pip reads it: `torch>=2.9,<2.16`."""
    return f"torch>={_text(OLDEST)},<{_text((NEWEST[0], NEWEST[1] + 1))}"


def how_to_install() -> str:
    """Return what to do where there is no torch."""
    return f"pip install '{requirement()}', or use the environment that has it"


def parse(version: str) -> Numbers | None:
    """Read major and minor version: `2.16.0a0+git1a2b3c` -> (2, 16); None where it does not begin with them.

    What follows does not count: a nightly, candidate or local build of 2.16 has its interfaces, or most of them.
    """
    found = re.match(r"v?(\d+)\.(\d+)(?!\d)", version.strip())
    return (int(found[1]), int(found[2])) if found else None


def installed() -> str | None:
    """Return the version of the torch that `import torch` would import here; None when there is none.

    It is read from the file that torch reads it from, so that it is right for a source tree on PYTHONPATH, too,
    and from the package's metadata where there is no such file.
    """
    text = _version_file()
    if text is None:
        return None
    version = re.search(r"^__version__(?: *: *\w+)? *= *['\"]([^'\"]+)", text, re.MULTILINE)
    return version[1] if version else _from_metadata("torch") or "unknown"


def is_built_for_the_cpu() -> bool:
    """Return whether the installed torch says of itself that it was built without CUDA and without ROCm."""
    text = _version_file() or ""
    return all(re.search(rf"^{name}\b[^=\n]*= *None$", text, re.MULTILINE) for name in ("cuda", "hip"))


def _version_file() -> str | None:
    try:
        found = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        found = None
    if found is None or found.origin is None:
        return None
    with suppress(OSError):
        return Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    return ""


def _from_metadata(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def installed_numbers() -> Numbers | None:
    """Return major and minor version of the installed torch; None when there is none, or they cannot be read."""
    version = installed()
    return parse(version) if version else None


def mismatch(version: str) -> Mismatch | None:
    """Compare a version, as torch writes it, with the tested range; None when it is inside."""
    numbers = parse(version)
    if numbers is not None and OLDEST <= numbers <= NEWEST:
        return None
    tested = f"{_text(OLDEST)} to {_text(NEWEST)}"
    is_fatal = numbers is not None and numbers < OLDEST
    what = "is too old" if is_fatal else "is too new to have been tested" if numbers else "cannot be compared"
    return Mismatch(
        message=f"torch {version} {what}: fsdplaunch is tested with torch {tested}",
        hint=f"pip install '{requirement()}'",
        is_fatal=is_fatal,
    )


def installed_mismatch() -> Mismatch | None:
    """Compare the installed torch with the tested range; None when it is inside, or when there is none."""
    version = installed()
    return mismatch(version) if version else None


@cache
def refuse_too_old() -> None:
    """Raise where the installed torch is too old; what imports it next might fail less clearly."""
    if (found := installed_mismatch()) is not None:
        found.raise_if_fatal()


def _text(numbers: Numbers) -> str:
    return ".".join(map(str, numbers))


NEWEST_RELEASE = "2.9.0"  # of torch_xla, and of the torch that it needs, as of the tests
_INSTALL = (
    f"pip install '.[xla]' in the clone, into an environment of its own: torch and torch_xla {NEWEST_RELEASE}"
)


def installed_problem() -> Mismatch | None:
    """Return why PyTorch/XLA cannot run with what is installed; None when it can."""
    return problem(installed(), _from_metadata("torch_xla"))


def problem(torch: str | None, torch_xla: str | None) -> Mismatch | None:
    """Return why these versions of torch and torch_xla do not go together; None when they do. None: not there."""
    here = f"torch {torch} is installed" if torch else "torch is not installed"
    if torch_xla is None:
        message = f"PyTorch/XLA needs torch_xla, which is not installed; {here}"
    elif torch is None or parse(torch) != parse(torch_xla):
        needed = ".".join(map(str, parse(torch_xla) or ())) or torch_xla
        message = f"torch_xla {torch_xla} needs torch {needed}, and {here}"
    else:
        return None
    return Mismatch(message=message, hint=_INSTALL, is_fatal=True)
