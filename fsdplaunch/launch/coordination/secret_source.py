"""How one node comes to the run's secret: from a variable, or the folder that the nodes share."""

import os
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fsdplaunch.config.schema.config import Config
from fsdplaunch.errors import MachineError, UsageError
from fsdplaunch.files import atomic_file
from fsdplaunch.launch.coordination.placement import NodePlacement
from fsdplaunch.run_secret import SECRET, is_secret, make_secret, proof

_SHARED_SECONDS = 15.0
"""How long a file system that nodes share may show an older file."""
_PATIENCE_SECONDS = 3.0
_LONGEST = 4096


class SecretSource:
    """One node's way to the secret.

    Without a variable of the user's, node 0 makes a secret and leaves it, for as long as nodes may join,
    in a file (0600) in the folder of runs. Nodes that share that folder need nothing else; others get it from the
    user. What a killed launcher has left there is the secret of a run that is over.
    """

    def __init__(self, given: str, shared: Path) -> None:
        self._is_given, self._secret, self._shared = bool(given), given, shared
        self._wrote: tuple[int, int] | None = None

    def offer(self) -> str:
        """Return the secret, on node 0: the given one, or a new one that nodes with the same folder find."""
        self._secret = self._secret or make_secret()
        if not self._is_given and self._wrote is None:
            with suppress(OSError):  # nobody shares what cannot be written
                self._shared.parent.mkdir(parents=True, exist_ok=True)
                with atomic_file(self._shared) as part:
                    part.touch(0o600)
                    part.write_text(f"{self._secret}\n", encoding="ascii")
                    self._wrote = _identity(part)
        return self._secret

    def withdraw(self) -> None:
        """Remove the file again, if it is still ours."""
        with suppress(OSError):
            if self._wrote is not None and _identity(self._shared) == self._wrote:
                self._shared.unlink()

    def wait(self) -> str:
        """Return the secret, on another node, which has connected to node 0; empty when there is none here."""
        if self._is_given:
            return self._secret
        end = time.monotonic() + _PATIENCE_SECONDS
        while not (found := _read_private(self._shared)) and not self._secret and time.monotonic() < end:
            time.sleep(0.1)
        self._secret = found or self._secret
        return self._secret

    def may_change(self, waited: float) -> bool:
        """Return whether another secret may be found in a moment: the folder's, after so many seconds."""
        return not self._is_given and bool(self._secret) and waited < _SHARED_SECONDS

    def refused(self, address: str) -> MachineError:
        """Return what to say when node 0 did not take this node."""
        if not self._secret:
            msg = f"node 0 at {address} asks for the run's secret, and this node has none"
        else:
            msg = f"node 0 at {address} has a different secret from this node: it is another run"
        hint = f"use the command that node 0 printed, or set {SECRET} to the same value on every node"
        return MachineError(msg, hint=hint)


def find_secret(config: Config, place: NodePlacement, environ: Mapping[str, str], *, address: str) -> SecretSource:
    """Return where this node finds the secret; `address` is node 0's, where the configuration does not say it."""
    given = environ.get(SECRET, "")
    if given and not is_secret(given):
        msg = f"{SECRET} is not a run's secret: at least 32 hexadecimal digits"
        raise UsageError(msg, hint="make one with: openssl rand -hex 32")
    name = proof("", place.host or address, str(place.port))[:12]
    return SecretSource(given, Path(config.launch.log_dir).absolute() / f".join-{name}")


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_ino, found.st_mtime_ns


def _read_private(path: Path) -> str:
    """Return what a file of this user's own holds that nobody else can read or write; empty for any other."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            return ""
        text = file.read(_LONGEST).decode(errors="replace").strip()
    return text if is_secret(text) else ""
