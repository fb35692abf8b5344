"""What kubectl and ssh print: tame on a terminal, untouched elsewhere."""

import os
import pty
import sys
import threading
import tty
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdplaunch.launch.schedulers import kubernetes
from fsdplaunch.launch.schedulers.ssh import READY, SessionSpec, SshSessions

PRINTED = b"\x1b[32mgreen\x1b[0m \x1b]0;title\x07 \xc2\x9b2J \xe2\x80\xae end\n"
TAME = b"\x1b[32mgreen\x1b[0m \\x1b]0;title\\x07 \\xc2\\x9b2J \\xe2\\x80\\xae end\n"
POD = {"metadata": {"name": "pod", "labels": {}}, "status": {"phase": "Running"}}


class Terminal:
    """A terminal in the place of our streams, and what it has been sent."""

    def __init__(self) -> None:
        self._ours, self._theirs = pty.openpty()
        tty.setraw(self._theirs)
        self.stream = os.fdopen(self._theirs, "w")
        self.seen = bytearray()
        threading.Thread(target=self._read, daemon=True).start()

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take the place of our streams; in the test itself, as pytest sets them anew for each phase."""
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, self.stream)

    def _read(self) -> None:
        while True:
            try:
                self.seen += os.read(self._ours, 4096)
            except OSError:
                return

    def holds(self, text: bytes) -> bool:
        end = threading.Event()
        for _ in range(100):
            if text in self.seen:
                break
            end.wait(0.05)
        return text in self.seen and b"\x1b]" not in self.seen


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    shown = Terminal()
    yield shown
    shown.stream.close()


def printing(folder: Path) -> list[str]:
    (folder / "printed").write_bytes(PRINTED)
    return ["sh", "-c", f"head -c 30 {folder}/printed; sleep 0.1; tail -c +31 {folder}/printed"]


@pytest.mark.parametrize("follow", [False, True])
def test_what_pods_print_cannot_steer_the_terminal(tmp_path, monkeypatch, terminal, follow):
    terminal.stand_in(monkeypatch)
    monkeypatch.setattr(kubernetes, "words_for", lambda *_: printing(tmp_path))
    monkeypatch.setattr(kubernetes, "state_of", lambda _: ("done", False))
    monkeypatch.setattr(kubernetes, "read", lambda *_: {"items": [POD]})
    job = {"kind": "job", "name": "n"}
    if follow:
        kubernetes.follow(job, lambda _: None)
    else:
        assert kubernetes.show_logs(job) == 0
    assert terminal.holds(TAME)


def test_what_nodes_over_ssh_print_cannot_steer_the_terminal(tmp_path, monkeypatch, terminal):
    terminal.stand_in(monkeypatch)
    sessions = SshSessions(lambda *_: None, needed=1, beat_seconds=1)
    words = printing(tmp_path)
    words[-1] = f"echo '{READY}' >&2; {words[-1]}"
    sessions.start(SessionSpec(host="a", words=words, task={}))
    assert sessions.wait(start_seconds=10, end_seconds=1) is None
    sessions.hang_up()
    assert terminal.holds(TAME)
