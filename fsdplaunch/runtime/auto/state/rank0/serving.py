"""The thread of every rank but rank 0: it hands over this rank's shards while the script waits for rank 0."""

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor

from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.state.rank0.computed import named_computed
from fsdplaunch.runtime.auto.state.rank0.connection import Connection, bytes_of
from fsdplaunch.runtime.auto.state.rank0.copies import named_copies
from fsdplaunch.runtime.auto.state.rank0.flat_shards import (
    FlatPlace,
    FlatShard,
    Key,
    described,
    find_flat,
    places_in_units,
    state_of,
)
from fsdplaunch.runtime.auto.state.rank0.made_tensors import named_made
from fsdplaunch.runtime.auto.state.rank0.position import Position
from fsdplaunch.runtime.auto.state.rank0.shard_names import (
    ShardName,
    counted_changes,
    extent,
    identity,
    is_copy,
    is_flat,
    named_shards,
    on_host,
)
from fsdplaunch.runtime.collectives.hang_detector import in_torch, user_line

_LOOK_SECONDS = 0.05
STILL_SECONDS = 3.0
"""How long the script must have stood in one place inside torch to count as waiting."""
_BUSY = 0.2
"""Share of a processor from which on it counts as computing there, not as waiting."""


class Server:
    """One rank's.

    Attributes:
        thread: Runs until rank 0 has ended.
    """

    def __init__(self, hook_context: HookContext, position: Position, connection: Connection) -> None:
        self.hook_context = hook_context
        self.position = position
        self.connection = connection
        self.shards: dict[ShardName, DTensor] = {}
        self.copies: dict[ShardName, DTensor] = {}
        self.places: dict[Key, FlatPlace] = {}
        self.thread = threading.Thread(target=self._serve, name="fsdplaunch-shards", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        answers = {
            "meet": self._meet,
            "shard": self._send_shard,
            "kept": self._send_kept,
            "states": self._compare_calls,
        }
        try:
            while (request := self.connection.receive())["kind"] != "end":
                if request["kind"] == "done":
                    self._forget()
                else:
                    answers[request["kind"]](request)
            with self.position.moved:
                self.position.moved.wait_for(lambda: self.position.ended)
        except CheckpointError:  # rank 0 is gone: its failure is told by itself
            pass
        finally:
            self.connection.close()

    def _look_up(self) -> None:
        """Find the names of what this rank has a shard of."""
        self.shards = dict(named_shards(self.hook_context))
        computed = dict(named_computed())
        names = {identity(value): name for name, value in (*computed.items(), *self.shards.items())}
        made = dict(named_made(names))
        names |= {identity(value): name for name, value in made.items()}
        self.copies = {**dict(named_copies(names)), **computed, **made}

    def _forget(self) -> None:
        self.shards, self.copies, self.places = {}, {}, {}

    def _meet(self, request: dict[str, Any]) -> None:
        """Answer when this rank is in the call that rank 0 is in, or waits for rank 0 elsewhere."""
        position, call = self.position, request["call"]
        self._answer(request, lambda: position.inside == call and _has_met(position, request))

    def _answer(self, request: dict[str, Any], is_here: Callable[[], bool]) -> None:
        position, still = self.position, _Standstill()
        while True:
            if is_here():
                here = True
                break
            if position.ended or _is_past(position, request) or still.lasts():
                here = False
                break
            with position.moved:
                position.moved.wait(_LOOK_SECONDS)
        self._forget()
        where = "the end of the script" if position.ended else user_line(_main_frame())
        self.connection.send({"here": here, "steps": position.steps, "where": where})

    def _send_shard(self, request: dict[str, Any]) -> None:
        name, known = request["name"], request["changes"]
        shard = self._find(name)
        made = None if shard is None else counted_changes(name, shard)
        if shard is None or request["steps"] != self.position.steps or (known is not None and made != known):
            self.connection.send({"shape": None, "changes": made})
            return
        host = on_host(shard, self.position.event)
        shape, offset = extent(shard)
        self.connection.send({"shape": shape, "offset": offset, "changes": made})
        self.connection.send_bytes(bytes_of(host))

    def _find(self, name: ShardName) -> DTensor | FlatShard | None:
        if is_flat(name):
            return find_flat(json.loads(name), self._places(), dict(self.hook_context.numbered_optimizers()))
        if not self.shards:
            self._look_up()
        return self.copies.get(name) if is_copy(name) else self.shards.get(name)

    def _places(self) -> dict[Key, FlatPlace]:
        if not self.places:
            self.places = places_in_units()
        return self.places

    def _send_kept(self, request: dict[str, Any]) -> None:
        """Tell what an optimizer keeps of a parameter."""
        place = self._places()[tuple(request["place"])]
        optimizer = dict(self.hook_context.numbered_optimizers()).get(request["optimizer"])
        self.connection.send({"kept": described(state_of(optimizer, place))})

    def _compare_calls(self, request: dict[str, Any]) -> None:
        """Answer when this rank has called for an optimizer's state as often as rank 0, or waits elsewhere."""
        self._answer(request, lambda: self.position.states >= request["count"])


def _is_past(position: Position, request: dict[str, Any]) -> bool:
    """Return whether the script has begun something that rank 0 has not: it waits there for rank 0.

    It may also be about to leave a call in which all have met, and which rank 0 has left before.
    """
    if position.inside and _has_met(position, request):
        return True
    return bool(position.passes > request["passes"] or position.collectives > request["collectives"])


def _has_met(position: Position, request: dict[str, Any]) -> bool:
    """Return whether this rank is in the same turn of a call as rank 0, and not in the one before."""
    return bool(position.met[request["replica"]] == request["met"])


class _Standstill:
    """Finds out whether the main thread waits in one place inside torch, in a call that is not counted."""

    def __init__(self) -> None:
        self.mark: Any = None
        self.since = self.computed = 0.0

    def lasts(self) -> bool:
        """Return whether it has waited there for some seconds."""
        frame = _main_frame()
        mark = (id(frame), frame.f_lasti)
        now, computed = time.monotonic(), time.process_time()
        if mark != self.mark or not in_torch(frame):
            self.mark, self.since, self.computed = mark, now, computed
            return False
        waited = now - self.since
        return waited > STILL_SECONDS and computed - self.computed < _BUSY * waited


def _main_frame() -> Any:
    return sys._current_frames()[threading.main_thread().ident or 0]
