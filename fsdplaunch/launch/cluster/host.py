"""Machine 0's side of the meeting: who is here, may they run together, how is everybody doing, how did it end.

One thread owns the connections: the launcher's own until the run starts, then one in the background.
"""

import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdplaunch.errors import MachineError
from fsdplaunch.launch.cluster.final import conclude, has_failed
from fsdplaunch.launch.cluster.greeting import Greeting, Trouble, assign_ranks, find_troubles
from fsdplaunch.launch.cluster.group import Actions, Agreement, Counter, Mailbox, Tell
from fsdplaunch.launch.cluster.messages import PROTOCOL, Connection, Message, StrangerError, number_of, text_of
from fsdplaunch.launch.cluster.roster import check_reach, roster_of, unreachable

TURN_SECONDS = 0.5
REACH_SECONDS = 15.0
"""How long machines may take to try each other."""
LINGER_SECONDS = 15.0
"""How long the others may take, after their grace, to end when one machine has failed."""


@dataclass(slots=True, eq=False)
class Seat:
    """A machine that has arrived; machine 0's own has no connection.

    Attributes:
        heard: When it last said something, on the monotonic clock.
        offset_ns: What to add to its clock to get ours.
        reached: The machines it could not reach, once it has tried.
        outcome: How its part ended.
        lost: It has gone without a word.
    """

    connection: Connection | None
    came_from: str = ""
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


