"""One node's part of a run on several: what was agreed on, what the others ask of it, and how the run ended.

An outcome is what a launcher reports of its node: status, stopped_by, error, attempt (the last one, with its
workers). On arrival `host`, `rank`, `offset_ns` (its clock against node 0's) are added, and `ended` where it was
asked to end because another node had failed.
"""

import signal
import socket
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fsdplaunch.config.schema.kinds import join_endpoint
from fsdplaunch.errors import EXIT_FAILED, EXIT_MACHINE, EXIT_SAVED
from fsdplaunch.launch.remote_steps import NODE_STEPS, packed
from fsdplaunch.launch.root_cause import failure_status, first_failure, is_consequence
from fsdplaunch.run_dir import FOLDER_MODE, MEMBERSHIP, node_folder, write_json

Tell = Callable[[str], None]
"""Shows one line to the user."""
Outcome = Mapping[str, Any]
_INSIST_SECONDS = 1.5
"""After so long a second signal counts as insisting, and kills (launch.stop)."""
_ECHO_SECONDS = 5.0
KILL_SECONDS = 4.0
"""After so long the agent is killed, and its workers with it: torch may wait a minute for a store that is gone."""


class AgentProcess(Protocol):
    """A running agent, as `subprocess.Popen` has it; its workers die with it."""

    pid: int

    def send_signal(self, sig: int, /) -> None:
        """Signal it, if it is still there."""

    def kill(self) -> None:
        """Kill it."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its status; -n for a death by signal n."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAssignment:
    """What holds for the run, the same on every node but for `rank`, `store` and `address`."""

    run_id: str
    rank: int
    names: Sequence[str]  # node 0's name; on node 0 every node's, by rank
    nodes: int
    world: int  # workers over all nodes
    store: str  # HOST:PORT of torch's store, as this node reaches it
    address: str  # this node, as the others reach it
    place: int = 0  # this node's place among them, which is its rank unless the run is elastic
    change: int = 0  # how often nodes have come or gone
    notes: Sequence[str] = ()  # what the user of every node is to read
    secret: str = field(default="", repr=False)
    # On node 0, the socket at which torch's store is to listen: bound before the others hear of it.
    held_port: socket.socket | None = field(default=None, repr=False, compare=False)

    @classmethod
    def from_message(cls, message: Mapping[str, Any], *, store_host: str, **own: Any) -> "RunAssignment":
        """Read the message that starts a node; `own` is what no message says: address, secret, held_port."""
        names = ("run_id", "rank", "names", "nodes", "world", "notes", "place", "change")
        known = {name: message[name] for name in names}
        return cls(**known, store=join_endpoint(store_host, message["store_port"]), **own)


@dataclass(slots=True)
class RunActions:
    """What a launcher does at another node's request; called from the thread that owns the connections."""

    # Pass a signal on to this node's workers; gets how many there have been of its number.
    stop: Callable[[int, int], None] = lambda _number, _count: None
    # End this node's workers, at once when the argument is true: the run cannot go on.
    end: Callable[[bool], None] = lambda _at_once: None
    # Nodes have come or gone: start the workers again with those that there are now.
    change: Callable[[Mapping[str, int]], None] = lambda _members: None
    # Return what this node's ranks do, as node 0 is to hear it.
    steps: Callable[[], list[dict[str, Any]]] = list
    # Keep what another node says of its ranks; called on node 0.
    keep_steps: Callable[[int, list[dict[str, Any]]], None] = lambda _node, _rows: None


def later(seconds: float, action: Callable[[], None]) -> None:
    """Do something after a while, unless this process has ended by then."""
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()


class RunControl:
    """The other nodes: joined, then listened to by a thread of its own for as long as the run goes on."""

    assignment: RunAssignment

    def __init__(self, tell: Tell) -> None:
        self.actions = RunActions()
        self._tell = tell
        self._stopped_by: str | None = None
        self._final: dict[str, Any] | None = None
        self._done = threading.Event()
        self._closing = False

    def start(self) -> None:
        """Listen to the others from now on."""
        threading.Thread(target=self._attend, daemon=True).start()

    def _attend(self) -> None:
        try:
            self._listen()
        except Exception as error:  # without this thread nobody hears from the others: that is not a success
            self._final = end_of_run(EXIT_FAILED, error=f"this node lost track of the others: {error!r}")
            self._done.set()
            self.actions.end(True)
        finally:
            self._disconnect()

    @abstractmethod
    def _listen(self) -> None:
        """Handle what the others send until `close` is called, or the run is over."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Close all connections, in the thread that owns them."""

    @abstractmethod
    def stop(self, number: int, count: int) -> None:
        """Have every node pass a signal on to its workers."""

    @abstractmethod
    def conclude(self, outcome: Outcome) -> dict[str, Any]:
        """Report how this node's workers ended, wait for the others', and return how the run ended."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect from the others."""


