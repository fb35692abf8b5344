"""Launchers on other nodes: the command that each route starts there, and how what they print is shown here.

Every route quotes the command's words in its own way, or not at all. On our terminal, what steers it is taken out
of other programs' output; into a file or pipe it goes as it is.
"""

import os
import selectors
import shutil
import subprocess
import time
from collections.abc import Sequence
from typing import IO, Any, TextIO

from fsdplaunch.display_text import TerminalFilter
from fsdplaunch.errors import LaunchError, MachineError
from fsdplaunch.launch.plan import LaunchTarget

_OWN_KEYS = ("machine_rank", "local_address", "launch.local_address")
_CHUNK = 1 << 16


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


class LateError(LaunchError):
    """A scheduler has not answered in time."""


def ask(words: Sequence[str], *, text: str = "", seconds: float, missing: str, late: str, refused: str) -> str:
    """Run a scheduler's command and return what it prints.

    Args:
        words: The command.
        text: What it reads.
        seconds: How long it may take.
        missing: Hint where there is no such program.
        late: Hint where it does not answer in time.
        refused: Hint where it fails.

    Raises:
        LaunchError: One of these.
    """
    name = words[0]
    if shutil.which(name) is None:
        msg = f"there is no {name} here"
        raise MachineError(msg, hint=missing)
    try:
        done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        msg = f"{name} has not answered within {seconds:.0f} s"
        raise LateError(msg, hint=late) from None
    if done.returncode:
        answer = " ".join(done.stderr.split())[-400:] or f"exit code {done.returncode}"
        msg = f"{name} refused: {answer}"
        raise LaunchError(msg, hint=refused)
    return done.stdout


def stream_for(screen: TextIO | None) -> int | None:
    """Return what a program's stream has to be, for `subprocess`, to be shown on a stream of ours.

    Returns:
        PIPE for a terminal, whose text is to be copied; None where the program itself may write there.
    """
    return subprocess.PIPE if screen is not None and screen.isatty() else None


class Screen:
    """A stream of ours that other programs' output is shown on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._filter = TerminalFilter() if stream.isatty() else None

    def write(self, data: bytes) -> None:
        """Show the next piece of one program's output."""
        self._put(data if self._filter is None else self._filter.part(data))

    def end(self) -> None:
        """Show what was held back, at the end of that output."""
        self._put(b"" if self._filter is None else self._filter.end())

    def _put(self, data: bytes) -> None:
        self._stream.flush()
        self._stream.buffer.write(data)
        self._stream.buffer.flush()


def _copy_piece(source: IO[bytes], screen: Screen) -> bool:
    """Show the next piece of a program's output, once there is one; return whether more may come."""
    data = os.read(source.fileno(), _CHUNK)
    if data:
        screen.write(data)
    else:
        screen.end()
    return bool(data)


def copy_all(source: IO[bytes], screen: Screen) -> None:
    """Show a program's output until its end."""
    while _copy_piece(source, screen):
        pass


class ShownStreams:
    """Streams of several programs, shown as they come; one thread looks after all."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def add(self, process: "subprocess.Popen[bytes]", **screens: TextIO) -> None:
        """Show what a program prints, where it was started with `stream_for`.

        Args:
            process: The program.
            screens: Where its `stdout`, `stderr` are shown.
        """
        for name, screen in screens.items():
            if (source := getattr(process, name)) is not None:
                self._selector.register(source, selectors.EVENT_READ, Screen(screen))

    def copy(self, seconds: float) -> None:
        """Show what comes within some seconds."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not self._turn(left):
                time.sleep(left)

    def copy_all(self) -> None:
        """Show all that is still to come."""
        while self._turn(None):
            pass

    def _turn(self, seconds: float | None) -> bool:
        if not self._selector.get_map():
            return False
        for key, _ in self._selector.select(seconds):
            source: Any = key.fileobj
            if not _copy_piece(source, key.data):
                self._selector.unregister(source)
                source.close()
        return True