class Host:
    """The launcher of machine 0, for the others."""

    def __init__(self, listener: socket.socket, greeting: Greeting, terms: Terms, tell: Tell) -> None:
        listener.setblocking(False)
        self.terms = terms
        self.actions = Actions()
        self.agreement: Agreement
        self._tell = tell
        self._listener = listener
        self._own = Seat(connection=None, greeting=greeting)
        self._seats = [self._own]
        self._mail = Mailbox()
        self._running = False
        self._stopped_by: str | None = None
        self._losses: list[str] = []
        self._ended = False
        self._final: Message | None = None
        self._done = threading.Event()
        self._closing = False
        self._said = 0.0

    # -- the meeting ------------------------------------------------------------------------------------------

    def gather(self, counter: Counter) -> Agreement:
        """Wait for the machines, compare them, have them try each other, and let them go.

        Raises:
            MachineError: Not enough came, or they cannot run together; every one that came has been told.
        """
        try:
            self._await_machines(counter)
        finally:
            counter.end()
        troubles = find_troubles(self._greetings, most=self.terms.most)
        if not any(trouble.fatal for trouble in troubles):
            self._number()
            troubles += self._try_each_other()
        fatal = [trouble for trouble in troubles if trouble.fatal]
        if fatal:
            raise self._refuse(fatal)
        self.agreement = self._let_go([trouble.message for trouble in troubles if not trouble.fatal])
        return self.agreement

    @property
    def _present(self) -> list[Seat]:
        return [seat for seat in self._seats if seat.greeting is not None and not seat.lost]

    @property
    def _greetings(self) -> list[Greeting]:
        return [seat.greeting for seat in self._present if seat.greeting is not None]

    def _await_machines(self, counter: Counter) -> None:
        enough_since: float | None = None
        while len(self._present) < self.terms.most:
            here, now = len(self._present), time.monotonic()
            enough_since = (enough_since or now) if here >= self.terms.least else None
            if enough_since is not None and now - enough_since > self.terms.last_call:
                return
            if enough_since is None and counter.seconds > self.terms.seconds:
                raise self._refuse([self._missing()])
            counter.show(f"{here} of {self.terms.least} machines here")
            if now - self._said > 1:
                self._said = now
                self._broadcast(kind="waiting", here=here, of=self.terms.least)
            self._turn()

    def _missing(self) -> Trouble:
        names = ", ".join(one.name for one in self._greetings)
        taken = dict(zip(assign_ranks(self._greetings), self._greetings, strict=True))
        absent = [number for number in range(self.terms.least) if number not in taken]
        who = [self.terms.expected[n] if n < len(self.terms.expected) else f"machine {n}" for n in absent]
        message = (
            f"{len(taken)} of {self.terms.least} machines came within {self.terms.seconds:.0f} s: {names}; "
            f"missing: {', '.join(who)}"
        )
        port = self._listener.getsockname()[1]
        hint = f"start the same command there; can they reach port {port} of {self._own.name}?"
        return Trouble(message=message, hint=hint)

    def _number(self) -> None:
        for seat, rank in zip(self._present, assign_ranks(self._greetings), strict=True):
            seat.rank = rank
        self._seats.sort(key=lambda seat: seat.rank)

    def _try_each_other(self) -> list[Trouble]:
        """Have every machine connect to others, as the workers will."""
        roster = roster_of([(seat.rank, seat.greeting) for seat in self._present if seat.greeting])
        self._broadcast(kind="roster", machines=roster)
        mine = threading.Thread(target=self._try_own, args=(roster,), daemon=True)
        mine.start()
        end = time.monotonic() + REACH_SECONDS
        while any(seat.reached is None for seat in self._present) and time.monotonic() < end:
            self._turn(0.05)
        return unreachable({seat.name: seat.reached for seat in self._present})

    def _try_own(self, roster: list[Message]) -> None:
        self._own.reached = check_reach(roster, own=self._own.rank)

    def _refuse(self, troubles: Sequence[Trouble]) -> MachineError:
        """Tell everybody what is wrong, and return it."""
        message = "; ".join(trouble.message for trouble in troubles)
        hint = troubles[0].hint
        self._broadcast(kind="refused", message=message, hint=hint)
        self._flush()
        self.close()
        return MachineError(message, hint=hint)

    def _let_go(self, notes: list[str]) -> Agreement:
        seats = sorted(self._present, key=lambda seat: seat.rank)
        for seat in seats[1:]:
            self._send_go(seat, seats, notes)
        self._running = True
        address = next((seat.came_from for seat in seats[1:] if seat.came_from), "")
        own = self._own.greeting
        place = (own.address if own else "") or address
        return _agreement(
            seats, self._own, self.terms, f"{_bracketed(place)}:{self.terms.store_port}", place, notes
        )

    def _send_go(self, seat: Seat, seats: Sequence[Seat], notes: Sequence[str]) -> None:
        if seat.connection is not None:
            seat.connection.send(
                kind="go",
                run_id=self.terms.run_id,
                rank=seat.rank,
                names=[one.name for one in seats],
                workers=[one.greeting.workers for one in seats if one.greeting],
                store_port=self.terms.store_port,
                silence=self.terms.silence,
                notes=list(notes),
            )

    # -- the run ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Go on listening in the background."""
        threading.Thread(target=self._attend, daemon=True).start()

    def stop(self, number: int) -> None:
        """Have every machine pass a signal on to its workers."""
        self._mail.post(lambda: self._stop_all(number, None))

    def settle(self, outcome: Mapping[str, Any]) -> Message:
        """Report how this machine's part ended, wait for the others', and return how the run ended."""
        self._mail.post(lambda: self._take_outcome(self._own, dict(outcome)))
        patience = None if outcome["status"] == 0 else self.terms.grace + LINGER_SECONDS
        self._done.wait(patience)
        if self._final is None:
            return self._conclusion()
        return self._final

    def close(self) -> None:
        """Let the others go."""
        self._closing = True
        if not self._running:
            self._shut()

    def _attend(self) -> None:
        while not self._closing:
            self._turn()
            self._look_after_everybody()
        self._flush()
        self._shut()

    def _look_after_everybody(self) -> None:
        now = time.monotonic()
        if now - self._said > min(2.0, self.terms.silence / 4):
            self._said = now
            self._broadcast(kind="ping")
        for seat in self._present:
            silent = now - seat.heard > self.terms.silence
            if seat.connection and seat.outcome is None and (silent or not seat.connection.open):
                why = f"no word for {self.terms.silence:.0f} s" if silent else "its launcher has gone"
                self._lose(seat, why)

    def _lose(self, seat: Seat, why: str) -> None:
        seat.lost = True
        if seat.connection is not None:
            seat.connection.close()
        left = len(self._present)
        if self.terms.least < self.terms.most and not self._ended:
            self._tell(f"lost {seat.name}: {why}; {left} machines go on from the last checkpoint")
            self._broadcast(kind="lost", name=seat.name)
            self.actions.change()
        elif not self._ended:
            self._losses.append(f"lost {seat.name}: {why}")
            self._end(at_once=True)
        self._check_done()

    def _stop_all(self, number: int, sender: Seat | None) -> None:
        from fsdplaunch.launch.cause import signal_name

        self._stopped_by = self._stopped_by or signal_name(number)
        for seat in self._present:
            if seat is not sender and seat.connection is not None:
                seat.connection.send(kind="stop", number=number)
        if sender is not None:
            self.actions.stop(number)

    def _end(self, *, at_once: bool) -> None:
        """One machine has failed or gone: the others need not wait for it."""
        if not self._ended:
            self._ended = True
            self._broadcast(kind="end", at_once=at_once)
            if self._own.outcome is None:
                self.actions.end(at_once)

    def _take_outcome(self, seat: Seat, outcome: dict[str, Any]) -> None:
        seat.outcome = outcome | {
            "host": seat.greeting.host if seat.greeting else seat.came_from,
            "rank": seat.rank,
            "offset_ns": seat.offset_ns,
        }
        if self._ended:
            seat.outcome["ended"] = True  # it was us who asked
        elif has_failed(outcome):
            self._end(at_once=False)
        self._check_done()

    def _check_done(self) -> None:
        if self._final is None and all(seat.outcome is not None for seat in self._present):
            self._final = self._conclusion()
            self._broadcast(kind="final", final=_without_workers(self._final))
            self._flush()
            self._done.set()

    def _conclusion(self) -> Message:
        outcomes = [seat.outcome for seat in self._seats if seat.outcome is not None]
        return conclude(outcomes, lost=self._losses, stopped_by=self._stopped_by)

    # -- connections ------------------------------------------------------------------------------------------

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
        self._seats.append(Seat(connection=Connection(sock), came_from=str(place[0]).removeprefix("::ffff:")))

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
                    self._take(seat, message)
            except (StrangerError, TypeError, KeyError, ValueError):
                connection.close()  # a port scanner, or a torch store that looks for its own

    def _take(self, seat: Seat, message: Message) -> None:
        handlers: dict[str, Callable[[Seat, Message], None]] = {
            "hello": self._greet,
            "reached": lambda seat, message: setattr(seat, "reached", list(message["failed"])),
            "stop": lambda seat, message: self._stop_all(number_of(message, "number") or 15, seat),
            "outcome": lambda seat, message: self._take_outcome(seat, dict(message["outcome"])),
            "ping": lambda _seat, _message: None,
        }
        handlers[text_of(message, "kind")](seat, message)

    def _greet(self, seat: Seat, message: Message) -> None:
        if text_of(message, "protocol") != PROTOCOL:
            self._turn_away(seat, f"{self._own.name} speaks {PROTOCOL}", "install the same version everywhere")
            return
        wanted = text_of(message, "run_id")
        if wanted and wanted != self.terms.run_id:
            self._turn_away(seat, f"{self._own.name} runs {self.terms.run_id}, not {wanted}", "use another port")
            return
        seat.greeting = Greeting.from_message(message["greeting"])
        seat.offset_ns = time.time_ns() - (number_of(message, "time_ns") or time.time_ns())
        if self._running:
            self._greet_late(seat, seat.greeting)

    def _greet_late(self, seat: Seat, greeting: Greeting) -> None:
        """A machine that comes while the run goes on: an elastic run may take it in."""
        others = [one for one in self._present if one is not seat]
        free = next((n for n in range(self.terms.most) if n not in {one.rank for one in others}), None)
        if free is None or self.terms.least == self.terms.most or self._ended:
            words = f"{self._own.name} already runs {self.terms.run_id} with {len(others)} machines"
            self._turn_away(seat, words, "wait for its end, or use another port")
            return
        own = self._own.greeting or greeting
        faults = [fault for fault in find_troubles([own, greeting], most=self.terms.most) if fault.fatal]
        if faults:
            self._turn_away(seat, "; ".join(fault.message for fault in faults), faults[0].hint)
            return
        seat.rank = free
        self._tell(f"{seat.name} joins as machine {free}: all workers start again")
        self._send_go(seat, sorted([*others, seat], key=lambda one: one.rank), [])

    def _turn_away(self, seat: Seat, message: str, hint: str) -> None:
        seat.greeting = None
        if seat.connection is not None:
            seat.connection.send(kind="refused", message=message, hint=hint)

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


def _agreement(
    seats: Sequence[Seat], own: Seat, terms: Terms, store: str, address: str, notes: Sequence[str]
) -> Agreement:
    return Agreement(
        run_id=terms.run_id,
        rank=own.rank,
        names=[seat.name for seat in seats],
        workers=[seat.greeting.workers for seat in seats if seat.greeting],
        store=store,
        address=address,
        notes=tuple(notes),
    )


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _without_workers(final: Message) -> Message:
    """What the other machines are told: the cause is enough for them."""
    return {name: value for name, value in final.items() if name != "workers"} | {"workers": []}
