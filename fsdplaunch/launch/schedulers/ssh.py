"""Nodes over ssh: which there are, what else the configuration says of them, the sessions, and how they end."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fsdplaunch.config.layers import SetValue
from fsdplaunch.config.resolve import node_range
from fsdplaunch.config.schema.config import Config, KeyPath
from fsdplaunch.config.schema.launch_sections import SshSection
from fsdplaunch.display_text import quoted
from fsdplaunch.errors import MachineError, UsageError
from fsdplaunch.launch.entry_points import SSH_REMOTE
from fsdplaunch.launch.schedulers import ShownStreams, stream_for

READY = "fsdplaunch: far side ready"
"""What the remote side, of any version, prints once it runs; everything before is ssh's or the shell's."""
SSH_FAILED = 255
_NAME = re.compile(r"[^\s\x00-\x1f\x7f'\"`$;|&<>()\\]{1,300}")
_ALIVE_TIMES, _CONNECT_SECONDS = 3, 10
_HERE = ("flag", "env")
"""Layers that are about this very run; a file may be another launcher's, which always writes one node."""
_KEPT_LINES, _LONGEST_LINE = 5, 1 << 16
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class SshHost:
    """One node."""

    name: str  # as ssh knows it; may begin with `user@`
    slots: int | None = None  # workers on it, where the hostfile says so


def read_hosts(section: SshSection) -> list[SshHost]:
    """Return the nodes that a configuration names, node 0 first; none may look like an option of ssh."""
    if section.hosts and section.hostfile:
        msg = "ssh.hosts and ssh.hostfile both name nodes"
        raise UsageError(msg, hint="keep one of the two")
    hosts = [SshHost(name=name) for name in section.hosts]
    if section.hostfile:
        hosts = _read_hostfile(Path(section.hostfile))
    for host in hosts:
        if "-" in (host.name[0], host.name.rpartition("@")[2][:1]) or not _NAME.fullmatch(host.name):
            msg = f"{quoted(host.name)} is not a name of a node"
            raise UsageError(msg, hint="name nodes as you would to ssh, for example node1 or me@10.0.0.2")
    twice = {host.name for host in hosts if sum(other.name == host.name for other in hosts) > 1}
    if twice:
        msg = f"{', '.join(sorted(twice))} is named twice"
        raise UsageError(msg, hint="name each node once; slots=N or launch.workers_per_node says its workers")
    return hosts


def _read_hostfile(path: Path) -> list[SshHost]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        msg = f"ssh.hostfile: {path} cannot be read: {(error.strerror or '').lower()}"
        raise UsageError(msg) from None
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        found = re.fullmatch(r"(\S+)(?:\s+slots=0*([1-9][0-9]{0,5}))?", words)
        if not found:
            msg = f"{path}:{number}: {line.strip()!r} is not NAME or NAME slots=N"
            raise UsageError(msg)
        hosts.append(SshHost(name=found[1], slots=int(found[2]) if found[2] else None))
    if not hosts:
        msg = f"ssh.hostfile: {path} names no node"
        raise UsageError(msg)
    return hosts


def check_client() -> None:
    """Check that there is an ssh to start the nodes with."""
    if shutil.which("ssh") is None:
        msg = "this node has no ssh, which would start the others"
        raise MachineError(msg, hint="install OpenSSH's client, or type the same command on each node")


def client_words(
    host: str, section: SshSection, *, python: str, module_path: str | None, silence: float
) -> list[str]:
    """Return the ssh command for one node. It holds nothing of the run: that goes through its input.

    The interpreter is named by its whole path: a shell that is not interactive finds no environment. PYTHONPATH is
    for a package that is not installed. After so long without an answer a node counts as lost.
    """
    far = [*(["env", f"PYTHONPATH={module_path}"] if module_path else []), python, "-P", "-m", SSH_REMOTE]
    return [
        *("ssh", "-T", "-oBatchMode=yes"),
        *section.options,  # of two values for one option, ssh takes the first
        f"-oConnectTimeout={_CONNECT_SECONDS}",
        f"-oServerAliveInterval={max(1, round(silence / _ALIVE_TIMES))}",
        f"-oServerAliveCountMax={_ALIVE_TIMES}",
        *("--", host, "exec " + shlex.join(far)),
    ]


def network_name(host: str, section: SshSection) -> str:
    """Return the network's name for a node: ssh's may be an alias of its own configuration."""
    asked = ["ssh", "-G", *section.options, "--", host]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    found = re.search(r"^hostname (\S+)$", done.stdout, re.MULTILINE)
    return found[1] if found else host.rpartition("@")[2]


def explain_end(status: int, *, was_ready: bool, lines: Sequence[str], python: str) -> tuple[str, str]:
    """Say in words why a node's client ended before its run did, and what to try; it had printed some lines."""
    words = " ".join(line.strip() for line in lines if line.strip())[-200:] or f"ssh ended with {status}"
    if was_ready:
        return (f"the connection was lost ({words})", "is the node up?")
    if status == SSH_FAILED:
        return (words, "does `ssh -o BatchMode=yes` reach it without a question? passwords are never asked for")
    hint = (
        f"{python} needs the same fsdplaunch there: install it, or set ssh.python; or try the ssh command by hand"
    )
    return (f"the launcher did not start: {words}", hint)


