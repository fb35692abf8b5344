"""What kubectl and ssh print: tame on a terminal, untouched elsewhere."""

import os
import pty
import sys
import tty
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from fsdplaunch.launch.schedulers import kubernetes
from fsdplaunch.launch.schedulers.ssh import READY, SessionSpec, SshSessions

PRINTED = b"\x1b[32mgreen\x1b[0m \x1b]0;title\x07 \xc2\x9b2J \xe2\x80\xae end\n"
TAME = b"\x1b[32mgreen\x1b[0m \\x1b]0;title\\x07 \\xc2\\x9b2J \\xe2\\x80\\xae end\n"
POD = {"metadata": {"name": "pod", "labels": {}}, "status": {"phase": "Running"}}


@pytest.fixture
def on_terminal(monkeypatch) -> Iterator[Callable[[Callable[[], object]], bytes]]:
    """Return what does something with a terminal in the place of our streams, and returns what that has got."""
    ours, theirs = pty.openpty()
    tty.setraw(theirs)

    def shown(act: Callable[[], object]) -> bytes:
        for name in ("stdout", "stderr"):  # in the test itself, as pytest sets them anew for each phase
            monkeypatch.setattr(sys, name, stream)
        act()
        seen = b""
        while not seen.endswith(b"\n"):  # a terminal hands on bit by bit
            seen += os.read(ours, 1 << 16)
        return seen

    with os.fdopen(theirs, "w") as stream:
        yield shown
    os.close(ours)


def printing(folder: Path) -> list[str]:
    (folder / "printed").write_bytes(PRINTED)
    return ["sh", "-c", f"head -c 30 {folder}/printed; sleep 0.1; tail -c +31 {folder}/printed"]


@pytest.mark.parametrize("follow", [False, True])
def test_what_pods_print_cannot_steer_the_terminal(tmp_path, monkeypatch, on_terminal, follow):
    monkeypatch.setattr(kubernetes, "words_for", lambda *_: printing(tmp_path))
    monkeypatch.setattr(kubernetes, "state_of", lambda _: ("done", False))
    monkeypatch.setattr(kubernetes, "read", lambda *_: {"items": [POD]})
    show = partial(kubernetes.follow, tell=lambda _: None) if follow else kubernetes.show_logs
    assert on_terminal(lambda: show({"name": "n"})) == TAME


def test_what_nodes_over_ssh_print_cannot_steer_the_terminal(tmp_path, on_terminal):
    words = printing(tmp_path)
    words[-1] = f"echo '{READY}' >&2; {words[-1]}"

    def run() -> None:
        sessions = SshSessions(lambda *_: None, needed=1, beat_seconds=1)
        sessions.start(SessionSpec(host="a", words=words, task={}))
        assert sessions.wait(start_seconds=10, end_seconds=1) is None
        sessions.hang_up()

    assert on_terminal(run) == TAME
