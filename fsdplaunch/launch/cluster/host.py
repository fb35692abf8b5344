"""Machine 0's launcher, for the others: how is everybody doing, who stops, how did it end.

One thread owns the connections: the launcher's own until the run starts, then one in the background.
"""

import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from fsdplaunch.launch.cause import signal_name
from fsdplaunch.launch.cluster.final import conclude, has_failed
from fsdplaunch.launch.cluster.gathering import Gathering
from fsdplaunch.launch.cluster.greeting import Greeting, find_troubles
from fsdplaunch.launch.cluster.group import Actions, Tell
from fsdplaunch.launch.cluster.messages import PROTOCOL, Message, number_of, text_of
from fsdplaunch.launch.cluster.reception import Seat, Terms

LINGER_SECONDS = 15.0
"""How long the others may take, after their grace, to end when one machine has failed."""


class Host(Gathering):
    """The launcher of machine 0, for the others: first the meeting, then the run."""

    def __init__(self, listener: socket.socket, greeting: Greeting, terms: Terms, tell: Tell) -> None:
        super().__init__(listener, greeting, terms)
        self.actions = Actions()
        self._tell = tell
        self._stopped_by: str | None = None
        self._losses: list[str] = []
        self._ended = False
        self._final: Message | None = None
        self._done = threading.Event()
        self._closing = False

    def start(self) -> None:
        """Go on listening in the background."""
        threading.Thread(target=self._attend, daemon=True).start()

    def stop(self, number: int, count: int) -> None:
        """Have every machine pass a signal on to its workers."""
        self._mail.post(lambda: self._stop_all(number, count, None))

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

    def _stop_all(self, number: int, count: int, sender: Seat | None) -> None:
        self._stopped_by = self._stopped_by or signal_name(number)
        for seat in self._present:
            if seat is not sender and seat.connection is not None:
                seat.connection.send(kind="stop", number=number, count=count)
        if sender is not None:
            self.actions.stop(number, count)

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

    def take(self, seat: Seat, message: Message) -> None:
        """Deal with what a machine says."""
        handlers: dict[str, Callable[[Seat, Message], None]] = {
            "hello": self._greet,
            "reached": lambda seat, message: setattr(seat, "reached", list(message["failed"])),
            "stop": lambda seat, message: self._stop_all(int(message["number"]), int(message["count"]), seat),
            "outcome": lambda seat, message: self._take_outcome(seat, dict(message["outcome"])),
            "ping": lambda _seat, _message: None,
        }
        kind = text_of(message, "kind")
        if seat.greeting is None and kind != "hello":
            raise KeyError(kind)  # who has not presented itself has no say
        handlers[kind](seat, message)

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


def _without_workers(final: Message) -> Message:
    """What the other machines are told: the cause is enough for them."""
    return {name: value for name, value in final.items() if name != "workers"} | {"workers": []}
