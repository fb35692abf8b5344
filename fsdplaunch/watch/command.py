"""`fsdplaunch watch` and `launch --live`: a run on the screen, below its output, as lines of a log, as JSON."""

import os
import select
import shutil
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fsdplaunch.cli.output import LINE_SECONDS, Output
from fsdplaunch.cli.runs import LOOK_SECONDS, folder_of
from fsdplaunch.launch.runs import find_run, read_run
from fsdplaunch.run_dir import PLAN
from fsdplaunch.watch import RunWatcher
from fsdplaunch.watch.view import log_line, screen

_HELP = "q quits, the run goes on   l numbers or last lines"
_LIVE_LINES = 10
_PAINT_SECONDS, _SHARE = 0.5, 0.1
"""Between two looks on a screen, and the part of the time that they may take, where ranks are very many."""


def watch(*, run: str, once: bool, file: Path | None, log_dir: Path | None, as_json: bool, out: Output) -> int:
    """Show how a run is doing until it ends, or on a screen until the user leaves; the run does not notice."""
    watcher = RunWatcher(find_run(folder_of(file, log_dir), run))
    with suppress(KeyboardInterrupt):
        if sys.stdin.isatty() and sys.stdout.isatty() and not (once or as_json):
            _show(watcher)
        else:
            _tell(watcher, out, once=once, as_json=as_json)
    return 0


def _tell(watcher: RunWatcher, out: Output, *, once: bool, as_json: bool) -> None:
    """Print a look now and then, until the run has ended."""
    while True:
        began, look = time.monotonic(), watcher.look()
        if as_json:
            out.json(look.to_dict(), indent=2 if once else None)
        else:
            out.data(log_line(look))
        if once or not look.run.unfinished:
            return
        took = time.monotonic() - began
        end = time.monotonic() + max(LOOK_SECONDS if as_json else LINE_SECONDS, took / _SHARE)
        while watcher.run.unfinished and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, LOOK_SECONDS))
            watcher.refresh()


def _show(watcher: RunWatcher) -> None:
    """Fill the terminal until q or Ctrl-C."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the terminal is to be as it was
    with _keys() as pressed, Live(console=Console(), screen=True, auto_refresh=False) as live:
        printed = False
        while True:
            began, (width, height) = time.monotonic(), shutil.get_terminal_size()
            lines = screen(watcher.look(), width, height - 1, watcher.last_line if printed else None)
            lines += [("", "")] * (height - 1 - len(lines)) + [(_HELP[:width], "dim")]
            live.update(Text("\n", no_wrap=True).join(Text(*line) for line in lines), refresh=True)
            key = pressed(max(_PAINT_SECONDS, (time.monotonic() - began) / _SHARE))
            if key in ("q", "Q"):
                return
            printed ^= key == "l"


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Give what waits so many seconds for a key and returns it; keys are not echoed meanwhile."""
    before = termios.tcgetattr(sys.stdin)

    def pressed(seconds: float) -> str:
        if not select.select([sys.stdin], [], [], seconds)[0]:
            return ""
        return os.read(sys.stdin.fileno(), 1).decode(errors="replace") or "q"  # the terminal has gone

    try:
        tty.setcbreak(sys.stdin)
        yield pressed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


@contextmanager
def live_view(run_dir: Path, out: Output) -> Iterator[None]:
    """Show a run that starts now in the last lines of the terminal; what the script prints scrolls above them."""
    if not sys.stderr.isatty() or out.quiet:
        out.note("--live needs a terminal; fsdplaunch watch shows the run from another one")
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_paint, args=(run_dir, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _paint(run_dir: Path, ended: threading.Event) -> None:
    from rich.console import Console
    from rich.text import Text

    def write(text: str) -> None:  # in one piece: others write to the terminal, too
        os.write(sys.stderr.fileno(), text.encode(sys.stderr.encoding, errors="replace"))

    watcher: RunWatcher | None = None
    width = height = rows = 0
    try:
        while not ended.wait(_PAINT_SECONDS):
            if watcher is None and not (run_dir / PLAN).exists():
                continue
            watcher = watcher or RunWatcher(read_run(run_dir))
            if (width, height) != (size := shutil.get_terminal_size()):
                (width, height), rows = size, min(_LIVE_LINES, size.lines // 2)
                # Make room below the cursor, and let only the lines above that scroll.
                write("\n" * rows + f"\x1b[{rows}A\x1b7\x1b[1;{height - rows}r\x1b8")
            console, lines = Console(stderr=True, width=width), screen(watcher.look(), width, rows)[:rows]
            with console.capture() as painted:
                console.print(*(Text(*line) for line in lines), sep="\n", no_wrap=True, crop=True)
            texts = enumerate(painted.get().splitlines(), height - rows + 1)
            write("\x1b7" + "".join(f"\x1b[{place};1H\x1b[2K{text}" for place, text in texts) + "\x1b8")
    finally:
        if rows:
            write(f"\x1b7\x1b[r\x1b[{height - rows + 1};1H\x1b[J\x1b8")
