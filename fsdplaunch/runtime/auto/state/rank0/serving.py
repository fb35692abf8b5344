"""The thread of every rank but rank 0: it hands over this rank's shards while the script waits for rank 0."""

import sys
import threading
import time
from typing import Any

from torch.distributed.tensor import DTensor

from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.state.rank0.connection import Connection, bytes_of
from fsdplaunch.runtime.auto.state.rank0.copies import named_copies
from fsdplaunch.runtime.auto.state.rank0.position import Position
from fsdplaunch.runtime.auto.state.rank0.shard_names import (
    ShardName,
    counted_changes,
    identity,
    is_copy,
    named_shards,
    on_host,
)
from fsdplaunch.runtime.collectives.hang_detector import in_torch, user_line
from fsdplaunch.runtime.torch_internals.dtensor import shape_and_offset

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
        self.thread = threading.Thread(target=self._serve, name="fsdplaunch-shards", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        answers = {"meet": self._meet, "shard": self._send_shard}
        try:
            while (request := self.connection.receive())["kind"] != "end":
                if request["kind"] == "done":
                    self.shards = self.copies = {}
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
        self.copies = dict(named_copies({identity(value): name for name, value in self.shards.items()}))

    def _meet(self, request: dict[str, Any]) -> None:
        """Answer when this rank is in the call that rank 0 is in, or waits for rank 0 elsewhere."""
        position, call = self.position, request["call"]
        still = _Standstill()
        while True:
            if position.inside == call and position.met == request["met"]:  # not the same call one turn earlier
                here = True
                break
            if position.ended or _is_past(position, request) or still.lasts():
                here = False
                break
            with position.moved:
                position.moved.wait(_LOOK_SECONDS)
        self.shards = self.copies = {}
        where = "the end of the script" if position.ended else user_line(_main_frame())
        self.connection.send({"here": here, "steps": position.steps, "where": where})

    def _send_shard(self, request: dict[str, Any]) -> None:
        name = request["name"]
        if not self.shards:
            self._look_up()
        shard = self.copies.get(name) if is_copy(name) else self.shards.get(name)
        made = None if shard is None else counted_changes(name, shard)
        if shard is None or made != request["changes"]:
            self.connection.send({"shape": None, "changes": made})
            return
        host = on_host(shard, self.position.event)
        shape, offset = shape_and_offset(shard)
        self.connection.send({"shape": shape, "offset": offset})
        self.connection.send_bytes(bytes_of(host))


def _is_past(position: Position, request: dict[str, Any]) -> bool:
    """Return whether the script has begun something that rank 0 has not: it waits there for rank 0.

    It may also be about to leave a call in which all have met, and which rank 0 has left before.
    """
    if position.inside and position.met == request["met"]:
        return True
    return bool(position.passes > request["passes"] or position.collectives > request["collectives"])


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