@dataclass(slots=True)
class JoinProgress:
    """How far the wait for the nodes has come: shown live on a terminal, else every some seconds by a line."""

    say: Tell  # shows a line that stays
    live: Tell | None = None  # shows a line that the next one replaces; None where nothing is live
    every: float = 10.0
    _start: float = field(default_factory=time.monotonic)
    _last: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Return the time since the wait began."""
        return time.monotonic() - self._start

    def show(self, text: str) -> None:
        """Show the present state; `text` goes without the time."""
        line = f"{text}, {self.seconds:.0f} s"
        if self.live is not None:
            self.live(line)
        elif time.monotonic() - self._last >= self.every:
            self._last = time.monotonic()
            self.say(line)

    def end(self) -> None:
        """Remove the live line."""
        if self.live is not None:
            self.live("")


def outcome_of(record: Mapping[str, Any], status: int) -> dict[str, Any]:
    """Return what to report about this node, by the agent's record and exit status."""
    known = {name: record.get(name) for name in ("stopped_by", "error")}
    return {"status": status, **known, "attempt": (record.get("attempts") or [None])[-1]}


def has_failed(outcome: Outcome) -> bool:
    """Return whether a node's part ended badly of its own accord."""
    return outcome["status"] != 0 and not outcome["stopped_by"] and not outcome.get("ended")


def _workers(outcome: Outcome) -> list[dict[str, Any]]:
    return (outcome.get("attempt") or {}).get("workers") or []


