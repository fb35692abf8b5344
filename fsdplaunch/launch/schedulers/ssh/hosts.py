"""Nodes over ssh: which there are, the command for each, and what a client's end says about its node."""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdplaunch.config.schema.config import SshSection
from fsdplaunch.errors import MachineError, UsageError
from fsdplaunch.launch.entry_points import SSH_REMOTE
from fsdplaunch.terminal_text import quoted

READY = "fsdplaunch: far side ready"
"""What the remote side, of any version, prints once it runs; everything before is ssh's or the shell's."""
SSH_FAILED = 255
_NOT_FOUND = (126, 127)
_NAME = re.compile(r"[^\s\x00-\x1f\x7f'\"`$;|&<>()\\]{1,300}")
_ALIVE_TIMES, _CONNECT_SECONDS = 3, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class SshHost:
    """One node.

    Attributes:
        name: As ssh knows it; may begin with `user@`.
        slots: Workers on it, where the hostfile says so.
    """

    name: str
    slots: int | None = None


def read_hosts(section: SshSection) -> list[SshHost]:
    """Return the nodes that a configuration names, node 0 first.

    Raises:
        UsageError: Both or a wrong list, or a name that ssh would take for an option.
    """
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
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = [word.partition("=")[2] for word in words[1:] if word.startswith("slots=")]
        if (
            len(words) - len(slots) != 1
            or len(slots) > 1
            or not all(re.fullmatch(r"[0-9]{1,6}", slot) and int(slot) for slot in slots)
        ):
            msg = f"{path}:{number}: {line.strip()!r} is not NAME or NAME slots=N"
            raise UsageError(msg)
        hosts.append(SshHost(name=words[0], slots=int(slots[0]) if slots else None))
    if not hosts:
        msg = f"ssh.hostfile: {path} names no node"
        raise UsageError(msg)
    return hosts


def check_client() -> None:
    """Check that there is an ssh to start the nodes with.

    Raises:
        MachineError: There is none.
    """
    if shutil.which("ssh") is None:
        msg = "this node has no ssh, which would start the others"
        raise MachineError(msg, hint="install OpenSSH's client, or type the same command on each node")


def client_words(
    host: str, section: SshSection, *, python: str, module_path: str | None, silence: float
) -> list[str]:
    """Return the ssh command for one node. It holds nothing of the run: that goes through its input.

    Args:
        host: The node.
        section: The configuration's.
        python: Interpreter there, its whole path: a shell that is not interactive finds no environment.
        module_path: PYTHONPATH of this process, for a package that is not installed.
        silence: Seconds without an answer after which a node counts as lost.
    """
    far = [*(["env", f"PYTHONPATH={module_path}"] if module_path else []), python, "-P", "-m", SSH_REMOTE]
    return [
        "ssh",
        "-T",
        "-oBatchMode=yes",
        *section.options,  # of two values for one option, ssh takes the first
        f"-oConnectTimeout={_CONNECT_SECONDS}",
        f"-oServerAliveInterval={max(1, round(silence / _ALIVE_TIMES))}",
        f"-oServerAliveCountMax={_ALIVE_TIMES}",
        "--",
        host,
        "exec " + shlex.join(far),
    ]


def network_name(host: str, section: SshSection) -> str:
    """Return the network's name for a node: ssh's may be an alias of its own configuration."""
    asked = ["ssh", "-G", *section.options, "--", host]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    found = re.search(r"^hostname (\S+)$", done.stdout, re.MULTILINE)
    return found[1] if found else host.rpartition("@")[2]


def to_line(message: Mapping[str, Any]) -> bytes:
    """Return a message to the remote side: one line, whatever it holds."""
    return json.dumps(message).encode() + b"\n"


def explain_end(status: int, *, was_ready: bool, lines: Sequence[str], python: str) -> tuple[str, str]:
    """Say in words why a node's client ended before its run did, and what to try.

    Args:
        status: The client's.
        was_ready: The remote side had started.
        lines: What came on its error output before.
        python: The interpreter that was to run there.
    """
    words = " ".join(line.strip() for line in lines if line.strip())[-200:] or f"ssh ended with {status}"
    if was_ready:
        return (f"the connection was lost ({words})", "is the node up?")
    if status == SSH_FAILED:
        return (words, "does `ssh -o BatchMode=yes` reach it without a question? passwords are never asked for")
    if status in _NOT_FOUND:
        return (f"it has no {python}", "set ssh.python to the interpreter there")
    if "No module named" in words:
        return (f"{python} there has no fsdplaunch", "install the same version there, or set ssh.python")
    return (f"the launcher did not start: {words}", "try the same ssh command by hand")
