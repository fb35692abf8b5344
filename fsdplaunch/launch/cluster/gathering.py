"""Machine 0 before the run: wait for the machines, compare them, have them try each other, let them go."""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from fsdplaunch.errors import MachineError
from fsdplaunch.launch.cluster.greeting import Trouble, assign_ranks, find_troubles
from fsdplaunch.launch.cluster.group import Agreement, Counter
from fsdplaunch.launch.cluster.messages import Message
from fsdplaunch.launch.cluster.network import is_loopback
from fsdplaunch.launch.cluster.reception import Reception, Seat, Terms
from fsdplaunch.launch.cluster.roster import check_reach, roster_of, unreachable

REACH_SECONDS = 15.0
"""How long machines may take to try each other."""


class Gathering(Reception):
    """The meeting itself."""

    agreement: Agreement
    _said = 0.0

    def gather(self, counter: Counter) -> Agreement:
        """Wait for the machines, compare them, have them try each other, and let them go.

        Raises:
            MachineError: Not enough came, or they cannot run together; every one that came has been told.
        """
        try:
            self._await_machines(counter)
        finally:
            counter.end()
        self._learn_address()
        troubles = find_troubles(self._greetings, most=self.terms.most)
        if not any(trouble.fatal for trouble in troubles):
            self._number()
            troubles += self._try_each_other()
        fatal = [trouble for trouble in troubles if trouble.fatal]
        if fatal:
            raise self._refuse(fatal)
        self.agreement = self._let_go([trouble.message for trouble in troubles if not trouble.fatal])
        return self.agreement

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

    def _learn_address(self) -> None:
        """Be known by the address the others came to, which the workers can reach as well."""
        found = next(
            (seat.came_to for seat in self._present if seat.came_to and not is_loopback(seat.came_to)), None
        )
        if found and self._own.greeting and not self.terms.address_said:
            self._own.greeting = replace(self._own.greeting, address=found)

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
        self._shut()
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
