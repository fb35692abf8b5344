"""What ranks have shards of, under names that all of them know, and how one is read beside the main thread."""

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdplaunch.errors import CheckpointError, ShardingError
from fsdplaunch.runtime.auto import HookContext
from fsdplaunch.runtime.auto.rank0.position import Place
from fsdplaunch.runtime.auto.rank0.side_channel import Connection, bytes_of, connect
from fsdplaunch.runtime.collectives import waits
from fsdplaunch.runtime.collectives.waits import in_torch, monitored_barrier, name_ranks, user_line
from fsdplaunch.runtime.inspection import clean_name, joined
from fsdplaunch.runtime.inspection.units import is_over_all_ranks, is_unit
from fsdplaunch.runtime.messages import calling_lines, script_line
from fsdplaunch.runtime.state_dict.gather import are_files_of_ranks, await_main_thread, spooled
from fsdplaunch.runtime.torch_internals.distributed import default_timeout, local_tensor, shape_and_offset
from fsdplaunch.runtime.torch_internals.fsdp import is_in_flat_parameter, shards_by_place
from fsdplaunch.runtime.torch_internals.modules import own_parameters
from fsdplaunch.runtime.torch_internals.tensors import storage_identity, tree_leaves, tree_map

_SETTLING_SECONDS = 2.0


def sharded_parameters(model: Any) -> Iterator[tuple[str, DTensor]]:
    """Yield a model's sharded parameters with their names, gathered now or not."""
    shards: dict[tuple[int, str], Any] = {}
    for unit in filter(is_unit, model.modules()):
        shards |= shards_by_place(unit)
    for path, module in model.named_modules():
        for attribute, param in list(own_parameters(module)):
            shard = shards.get((id(module), attribute), param)
            if isinstance(shard, DTensor):
                yield clean_name(joined(path, attribute)), shard


def named_shards(hook_context: HookContext) -> Iterator[tuple[str, DTensor]]:
    """Yield every sharded parameter, of models and of optimizers, and every sharded tensor of their state.

    Names are JSON. Optimizers may train shards that no model has: copies of the weights in higher precision.
    """
    for model, number in list(hook_context.numbers.items()):
        for name, param in sharded_parameters(model):
            yield json.dumps(["model", number, name]), param
    for number, optimizer in hook_context.numbered_optimizers():
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for index, param in enumerate(params):
            if isinstance(param, DTensor):
                yield json.dumps(["trained", number, index]), param
            for key, value in list(optimizer.state.get(param, {}).items()):
                if isinstance(value, DTensor):
                    yield json.dumps(["state", number, index, key]), value


def identity(tensor: Any) -> tuple[Any, ...]:
    """Return what two tensors share if they are the same shard; a transposed one of a square is another."""
    local = local_tensor(tensor)
    return storage_identity(local), local.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def shard_ranks(tensor: DTensor, rank: int) -> list[int]:
    """Return the ranks whose shards together are the full tensor, of the replica that `rank` is in."""
    mesh = tensor.device_mesh.mesh
    mine = (mesh == rank).nonzero()
    if not len(mine):
        return []
    for axis, placement in reversed(list(enumerate(tensor.placements))):
        if placement.is_replicate():
            mesh = mesh.select(axis, int(mine[0][axis]))
    return [int(each) for each in mesh.reshape(-1)]


def part_of(full: torch.Tensor, shape: Any, offset: Any) -> torch.Tensor:
    """Return the part of a full tensor that is one rank's shard."""
    for axis, (length, start) in enumerate(zip(shape, offset, strict=True)):
        full = full.narrow(axis, start if length else 0, length)
    return full


def on_host(tensor: Any, after: torch.cuda.Event | None) -> torch.Tensor:
    """Return a shard in host memory, in another thread than the main one, as it is after an event, or now.

    On a GPU the copy must not wait for what the main thread has in its stream: that may be a collective which
    waits for rank 0, which waits for this copy. Nothing behind such a collective has run, so the shard has the
    values of rank 0's step whatever the host has queued since.
    """
    local = local_tensor(tensor).detach()
    if not local.is_cuda:
        return local.contiguous()
    with torch.cuda.device(local.device):
        if after is not None:
            after.synchronize()
        else:  # what is queued, or for a while: then a collective in it waits for rank 0
            queued, deadline = torch.cuda.Event(), time.monotonic() + _SETTLING_SECONDS
            queued.record(torch.cuda.default_stream(local.device))
            while not queued.query() and time.monotonic() < deadline:
                time.sleep(0.005)
        with torch.cuda.stream(torch.cuda.Stream(local.device)):
            return local.contiguous().cpu()


