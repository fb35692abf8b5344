"""Machines as network namespaces on one bridge: each has its own address, name, ports, name table. Needs root."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PREFIXES = ("FSDP_", "FSDPLAUNCH_", "ACCELERATE_", "PARALLELISM_CONFIG_", "TORCHELASTIC_", "SLURM", "PET_")


def campaign(test: Any) -> Any:
    """Leave a test to scripts/campaigns/cluster: together these take minutes."""
    reason = "minutes long together: scripts/campaigns/cluster"
    return pytest.mark.slow(pytest.mark.skipif("FSDPLAUNCH_CAMPAIGN" not in os.environ, reason=reason)(test))


def obstacle() -> str | None:
    """Why there can be no namespaces here, or None."""
    if os.geteuid() != 0:
        return "needs root: network namespaces stand for machines"
    if shutil.which("ip") is None:
        return "needs iproute2: scripts/test --with-system-packages installs it"
    name = f"fl-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"needs CAP_NET_ADMIN: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


def clean_environ() -> dict[str, str]:
    """The caller's environment without configuration, schedulers and GPUs, and with this package."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(PREFIXES)}
    return environ | {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "100", "PYTHONPATH": str(ROOT), "CI": "1"}


class Lab:
    """Some machines.

    Attributes:
        size: How many.
        hosts: Lines of each machine's name table, beside localhost.
    """

    def __init__(self, size: int, number: int, *, hosts: Sequence[str] | None = None) -> None:
        self.size, self.net = size, free_net(100 + number)
        self.bridge = f"flb{os.getpid() % 100000}n{number}"
        self.hosts = [f"{self.address(k)} host{k}" for k in range(size)] if hosts is None else list(hosts)

    def name(self, machine: int) -> str:
        return f"{self.bridge}m{machine}"

    def address(self, machine: int) -> str:
        return f"{self.net}.{machine + 1}"

    @property
    def gateway(self) -> str:
        return f"{self.net}.254"

    def up(self) -> None:
        ip("link", "add", self.bridge, "type", "bridge")
        ip("addr", "add", f"{self.gateway}/24", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")
        for machine in range(self.size):
            name = self.name(machine)
            self.names(machine).parent.mkdir(parents=True)
            self.names(machine).write_text("\n".join(["127.0.0.1 localhost", *self.hosts]) + "\n")
            ip("netns", "add", name)
            ip("link", "add", self.cable(machine), "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", self.cable(machine), "master", self.bridge, "up")
            ip("-n", name, "addr", "add", f"{self.address(machine)}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")

    def names(self, machine: int) -> Path:
        """A machine's name table."""
        return Path("/etc/netns") / self.name(machine) / "hosts"

    @contextlib.contextmanager
    def as_debian_has_it(self) -> Iterator[None]:
        """Each machine's own name is 127.0.1.1, as Debian and Ubuntu are installed."""
        before = {machine: self.names(machine).read_text() for machine in range(self.size)}
        try:
            for machine, text in before.items():
                self.names(machine).write_text(text.replace(f"{self.address(machine)} ", "127.0.1.1 "))
            yield
        finally:
            for machine, text in before.items():
                self.names(machine).write_text(text)

    def cable(self, machine: int) -> str:
        return f"v{os.getpid() % 100000}{self.bridge[-1]}{machine}"

    def cut(self, machine: int) -> None:
        """Packets to and from a machine vanish; nobody is told."""
        ip("link", "set", self.cable(machine), "nomaster")

    def mend(self, machine: int) -> None:
        ip("link", "set", self.cable(machine), "master", self.bridge)

    def inside(self, machine: int) -> list[str]:
        """What a command on a machine begins with."""
        become = f'hostname host{machine}; exec "$@"'
        return ["ip", "netns", "exec", self.name(machine), "unshare", "--uts", "sh", "-c", become, "_"]

    def start(self, machine: int, *command: str | Path, cwd: Path, **env: str) -> "subprocess.Popen[str]":
        """Start a command on a machine, in a process group of its own."""
        return subprocess.Popen(
            [*self.inside(machine), *map(str, command)],
            cwd=cwd,
            env=clean_environ() | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def launch(self, machine: int, *arguments: str | Path, cwd: Path, **env: str) -> "subprocess.Popen[str]":
        """Start `fsdplaunch launch ARGUMENTS` on a machine."""
        return self.start(machine, sys.executable, "-P", "-m", "fsdplaunch", "launch", *arguments, cwd=cwd, **env)

    def processes(self, machine: int) -> dict[int, bytes]:
        """What runs on a machine: command lines by process id."""
        words = ["ip", "netns", "pids", self.name(machine)]
        found = {}
        for pid in subprocess.run(words, capture_output=True, text=True).stdout.split():
            with contextlib.suppress(OSError):
                found[int(pid)] = Path(f"/proc/{pid}/cmdline").read_bytes()
        return found

    def kill(self, machine: int) -> None:
        """Everything on a machine is gone at once, as when the power fails."""
        for pid in self.processes(machine):
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(pid, signal.SIGKILL)

    def down(self) -> None:
        for machine in range(self.size):
            name = self.name(machine)
            self.kill(machine)
            subprocess.run(["ip", "netns", "del", name])
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
        subprocess.run(["ip", "link", "del", self.bridge])


def free_net(second: int) -> str:
    """A net that no other lab on this machine has: two test runs may go on at once."""
    shown = subprocess.run(["ip", "-o", "-4", "addr"], check=True, capture_output=True, text=True).stdout
    nets = (f"10.{second}.{(os.getpid() + step) % 250}" for step in range(250))
    return next(net for net in nets if f" {net}." not in shown)


@contextlib.contextmanager
def lab(size: int, number: int, **more: Any) -> Iterator[Lab]:
    machines = Lab(size, number, **more)
    try:
        machines.up()
        yield machines
    finally:
        machines.down()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def finish(process: "subprocess.Popen[str]", seconds: float = 60) -> tuple[int, str, str]:
    """Wait for a command; return its status, output and error output."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        err += f"\n--- killed after {seconds} s"
    return process.returncode, out, err
