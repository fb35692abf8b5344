"""The ssh clients of a run: start all, show what they say, pass signals on, end together."""

import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fsdplaunch.launch.cluster.ssh import READY, to_line

_KEPT_LINES = 5
POLL_SECONDS = 0.05


@dataclass(slots=True, eq=False)
class Client:
    """One machine's ssh client.

    Attributes:
        host: The machine.
        process: The client.
        ready: The far side has started.
        said: The last lines of its error output before it was.
    """

    host: str
    process: "subprocess.Popen[bytes]"
    ready: bool = False
    said: list[str] = field(default_factory=list)
    reader: threading.Thread | None = None

    def send(self, order: dict[str, Any]) -> None:
        """Give the far side an order."""
        with suppress(OSError, ValueError):
            if self.process.stdin is not None:
                self.process.stdin.write(to_line(order))
                self.process.stdin.flush()

    def hang_up(self) -> None:
        """Close the far side's input: it ends what it has started."""
        with suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()


class Crowd:
    """All clients of a run."""

    def __init__(self, show: Callable[[str, str], None], output: int | None) -> None:
        """Begin with none.

        Args:
            show: Gets each line of a machine's error output, with the machine's name.
            output: Descriptor for the machines' standard output; ours when None.
        """
        self.clients: list[Client] = []
        self._show, self._output = show, output

    def start(self, host: str, words: Sequence[str], order: dict[str, Any]) -> None:
        """Start a client and give its far side the first order."""
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal is ours to pass on
        )
        client = Client(host=host, process=process)
        client.reader = threading.Thread(target=self._read, args=(client,), daemon=True)
        client.reader.start()
        self.clients.append(client)
        client.send(order)

    def _read(self, client: Client) -> None:
        for line in client.process.stderr or ():
            text = line.decode(errors="replace").rstrip("\r\n")
            if not client.ready and text == READY:
                client.ready = True
            elif client.ready:
                self._show(client.host, text)
            else:
                client.said = [*client.said, text][-_KEPT_LINES:]

    def signal(self, number: int) -> None:
        """Have every machine's launcher get a signal."""
        for client in self.clients:
            client.send({"signal": number})

    def wait(self, *, start_seconds: float, end_seconds: float) -> Client | None:
        """Wait for all clients to end.

        Args:
            start_seconds: How long the far sides may take to start.
            end_seconds: How long the others may take once one has ended badly.

        Returns:
            The client that ended badly first, or could not start; None when all ended well.
        """
        begin, bad, since = time.monotonic(), None, 0.0
        while any(client.process.poll() is None for client in self.clients):
            now = time.monotonic()
            if bad is None:
                bad = self._first_bad(late=now - begin > start_seconds)
                since = now
                if bad is not None and not bad.ready:
                    self.hang_up()
            elif now - since > end_seconds:
                self.hang_up()
                if now - since > 2 * end_seconds:
                    self.kill()
            time.sleep(POLL_SECONDS)
        for client in self.clients:
            if client.reader is not None:
                client.reader.join(timeout=1)
        return bad or self._first_bad(late=False)

    def _first_bad(self, *, late: bool) -> Client | None:
        for client in self.clients:
            if client.process.poll() or (client.process.poll() is not None and not client.ready):
                return client
        return next((client for client in self.clients if late and not client.ready), None)

    def hang_up(self) -> None:
        """End every machine's part; machines that have not started are not waited for."""
        for client in self.clients:
            client.hang_up()
            if not client.ready:
                client.process.kill()

    def kill(self) -> None:
        """End the clients themselves."""
        for client in self.clients:
            client.process.kill()