def contradictions(
    config: Config, hosts: Sequence[SshHost], origins: Mapping[KeyPath, SetValue]
) -> Iterator[tuple[str, str]]:
    """Yield what would otherwise be overruled by the list of nodes in silence, each with a hint."""

    def set_by(*path: str) -> str | None:
        """Return who sets a key, when it is set for this run."""
        origin = origins.get(path)
        return origin.text if origin is not None and origin.layer in _HERE else None

    count, (least, most), total = len(hosts), node_range(config), config.num_processes
    named = f"ssh names {count} node{'s' if count > 1 else ''}"
    if config.launch.nodes is not None and not least <= count <= most:
        yield f"launch.nodes is {config.launch.nodes}, but {named}", "make the two agree"
    if config.num_machines != count and (set_by("num_machines") or config.num_machines > 1):
        yield f"num_machines is {config.num_machines}, but {named}", "leave num_machines out"
    if who := set_by("machine_rank"):
        yield f"machine_rank is set ({who}), but the list of nodes numbers them", "leave machine_rank out"
    slots, asked = [host.slots for host in hosts if host.slots], config.launch.workers_per_node
    if total != "auto" and len(slots) == count and total != sum(slots):
        yield f"num_processes is {total}, but the hostfile's slots are {sum(slots)}", "leave num_processes out"
    if total != "auto" and not slots and asked is None and total % count:
        words = f"num_processes is {total}, which cannot be split evenly, but {named}"
        yield words, "leave num_processes out, or set each node's workers in a hostfile: NAME slots=N"
    other = next((host for host in hosts if host.slots and host.slots != asked), None)
    if other is not None and (who := set_by("launch", "workers_per_node")):
        words = f"launch.workers_per_node is {asked} ({who}), but {other.name} has slots={other.slots}"
        yield words, "leave one of them out"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """What is started for one node."""

    host: str
    words: Sequence[str]
    task: Mapping[str, Any]  # what the remote side is to do
    output: int | None = None  # where its standard output goes, as `subprocess` says it; ours when None
    # Variables that it gets beside those of the task, and that are shown nowhere.
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)


class SshSession:
    """One node's ssh client."""

    def __init__(self, host: str, process: "subprocess.Popen[bytes]", show: Callable[[str, str], None]) -> None:
        self.host, self.process = host, process
        self.ready = False  # the remote side has started
        self.late = False  # it took too long to start, and was ended
        self.lines: list[str] = []  # the last ones of its error output before it was ready
        self._show, self._heard_out = show, False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        stream = self.process.stderr
        for line in iter(partial(stream.readline, _LONGEST_LINE), b"") if stream is not None else ():
            text = line.decode(errors="replace").rstrip("\r\n")
            if not self.ready and text == READY:
                self.ready = True
            elif self.ready:
                self._show(self.host, text)
            else:
                self.lines = [*self.lines, text][-_KEPT_LINES:]

    @property
    def has_failed(self) -> bool:
        """Return whether it has ended, and not well."""
        status = self.process.poll()
        if status is not None:
            self.hear_out()
        return self.late or (status is not None and (status != 0 or not self.ready))

    def hear_out(self) -> None:
        """Read the rest of its output, READY perhaps in it. Once: a shared connection may keep it open."""
        if not self._heard_out:
            self._heard_out = True
            self._reader.join(timeout=1)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send the remote side a message: one line, whatever it holds."""
        with suppress(OSError, ValueError):
            if self.process.stdin is not None:
                self.process.stdin.write(json.dumps(message).encode() + b"\n")
                self.process.stdin.flush()

    def hang_up(self) -> None:
        """Close the remote side's input: it ends what it has started; one that has not started is killed."""
        with suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        if not self.ready:
            self.process.kill()


class SshSessions:
    """All clients of a run."""

    def __init__(self, show: Callable[[str, str], None], *, needed: int, beat_seconds: float) -> None:
        """Begin with none; `show` gets each line of a node's error output, and its name.

        Fewer nodes than are needed, or any without the first one, cannot go on. The remote sides hear that we are
        there every so many seconds.
        """
        self.clients: list[SshSession] = []
        self._show, self._needed, self._output = show, needed, ShownStreams()
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
        self._output.add(process, stdout=sys.stdout)
        client = SshSession(part.host, process, self._show)
        self.clients.append(client)
        client.send({**part.task, "env": {**part.task.get("env", {}), **part.secrets}})

    def signal(self, number: int) -> None:
        """Have every node's launcher get a signal; may be called in a signal handler."""
        self._signals.append(number)

    def wait(self, *, start_seconds: float, end_seconds: float) -> SshSession | None:
        """Wait for all clients to end; return the one whose bad end was the run's, or that could not start.

        The remote sides may take some seconds to start, and to end once the run has ended badly.
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
            self._output.pause(POLL_SECONDS)
        self._output.copy(1)  # a shared connection may keep it open
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
                status = client.process.returncode
                words = client.lines[-1] if client.lines else f"ended with {status}"
                lost = client.ready and status == SSH_FAILED
                self._show(client.host, f"{'the connection was lost' if lost else words}; {left} nodes go on")
        return None

    def hang_up(self) -> None:
        """End every node's part."""
        for client in self.clients:
            client.hang_up()

    def kill(self) -> None:
        """End the clients themselves."""
        for client in self.clients:
            client.process.kill()