_LOOK_SECONDS = 0.05
STILL_SECONDS = 3.0
"""How long the script must have stood in one place inside torch to count as waiting."""
_BUSY = 0.2  # share of a processor from which on it counts as computing there, not as waiting

_UNKNOWN = "is neither a current parameter nor current optimizer state"
_KNOWN = (
    "save model.state_dict() and optimizer.state_dict(), called on rank 0; keep averages of weights in a"
    " copy.deepcopy of the model; or have every rank make this call, as reading a gradient needs"
)
_ALL_RANKS = "take it out of `if rank == 0:`, and let rank 0 print or write"


class Server:
    """The thread of every rank but rank 0: it hands over this rank's shards while the script waits for rank 0."""

    def __init__(self, hook_context: HookContext, connection: Connection) -> None:
        self._hook_context, self._position, self._connection = hook_context, hook_context.position, connection
        self._shards: dict[str, DTensor] = {}
        self.thread = threading.Thread(target=self._serve, name="fsdplaunch-shards", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        answers = {"meet": self._answer_call, "state": self._answer_state, "shard": self._send_shard}
        with contextlib.suppress(CheckpointError):  # rank 0 is gone: its own failure is reported there
            while (request := self._connection.receive())["kind"] != "end":
                if request["kind"] == "done":
                    self._shards = {}
                else:
                    answers[request["kind"]](request, Place(**request["place"]))
            with self._position.moved:
                self._position.moved.wait_for(lambda: self._position.ended)
        self._connection.close()

    def _answer_call(self, request: dict[str, Any], place: Place) -> None:
        position = self._position  # of two calls alike, the one that rank 0 is in
        self._answer(request, place, lambda: position.inside == request["call"] and position.met == request["met"])

    def _answer_state(self, request: dict[str, Any], place: Place) -> None:
        key, count = (place.steps, place.passes, request["met"]), request["count"]

        def made() -> str | None:  # in the place of rank 0's
            calls = self._position.states.get(key, ())
            return calls[count - 1] if len(calls) >= count else None

        self._answer(request, place, lambda: made() == request["call"], lambda: made() is not None)

    def _answer(
        self,
        request: dict[str, Any],
        place: Place,
        is_here: Callable[[], bool],
        is_elsewhere: Callable[[], bool] = lambda: False,
    ) -> None:
        """Answer whether the script is where rank 0 is, when that is known."""
        position, still = self._position, _Standstill()
        while True:
            # In a call with rank 0's number: not in one that rank 0 has left, and this rank is about to leave.
            waits = position.inside is not None and position.met == request["met"]
            gone = waits or is_elsewhere() or position.ended or position.place().is_past(place) or still.lasts()
            here = is_here()  # last: the script moves on between the two, and what it has come to stays known
            if here or gone:
                break
            with position.moved:
                position.moved.wait(_LOOK_SECONDS)
        self._shards = {}
        where = "the end of the script" if position.ended else user_line(_main_frame())
        self._connection.send({"here": here, "where": where})

    def _send_shard(self, request: dict[str, Any], place: Place) -> None:
        now = self._position.place()  # before the marks: what moves on between the two leaves one
        # Where this rank's shards last had the values of rank 0's place. Its host may have gone on, with
        # collectives that return early: through the next pass, and further steps. Its device cannot: it waits for
        # rank 0 in that pass. So what counts is what comes first after rank 0's place. A pass: the shards are
        # still those before it. A step: they are if a collective that rank 0 has not come to was before it. If
        # none was, nothing has kept the device, nor the host of a CPU, from making it, and the shards are of
        # another step. Where collectives wait, as gloo's do, no rank makes a step behind one that rank 0 has not
        # come to.
        mark = next((each for each in list(self._position.marks) if each.is_after(place)), None)
        if not self._shards:
            self._shards = dict(named_shards(self._hook_context))
        shard = self._shards.get(request["name"])
        held = now if mark is None else mark.place
        stepped = mark is not None and mark.is_step and held.collectives <= place.collectives
        answer = {"steps": held.steps + stepped, "changes": held.changes, "shape": None}
        if shard is None or answer["steps"] != place.steps or held.changes != place.changes:
            self._connection.send(answer)
            return
        host = on_host(shard, None if mark is None else mark.event)
        shape, offset = shape_and_offset(shard)
        self._connection.send({**answer, "shape": shape, "offset": offset})
        self._connection.send_bytes(bytes_of(host))


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


class Service:
    """What one rank needs so that rank 0 can save, read and evaluate alone; see `waits.Rank0Service`."""

    def __init__(self, hook_context: HookContext) -> None:
        self._hook_context, self.position = hook_context, hook_context.position
        connections = connect()
        self._connections = {each.rank: each for each in connections} if hook_context.rank == 0 else {}
        self._server = None if hook_context.rank == 0 else Server(hook_context, connections[0])
        self._names: dict[tuple[Any, ...], tuple[str, DTensor]] = {}
        self._where: dict[int, str] = {}
        self._turn = threading.RLock()

    def meets(self, call: str, hint: str, ranks: Sequence[int] | None = None) -> bool:
        """Return whether every rank is in this call; see `Rank0Service.meets`."""
        if ranks is not None:
            monitored_barrier(call, hint, ranks)
            return True
        with self._turn, self.position.being_inside(call):
            if self._connections and not self._others_are_in({"kind": "meet", "call": call}, call, hint):
                return False
            monitored_barrier(call, hint)
        self.position.met += 1  # after it has left: a rank inside with the same number is in another call
        return True

    def alone(self, call: str, hint: str) -> ShardingError:
        """Return the error of a call that rank 0 alone makes, after `meets` was False."""
        rank, where = next(iter(self._where.items()))
        return ShardingError(f"{script_line()} calls {call} on rank 0 only: rank {rank} is at {where}", hint=hint)

    def asks_alone(self, call: str) -> bool:
        """Return whether rank 0 alone asks for the state of shards. The other ranks go on at once."""
        made = f"{call}, {calling_lines()}"  # a function is at the same line for whoever calls it
        calls = self.position.note_state(made)
        request = {"kind": "state", "call": made, "count": len(calls)}
        if not self._connections or self._others_are_in(request, call, _ALL_RANKS):
            return False
        calls.pop()
        return True

    def _others_are_in(self, request: dict[str, Any], call: str, hint: str) -> bool:
        place = asdict(self.position.place())
        for connection in self._connections.values():
            connection.send({**request, "place": place, "met": self.position.met})
        answers = {rank: each.receive(default_timeout()) for rank, each in self._connections.items()}
        self._where = {rank: answer["where"] for rank, answer in answers.items() if not answer["here"]}
        self._names = {}
        if self._where and len(self._where) < len(answers):
            here = [0, *(rank for rank in answers if rank not in self._where)]
            rank, where = next(iter(self._where.items()))
            msg = f"{call} was called on {name_ranks(here)} only: rank {rank} went on, to {where}"
            raise CheckpointError(msg, hint=hint)
        return not self._where

    def full(self, tensor: DTensor, call: str) -> torch.Tensor:
        """Return a full tensor in host memory, of the shards that the other ranks hand over; on rank 0."""
        with self._turn:
            if not self._names:
                self._names = {identity(value): (name, value) for name, value in named_shards(self._hook_context)}
            name, shard = self._names.get(identity(tensor), (None, None))
            if name is None or shard is None:
                shape = tuple(tensor.shape)
                msg = f"{call} was called on rank 0 only, and a tensor of shape {shape} in it {_UNKNOWN}"
                raise CheckpointError(msg, hint=_KNOWN)
            place = self.position.place()
            asked = [self._connections[rank] for rank in shard_ranks(shard, 0) if rank]
            for connection in asked:
                connection.send({"kind": "shard", "name": name, "place": asdict(place)})
            full = torch.empty(shard.shape, dtype=shard.dtype)
            part_of(full, *shape_and_offset(shard)).copy_(local_tensor(shard).detach())
            answers = {each.rank: _receive_part(each, full) for each in asked}  # of all of them, before an error
            for rank, answer in answers.items():
                if answer["shape"] is None:
                    raise _other_state(call, rank, answer, place, self._where.get(rank, "another line"))
            return full

    def done(self) -> None:
        """Let the other ranks forget what they looked up."""
        self._names = {}
        for connection in self._connections.values():
            connection.send({"kind": "done"})

    def close(self) -> None:
        """End, at the end of the process: rank 0 sends that to the others, which serve until then."""
        self.position.end()
        for connection in self._connections.values():
            with contextlib.suppress(CheckpointError):  # it has ended before
                connection.send({"kind": "end"})
        for connection in self._connections.values():
            connection.wait_until_closed(default_timeout())  # rank 0 may have the store that the others need
        if self._server is not None:
            self._server.thread.join()


def _receive_part(connection: Connection, full: torch.Tensor) -> dict[str, Any]:
    answer = connection.receive(default_timeout())
    if answer["shape"] is None:
        return answer
    part = part_of(full, answer["shape"], answer["offset"])
    received = part if part.is_contiguous() else torch.empty(part.shape, dtype=part.dtype)
    connection.receive_into(received)
    if received is not part:
        part.copy_(received)
    return answer


def _other_state(call: str, rank: int, answer: dict[str, Any], place: Place, where: str) -> CheckpointError:
    what, hint = f"rank {rank} has no such tensor (it is at {where})", _KNOWN
    if answer["steps"] != place.steps:
        what = (
            f"rank {rank} has made {answer['steps']} optimizer steps (it is at {where}) and rank 0 {place.steps},"
            " so their shards are not from the same step"
        )
        hint = "make this call after optimizer.step(); or on all ranks, if it needs gradients"
    elif answer["changes"] != place.changes:
        what = f"weights were changed on rank {rank} since (it is at {where})"
        hint = "change weights for a save, and back, on all ranks; or write them before optimizer.step()"
    return CheckpointError(f"{call} was called on rank 0 only, and {what}", hint=hint)


_opened: list[Service] = []


def open_once(hook_context: HookContext) -> None:
    """Connect the ranks, the first time that a model is sharded. Collective."""
    if hook_context.size > 1 and not _opened:
        _opened.append(Service(hook_context))
        waits.provide(_opened[0])


def service() -> Service | None:
    """Return this rank's part, if there are several ranks and a model is sharded."""
    return _opened[0] if _opened else None


def is_open() -> bool:
    """Return whether ranks may still hand over shards, for which the process group must stand."""
    return bool(_opened)


def note_end() -> None:
    """Note that this rank's script has ended, so that rank 0 need not wait for it to get anywhere."""
    for each in _opened:
        each.position.end()


def close() -> None:
    """End it, once."""
    while _opened:
        waits.provide(None)
        _opened.pop().close()


def check_all_ranks(call: str, hint: str = _ALL_RANKS) -> None:
    """Check that every rank makes a call; those that are late are waited for."""
    found = service()
    if found is not None and not found.meets(call, hint):
        raise found.alone(call, hint)


class _Asking(threading.local):
    """Whether this thread is in a `state_dict()`, which asks the modules below for theirs."""

    inside = False


_asking = _Asking()


def state_dict(original: Any, hook_context: HookContext, owner: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand for `state_dict()` of a module or an optimizer, which gives rank 0 alone full tensors; rule 6."""
    if _asking.inside or not _opened or are_files_of_ranks():
        return original(owner, *args, **kwargs)
    _asking.inside = True
    try:
        state = original(owner, *args, **kwargs)
    finally:
        _asking.inside = False
    found, call = service(), f"{type(owner).__name__}.state_dict() at {script_line()}"
    if found is None:
        return state
    if isinstance(owner, Optimizer):
        params = (param for group in owner.param_groups for param in group["params"])
        if any(map(is_in_flat_parameter, params)) and found.asks_alone(call):
            msg = f"{call} was called on rank 0 only, for parameters that FSDP1 has sharded"
            raise CheckpointError(msg, hint="call FSDP.optim_state_dict(model, optimizer) on all ranks")
    shards = [each for each in tree_leaves(state) if isinstance(each, DTensor)]
    # A script that shards itself may call `full_tensor()` of what it gets.
    if not shards or not hook_context.ownership.ours or not all(map(is_over_all_ranks, shards)):
        return state
    await_main_thread(call)
    if not found.asks_alone(call):
        return state
    full: dict[tuple[Any, ...], torch.Tensor] = {}
    for shard in shards:  # tied ones stay tied
        if identity(shard) not in full:
            full[identity(shard)] = spooled(found.full(shard, call))
    found.done()
    return _with_full(owner, state, lambda value: full[identity(value)] if isinstance(value, DTensor) else value)


def _with_full(owner: Any, state: Any, full_or_own: Callable[[Any], Any]) -> Any:
    if isinstance(owner, Optimizer):
        return tree_map(full_or_own, state)
    for name, value in list(state.items()):  # torch's own mapping, with the versions of modules
        state[name] = full_or_own(value)
    return state
