"""Which errors end a script, and which it goes on after."""

import argparse
import contextlib
import errno
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fsdplaunch.runtime.auto.state.files.caught_errors import goes_on_after

PARSER = argparse.ArgumentParser()


class LockedError(RuntimeError):
    pass


def _asked() -> bool:
    """Return what is found where an operation would fail."""
    return goes_on_after(FileExistsError, sys._getframe(1))


def _waits() -> Any:
    try:
        return _asked()
    except FileExistsError:
        pass


def _waits_for_any() -> Any:
    try:
        return _asked()
    except:  # noqa: E722  (as scripts have it)
        pass


def _returns_or_raises() -> Any:
    try:
        return _asked()
    except OSError as error:
        if error.errno == errno.EEXIST:
            return False
        raise


def _suppresses() -> Any:
    with suppress(ValueError), contextlib.suppress(FileExistsError):
        return _asked()


def _raises_another() -> Any:
    try:
        return _asked()
    except FileExistsError as error:
        raise LockedError from error


def _waits_for_another() -> Any:
    try:
        return _raises_another()
    except LockedError:
        pass


def _waits_outside() -> Any:
    try:
        return _ends()
    except (OSError, KeyError):
        pass


def _ends() -> Any:
    return _asked()


def _cleans_up_and_ends() -> Any:
    try:
        return _asked()
    except OSError:
        print("it is there")
        raise


def _says_so_and_ends() -> Any:
    try:
        return _asked()
    except FileExistsError:
        sys.exit("it is there")


def _ends_by_its_parser() -> Any:
    try:
        return _asked()
    except FileExistsError:
        PARSER.error("it is there")


def _catches_something_else() -> Any:
    try:
        return _asked()
    except (KeyError, FileNotFoundError):
        pass
    except FileExistsError:
        raise
    except OSError:  # does not see it
        pass


def _is_in_the_clause() -> Any:
    try:
        raise KeyError
    except KeyError:
        return _asked()


@pytest.mark.parametrize(
    "function",
    [_waits, _waits_for_any, _returns_or_raises, _suppresses, _waits_for_another, _waits_outside],
)
def test_goes_on(function: Callable[[], bool]) -> None:
    assert function() is True


@pytest.mark.parametrize(
    "function",
    [
        *(_ends, _raises_another, _cleans_up_and_ends, _says_so_and_ends, _ends_by_its_parser),
        *(_catches_something_else, _is_in_the_clause),
    ],
)
def test_ends(function: Callable[[], bool]) -> None:
    assert function() is False


def test_a_script_that_reports_every_error_of_its_run_ends(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("try:\n    found = run()\nexcept Exception:\n    pass\n")
    code = compile(script.read_text(), script, "exec")
    names: dict[str, Any] = {"run": _ends}
    exec(code, names)
    assert names["found"] is False
    names["run"] = lambda: goes_on_after(FileExistsError, sys._getframe(1))  # the module's own line
    exec(code, names)
    assert names["found"] is True


def test_without_a_source_a_clause_counts() -> None:
    names: dict[str, Any] = {"asked": _asked}
    exec("def run():\n    try:\n        return asked()\n    except KeyError:\n        pass", names)
    assert names["run"]() is True
