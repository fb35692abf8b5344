"""The ssh clients of a run: start all, show what they say, pass signals on, end together."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fsdplaunch.launch.schedulers.shown_output import Screen, copy_all, stream_for
from fsdplaunch.launch.schedulers.ssh.hosts import READY, SSH_FAILED, to_line

_KEPT_LINES, _LONGEST_LINE = 5, 1 << 16
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """What is started for one node.

    Attributes:
        host: The node.
        words: The ssh command.
        task: What the remote side is to do.
        secrets: Variables that it gets beside those of the task, and that are shown nowhere.
        output: Where its standard output goes, as `subprocess` says it; ours when None.
    """

    host: str
    words: Sequence[str]
    task: Mapping[str, Any]
    output: int | None = None
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(slots=True, eq=False)
class SshSession:
    """One node's ssh client.

    Attributes:
        host: The node.
        process: The client.
        ready: The remote side has started.
        lines: The last lines of its error output before it was.
        late: It took too long to start, and was ended.
    """

    host: str
    process: "subprocess.Popen[bytes]"
    ready: bool = False
    lines: list[str] = field(default_factory=list)
    late: bool = False
    readers: list[threading.Thread] = field(default_factory=list)

    @property
    def has_failed(self) -> bool:
        """Return whether it has ended, and not well."""
        status = self.process.poll()
        if status is not None:
            self.hear_out()
        return self.late or (status is not None and (status != 0 or not self.ready))

    def hear_out(self) -> None:
        """Read the rest of its output, READY perhaps in it. Once: a shared connection may keep it open."""
        while self.readers:
            self.readers.pop().join(timeout=1)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send the remote side a message."""
        with suppress(OSError, ValueError):
            if self.process.stdin is not None:
                self.process.stdin.write(to_line(message))
                self.process.stdin.flush()

    def hang_up(self) -> None:
        """Close the remote side's input: it ends what it has started."""
        with suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()


class SshSessions:
    """All clients of a run."""

    def __init__(self, show: Callable[[str, str], None], *, needed: int, beat_seconds: float) -> None:
        """Begin with none.

        Args:
            show: Gets each line of a node's error output, with the node's name.
            needed: Nodes without which the run cannot go on; the first one is among them.
            beat_seconds: How often the remote sides hear that we are there.
        """
        self.clients: list[SshSession] = []
        self._show, self._needed = show, needed
        self._beat_seconds, self._last_beat = beat_seconds, time.monotonic()
        self._failed: list[SshSession] = []
        self._signals: list[int] = []

    def start(self, part: SessionSpec) -> None:
        """Start a client and give its remote side its task."""
        process = subprocess.Popen(
            part.words,
            stdin=subprocess.PIPE,
            stdout=stream_for(sys.stdout) if part.output is None else part.output,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal is ours to pass on
        )
        client = SshSession(host=part.host, process=process)
        tasks = [partial(self._read, client)]
        if process.stdout is not None:
            tasks.append(partial(copy_all, process.stdout, Screen(sys.stdout)))
        client.readers = [threading.Thread(target=task, daemon=True) for task in tasks]
        for reader in client.readers:
            reader.start()
        self.clients.append(client)
        client.send({**part.task, "env": {**part.task.get("env", {}), **part.secrets}})

    def _read(self, client: SshSession) -> None:
        stream = client.process.stderr
        for line in iter(partial(stream.readline, _LONGEST_LINE), b"") if stream is not None else ():
            text = line.decode(errors="replace").rstrip("\r\n")
            if not client.ready and text == READY:
                client.ready = True
            elif client.ready:
                self._show(client.host, text)
            else:
                client.lines = [*client.lines, text][-_KEPT_LINES:]

    def signal(self, number: int) -> None:
        """Have every node's launcher get a signal; may be called in a signal handler."""
        self._signals.append(number)

    def wait(self, *, start_seconds: float, end_seconds: float) -> SshSession | None:
        """Wait for all clients to end.

        Args:
            start_seconds: How long the remote sides may take to start.
            end_seconds: How long the others may take once the run has ended badly.

        Returns:
            The client whose bad end was the run's, or that could not start; None when the run ended well.
        """
        begin, bad, since = time.monotonic(), None, 0.0
        while any(client.process.poll() is None for client in self.clients):
            now = time.monotonic()
            self._speak(now)
            if now - begin > start_seconds:
                self._give_up_late()
            if bad is None:
                bad, since = self._look(), now
                if bad is not None and not bad.ready:
                    self.hang_up()
            elif now - since > end_seconds:
                self.hang_up()
                if now - since > 2 * end_seconds:
                    self.kill()
            time.sleep(POLL_SECONDS)
        for client in self.clients:
            client.hear_out()
        return bad or self._look()

    def _speak(self, now: float) -> None:
        messages: list[dict[str, Any]] = []
        while self._signals:
            messages.append({"signal": self._signals.pop(0)})
        if now - self._last_beat > self._beat_seconds:
            self._last_beat = now
            messages.append({})
        for client in self.clients:
            for message in messages:
                client.send(message)

    def _give_up_late(self) -> None:
        for client in self.clients:
            if not client.ready and client.process.poll() is None:
                client.late = True
                client.process.kill()

    def _look(self) -> SshSession | None:
        """Return the failure that ends the run: the first node's, or the one that leaves too few."""
        for client in self.clients:
            if client.has_failed and client not in self._failed:
                self._failed.append(client)
                left = len(self.clients) - len(self._failed)
                if client is self.clients[0] or left < self._needed:
                    return client
                self._show(client.host, f"{_last_words(client)}; {left} nodes go on")
        return None

    def hang_up(self) -> None:
        """End every node's part; nodes that have not started are not waited for."""
        for client in self.clients:
            client.hang_up()
            if not client.ready:
                client.process.kill()

    def kill(self) -> None:
        """End the clients themselves."""
        for client in self.clients:
            client.process.kill()


def _last_words(client: SshSession) -> str:
    if client.ready and client.process.returncode == SSH_FAILED:
        return "the connection was lost"
    return client.lines[-1] if client.lines else f"ended with {client.process.returncode}"