def _all_workers(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    found = []
    for outcome in outcomes:
        offset = int(outcome.get("offset_ns") or 0)
        for worker in _workers(outcome):
            moved = {name: worker[name] + offset for name in ("started_ns", "ended_ns") if worker.get(name)}
            error = worker.get("error")
            if error and error.get("time_ns"):
                moved["error"] = error | {"time_ns": error["time_ns"] + offset}
            found.append(worker | moved | {"host": outcome["host"], "node": outcome["rank"]})
    return sorted(found, key=lambda worker: int(worker["rank"]))


def end_of_run(status: int, **known: Any) -> dict[str, Any]:
    """Return how a run ended: `status`, `stopped_by`, `cause` (a worker), `error`, `lost`, `workers`."""
    return {"status": status, "stopped_by": None, "cause": None, "error": None, "lost": [], "workers": []} | known


def merge_outcomes(outcomes: Sequence[Outcome], *, lost: Sequence[str], stopped_by: str | None) -> dict[str, Any]:
    """Return how the run ended, as `end_of_run` does, by the outcomes of every node that reported one.

    `lost` is what happened to nodes that it could not go on without, `stopped_by` a signal from outside.
    """
    workers = _all_workers(outcomes)
    cause = first_failure(workers)
    final = end_of_run(0, workers=workers)
    failed = [outcome for outcome in outcomes if has_failed(outcome)]
    if lost and (not failed if cause is None else is_consequence(cause)):
        return final | {"status": EXIT_MACHINE, "lost": list(lost)}
    # Workers of a node that was asked to stop may have ended in a way of their own.
    if stopped_by and not any(one["status"] != EXIT_SAVED and not _lost_others(one) for one in failed):
        statuses = []
        for outcome in outcomes:  # where it only followed from the others' end, what the signal does counts
            if outcome["status"] and _lost_others(outcome):
                saved = {worker["code"] for worker in _workers(outcome)} == {0}
                statuses.append(EXIT_SAVED if saved else 128 + getattr(signal, stopped_by, signal.SIGTERM))
            else:
                statuses.append(int(outcome["status"]))
        status = next((status for status in statuses if status not in (0, EXIT_SAVED)), EXIT_SAVED)
        return final | {"status": status, "stopped_by": stopped_by}
    if cause is not None and (failed or stopped_by):
        return final | {"status": failure_status(cause), "cause": cause}
    if failed:
        first = failed[0]
        return final | {"status": first["status"] or EXIT_FAILED, "error": first["error"], "host": first["host"]}
    return final


def _lost_others(outcome: Outcome) -> bool:
    """Return whether a node's part ended because others had: in a stopped run, they were only told before it."""
    cause = first_failure(_workers(outcome))
    return outcome["status"] == EXIT_MACHINE if cause is None else is_consequence(cause)


def no_better_than(own: Outcome, final: Mapping[str, Any]) -> dict[str, Any]:
    """Return how the run ended, which is not well where this node's part did not: whatever the others say."""
    if final["status"] != 0 or own["status"] == 0:
        return dict(final)
    cause = (own.get("attempt") or {}).get("cause")
    return {**final, "status": own["status"], "cause": cause, "error": own["error"]}


def merged_record(record: Mapping[str, Any], final: Mapping[str, Any], *, all_nodes: bool) -> dict[str, Any]:
    """Return the agent's record with the run's end in place of its own, and with every node's workers if asked."""
    attempts = [*(record.get("attempts") or [])]
    if attempts:
        workers = final["workers"] if all_nodes and final.get("workers") else attempts[-1]["workers"]
        attempts[-1] = {**attempts[-1], "workers": workers, "cause": final["cause"]}
    elif final["cause"] is not None:  # it had not started any
        attempts = [{"attempt": 0, "started_ns": None, "ended_ns": 0, "workers": [], "cause": final["cause"]}]
    known = {"stopped_by": final["stopped_by"], "lost": list(final["lost"])}
    return {**record, **known, "attempts": attempts, "error": "\n".join(final["lost"]) or final["error"]}


class SignalRelay:
    """The signals of a run on several nodes: each reaches every agent once, from wherever it came first.

    A scheduler signals all nodes at about the same time, and every launcher then sends that to the others. What
    comes again so soon is not impatience.
    """

    def __init__(self, control: RunControl, agent: AgentProcess, allowed: Sequence[int]) -> None:
        self._control, self._agent, self._allowed = control, agent, allowed
        self._counts: dict[int, int] = {}
        self._heard: dict[int, float] = {}

    def came(self, number: int) -> bool:
        """Send the others a signal that came to this process; return whether the agent is to get it too."""
        if time.monotonic() - self._heard.get(number, -_ECHO_SECONDS) < _ECHO_SECONDS:
            return False
        self._counts[number] = self._counts.get(number, 0) + 1
        self._control.stop(number, self._counts[number])
        return True

    def heard(self, number: int, count: int) -> None:
        """Handle a signal that another node sends."""
        if number in self._allowed and count > self._counts.get(number, 0):
            self._counts[number], self._heard[number] = count, time.monotonic()
            send(self._agent, number)


def send(agent: AgentProcess, number: int) -> None:
    """Signal the agent, if it is still there."""
    with suppress(ProcessLookupError):
        agent.send_signal(number)


def note_members(run_dir: Path, *, change: int, place: int, nodes: int) -> None:
    """Write down for this node's agent which nodes take part; before it starts, and when that changes."""
    write_json(run_dir / MEMBERSHIP, {"change": change, "place": place, "nodes": nodes})


def attach(control: RunControl, agent: AgentProcess, run_dir: Path, names: Sequence[str]) -> SignalRelay:
    """Let the other nodes stop this one's agent, with signals of these names, or have its workers start again."""
    signals = SignalRelay(control, agent, [getattr(signal, name) for name in names])

    def change(members: Mapping[str, int]) -> None:
        note_members(run_dir, **{name: members[name] for name in ("change", "place", "nodes")})

    def end(at_once: bool) -> None:
        send(agent, signal.SIGTERM)
        if at_once:
            later(_INSIST_SECONDS, lambda: send(agent, signal.SIGTERM))
            later(KILL_SECONDS, lambda: send(agent, signal.SIGKILL))

    def steps() -> list[dict[str, Any]]:
        from fsdplaunch.launch.step_summary import read_ranks  # milliseconds, which the start need not wait for

        with suppress(Exception):  # whatever a script has done to its record: it is no reason to lose a node
            return packed(read_ranks(run_dir))
        return []

    def keep_steps(node: int, rows: list[dict[str, Any]]) -> None:
        folder = node_folder(run_dir, node)
        with suppress(OSError):
            if not (folder / "ranks").exists():  # nodes that share their files need no copy
                folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
                write_json(folder / NODE_STEPS, {"ranks": rows})

    control.actions = RunActions(stop=signals.heard, end=end, change=change, steps=steps, keep_steps=keep_steps)
    control.start()
    return signals


def conclude_run(control: RunControl, status: int, record: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Report how this node's part ended; return the run's status, and the agent's record with the run's cause."""
    own = outcome_of(record, status)
    final = no_better_than(own, control.conclude(own))
    control.close()
    return int(final["status"]), merged_record(record, final, all_nodes=control.assignment.rank == 0)
