"""Machine 0's connections: who has come, what they say, and what they are told. One thread at a time owns them."""

import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdplaunch.launch.cluster.greeting import Greeting
from fsdplaunch.launch.cluster.group import Mailbox
from fsdplaunch.launch.cluster.messages import Connection, Message, StrangerError

TURN_SECONDS = 0.5


@dataclass(slots=True, eq=False)
class Seat:
    """A machine that has arrived; machine 0's own has no connection.

    Attributes:
        came_to: The address of ours that it came to.
        heard: When it last said something, on the monotonic clock.
        offset_ns: What to add to its clock to get ours.
        reached: The machines it could not reach, once it has tried.
        outcome: How its part ended.
        lost: It has gone without a word.
    """

    connection: Connection | None
    came_from: str = ""
    came_to: str = ""
    heard: float = field(default_factory=time.monotonic)
    greeting: Greeting | None = None
    rank: int = -1
    offset_ns: int = 0
    reached: list[str] | None = None
    outcome: dict[str, Any] | None = None
    lost: bool = False

    @property
    def name(self) -> str:
        """How people know the machine."""
        return self.greeting.name if self.greeting else self.came_from


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What machine 0 asks of a meeting.

    Attributes:
        run_id: The run's name.
        least: Machines the run needs.
        most: Machines it may have.
        seconds: How long to wait for them.
        last_call: How long to wait for more once the least are here.
        silence: Seconds without a word after which a machine counts as lost.
        grace: Seconds workers get to end.
        store_port: Where torch's store will listen on this machine.
        expected: The machines' names by number, where a scheduler or a list said them.
        address_said: This machine's address is not the one the others come to, but one that was configured.
    """

    run_id: str
    least: int
    most: int
    seconds: float
    last_call: float = 10.0
    silence: float = 10.0
    grace: float = 30.0
    store_port: int
    expected: Sequence[str] = ()
    address_said: bool = False


class Reception:
    """Takes machines in and carries messages; what they mean is for `take` to say."""

    def __init__(self, listener: socket.socket, greeting: Greeting, terms: Terms) -> None:
        listener.setblocking(False)
        self.terms = terms
        self._listener = listener
        self._own = Seat(connection=None, greeting=greeting)
        self._seats = [self._own]
        self._mail = Mailbox()
        self._running = False

    def take(self, seat: Seat, message: Message) -> None:
        """Deal with a message; a KeyError, TypeError or ValueError shows that a stranger sent it."""
        raise NotImplementedError

    @property
    def _present(self) -> list[Seat]:
        return [seat for seat in self._seats if seat.greeting is not None and not seat.lost]

    @property
    def _greetings(self) -> list[Greeting]:
        return [seat.greeting for seat in self._present if seat.greeting is not None]

    def _turn(self, seconds: float = TURN_SECONDS) -> None:
        """Wait for something to happen on any connection, and deal with it."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ, None)
            selector.register(self._mail.reader, selectors.EVENT_READ, None)
            for seat in self._seats:
                if seat.connection is not None and seat.connection.open:
                    selector.register(seat.connection.sock, seat.connection.wants, seat)
            for entry, events in selector.select(seconds):
                if entry.fileobj is self._listener:
                    self._accept()
                elif entry.data is not None:
                    self._serve(entry.data, events)
        for action in self._mail.collect():
            action()
        if not self._running:  # who leaves before the run starts may come again
            self._seats = [seat for seat in self._seats if seat.connection is None or seat.connection.open]

    def _accept(self) -> None:
        try:
            sock, place = self._listener.accept()
        except OSError:
            return
        came_from, came_to = (str(end[0]).removeprefix("::ffff:") for end in (place, sock.getsockname()))
        self._seats.append(Seat(connection=Connection(sock), came_from=came_from, came_to=came_to))

    def _serve(self, seat: Seat, events: int) -> None:
        connection = seat.connection
        if connection is None:
            return
        if events & selectors.EVENT_WRITE:
            connection.flush()
        if events & selectors.EVENT_READ:
            try:
                messages = connection.receive()
                for message in messages:
                    seat.heard = time.monotonic()
                    self.take(seat, message)
            except (StrangerError, TypeError, KeyError, ValueError, AttributeError):
                connection.close()  # a port scanner, or a torch store that looks for its own

    def _broadcast(self, **message: Any) -> None:
        for seat in self._present:
            if seat.connection is not None:
                seat.connection.send(**message)

    def _flush(self, seconds: float = 2.0) -> None:
        """Send what waits before the process goes on."""
        end = time.monotonic() + seconds
        waiting = [seat.connection for seat in self._seats if seat.connection is not None]
        while time.monotonic() < end:
            waiting = [one for one in waiting if one.open and one.wants & selectors.EVENT_WRITE]
            if not waiting:
                return
            for one in waiting:
                one.flush()
            time.sleep(0.01)

    def _shut(self) -> None:
        self._listener.close()
        for seat in self._seats:
            if seat.connection is not None:
                seat.connection.close()
