"""An sshd of our own in each machine's namespace: own keys and settings, nothing of the system's touched."""

import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from tests.cluster.lab import Lab
from tests.cluster.slurm_lab import wait_until

SERVER = """\
Port 22
ListenAddress {address}
HostKey {state}/hostkey
PidFile {state}/sshd{machine}.pid
AuthorizedKeysFile {state}/id.pub
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
"""
CLIENT = """\
Host host*
  User root
  IdentityFile {state}/id
  IdentitiesOnly yes
  StrictHostKeyChecking yes
  UserKnownHostsFile {state}/known_hosts
  LogLevel ERROR
"""


class Sshd:
    """sshd on every machine of a lab.

    Attributes:
        config: The client's settings, for `ssh -F`.
    """

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.state = Path(tempfile.mkdtemp(prefix="sshd-"))
        self.servers: dict[int, subprocess.Popen[bytes]] = {}
        self.config = self.state / "config"

    def up(self) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)
        for name in ("id", "hostkey"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.state / name)]
            subprocess.run(words, check=True, capture_output=True)
        key = " ".join((self.state / "hostkey.pub").read_text().split()[:2])
        hosts = [f"host{machine}" for machine in range(self.lab.size)]
        (self.state / "known_hosts").write_text("".join(f"{host} {key}\n" for host in hosts))
        self.config.write_text(CLIENT.format(state=self.state))
        for machine in range(self.lab.size):
            self.start_machine(machine)

    def start_machine(self, machine: int) -> None:
        file = self.state / f"sshd{machine}.conf"
        text = SERVER.format(address=self.lab.address(machine), state=self.state, machine=machine)
        file.write_text(text)
        server = [
            shutil.which("sshd") or "/usr/sbin/sshd",
            "-D",
            "-f",
            str(file),
            "-E",
            str(file.with_suffix(".log")),
        ]
        words = ["setpriv", "--pdeathsig", "TERM", *self.lab.inside(machine), *server]
        self.servers[machine] = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
        pid_file = self.state / f"sshd{machine}.pid"
        wait_until(lambda: pid_file.exists() and bool(pid_file.read_text().strip()), 10)

    def pause(self, machine: int) -> None:
        """It still accepts connections, by the kernel, and says nothing."""
        self.servers[machine].send_signal(signal.SIGSTOP)

    def go_on(self, machine: int) -> None:
        self.servers[machine].send_signal(signal.SIGCONT)

    def stop_machine(self, machine: int) -> None:
        self.servers[machine].terminate()
        self.servers[machine].wait(5)
        (self.state / f"sshd{machine}.pid").unlink(missing_ok=True)

    def down(self) -> None:
        for server in self.servers.values():
            server.terminate()
            server.wait(5)
        shutil.rmtree(self.state, ignore_errors=True)
