"""Rank 0's side: find out whether all ranks are in the same call, and fetch full tensors where they are not."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.state.rank0.computed import is_computed, named_computed
from fsdplaunch.runtime.auto.state.rank0.connection import connect
from fsdplaunch.runtime.auto.state.rank0.copies import Copy, copied_from, named_copies
from fsdplaunch.runtime.auto.state.rank0.fetching import (
    OtherShardError,
    before_backward,
    changed_shard,
    fetch,
    other_gradient,
    unknown_tensor,
)
from fsdplaunch.runtime.auto.state.rank0.flat_shards import FlatShard
from fsdplaunch.runtime.auto.state.rank0.made_tensors import named_made
from fsdplaunch.runtime.auto.state.rank0.position import Position
from fsdplaunch.runtime.auto.state.rank0.serving import Server
from fsdplaunch.runtime.auto.state.rank0.shard_names import (
    identity,
    is_copy,
    named_shards,
    parameter_with_gradient,
    shard_ranks,
)
from fsdplaunch.runtime.auto.state.saving_threads import await_main_thread
from fsdplaunch.runtime.collectives.monitored_barrier import monitored_barrier, name_ranks
from fsdplaunch.runtime.torch_internals.process_groups import default_timeout

_AHEAD_HINT = "make this call after optimizer.step(); or on all ranks, if it needs gradients"
_ALONE_HINT = "save what state_dict() returned before anything that all ranks do"


class Rank0Saves:
    """What one rank needs so that rank 0 can save alone.

    Args:
        hook_context: This worker's.
        position: Where its script is.
    """

    def __init__(self, hook_context: HookContext, position: Position) -> None:
        self.hook_context = hook_context
        self.position = position
        connections = connect()
        self.connections = {each.rank: each for each in connections} if hook_context.rank == 0 else {}
        self.server = None if hook_context.rank == 0 else Server(hook_context, position, connections[0])
        self.names: dict[tuple[Any, ...], tuple[str, DTensor]] = {}
        self.shards: set[tuple[Any, ...]] = set()
        self.where: dict[int, str] = {}
        self._alone_at: tuple[int, ...] = ()

    def meet(self, call: str, hint: str, ranks: Sequence[int] | None = None) -> bool:
        """Wait until every rank is in this call, or until rank 0 knows that the others are not.

        Args:
            call: What it is, the same on all ranks.
            hint: What to do where only some ranks make the call.
            ranks: Those that must make it, of one replica, this one among them; left out, all.

        Returns:
            Whether all are in it. False on rank 0 only: the others wait for it, with what they hold unchanged.

        Raises:
            CheckpointError: Some ranks are in it and some are not, or a rank has ended.
        """
        with self.position.being_inside(call):
            if self.connections and not self._others_are_in(call, hint, ranks):
                return False
            monitored_barrier(call, hint, ranks)
        self.position.met[ranks is not None] += (
            1  # after it has left: a rank inside with the same number is in another call
        )
        return True

    def _others_are_in(self, call: str, hint: str, ranks: Sequence[int] | None) -> bool:
        answers = self._ask({"kind": "meet", "call": call, **self._counts(replica=ranks is not None)}, ranks)
        elsewhere = {rank: answer for rank, answer in answers.items() if not answer["here"]}
        if not elsewhere:
            return True
        self.names = {}
        rank, answer = next(iter(elsewhere.items()))
        if len(elsewhere) < len(answers):
            here = [0, *(rank for rank in answers if rank not in elsewhere)]
            msg = f"{call} was called on {name_ranks(here)} only: rank {rank} went on, to {answer['where']}"
            raise CheckpointError(msg, hint=hint)
        for rank, answer in answers.items():
            if answer["steps"] != self.position.steps:
                msg = (
                    f"{call}: rank {rank} has made {answer['steps']} optimizer steps (it is at {answer['where']})"
                    f" and rank 0 {self.position.steps}, so their shards are not of one step"
                )
                ahead = answer["steps"] > self.position.steps  # rank 0 is between its backward and its step
                raise CheckpointError(msg, hint=_AHEAD_HINT if ahead else hint)
        self._note_alone(answers)
        return False

    def _counts(self, *, replica: bool = False) -> dict[str, int]:
        passes, collectives = self.position.counts()
        met = self.position.met[replica]
        return {"passes": passes, "collectives": collectives, "met": met, "replica": int(replica)}

    def _place(self) -> tuple[int, ...]:
        return self.position.steps, *self.position.counts(), *self.position.met

    def _note_alone(self, answers: dict[int, dict[str, Any]]) -> None:
        """Remember where the others wait while rank 0 makes a call alone."""
        self.names = {}
        self.where = {rank: answer["where"] for rank, answer in answers.items()}
        self._alone_at = self._place()

    def _ask(self, request: dict[str, Any], ranks: Sequence[int] | None = None) -> dict[int, dict[str, Any]]:
        asked = {rank: each for rank, each in self.connections.items() if ranks is None or rank in ranks}
        for connection in asked.values():
            connection.send(request)
        return {rank: each.receive(default_timeout()) for rank, each in asked.items()}

    def full(self, tensor: DTensor, call: str) -> torch.Tensor:
        """Return a full tensor in host memory, of the shards that the other ranks hand over. On rank 0.

        Args:
            tensor: A parameter, a tensor of an optimizer's state, what was computed from them, or a copy.
            call: The script's call that needs it, for errors.

        Raises:
            CheckpointError: It is none of these, a rank has another one by now, or a rank has ended.
        """
        if not self.names:
            self._look_up()
        copy = self._copy_of_now(tensor)
        name, shard = self.names.get(identity(tensor if copy is None else copy.source), (None, None))
        if name is None or shard is None:
            of = parameter_with_gradient(tensor, self.hook_context)
            raise unknown_tensor(tensor.shape, call) if of is None else other_gradient(of, call)
        full = self._pull(name, shard, call)
        return full if copy is None else copy.again(full)

    def _copy_of_now(self, tensor: DTensor) -> Copy | None:
        """Return how a copy of what every rank has was made, if that has not changed since."""
        named = self.names[identity(tensor)][0] if identity(tensor) in self.shards else None
        own = named is not None and not is_computed(named)  # a parameter; or state, which may begin as a copy
        copy = None if own else copied_from(tensor)
        if copy is None or identity(copy.source) not in self.shards:
            return None  # every rank must have made it
        return copy if copy.is_of(self.names[identity(copy.source)][1], tensor) else None

    def _look_up(self) -> None:
        """Find the names of what this rank has a shard of."""
        named = (*named_computed(), *named_shards(self.hook_context))
        shards = {identity(value): (name, value) for name, value in named}
        shards |= {identity(value): (name, value) for name, value in named_made(shards)}
        names = {key: name for key, (name, _) in shards.items()}
        copies = {identity(value): (name, value) for name, value in named_copies(names)}
        self.shards, self.names = set(shards), {**copies, **shards}

    def _pull(self, name: str, shard: DTensor | FlatShard, call: str) -> torch.Tensor:
        rank = self.hook_context.rank
        asked = [self.connections[other] for other in shard_ranks(shard, rank) if other != rank]
        try:
            return fetch(name, shard, asked, self.position.steps)
        except OtherShardError as error:
            if is_copy(name):
                raise unknown_tensor(shard.shape, call) from None
            if self.hook_context.batches.await_backward():
                raise before_backward(call) from None
            raise changed_shard(name, call, error.rank, self.where[error.rank]) from None

    def flat(self, name: str, shard: FlatShard, call: str, steps: int) -> torch.Tensor:
        """Return a full tensor of what FSDP1 has divided, as `full` does.

        Args:
            name: By which ranks know it.
            shard: Rank 0's.
            call: The script's, for errors.
            steps: Optimizer steps that had been made when the script called it.

        Raises:
            CheckpointError: The model was trained since, another rank's shard is of another moment, or it ended.
        """
        await_main_thread(f"what {call} returned")
        if self.position.steps != steps:
            msg = f"what {call} returned on rank 0 only is read when the model has been trained further"
            raise CheckpointError(
                msg, hint="copy it before the next step: {k: v.clone() for k, v in state.items()}"
            )
        if self._alone_at != self._place():
            self.meet(f"reading what {call} returned", _ALONE_HINT)  # others are elsewhere, and wait there
        return self._pull(name, shard, call)

    def calls_alone(self) -> bool:
        """Return whether rank 0 alone calls for the state of an optimizer of FSDP1; others do not wait in it."""
        self.position.states += 1
        answers = self._ask({"kind": "states", "count": self.position.states, **self._counts()})
        if any(answer["here"] for answer in answers.values()):
            return False
        self.position.states -= 1
        if all(answer["steps"] == self.position.steps for answer in answers.values()):
            self._note_alone(answers)
        return True

    def kept(self, rank: int, optimizer: int, place: tuple[int, int, int]) -> dict[str, Any]:
        """Return what another rank's optimizer keeps of a parameter in a flat one; see `described`."""
        answer = self._ask({"kind": "kept", "optimizer": optimizer, "place": place}, [rank])[rank]
        return dict(answer["kept"])

    def done(self) -> None:
        """Let the other ranks forget what they looked up for a save."""
        self.names = {}
        for connection in self.connections.values():
            connection.send({"kind": "done"})

    def close(self) -> None:
        """End, at the end of the process: rank 0 tells the others, which serve until then."""
        self.position.end()
        for connection in self.connections.values():
            with contextlib.suppress(CheckpointError):  # it has ended before
                connection.send({"kind": "end"})
        for connection in self.connections.values():
            connection.wait_until_closed(default_timeout())  # rank 0 may have the store that the others need
        if self.server is not None:
            self.server.thread.join()


_opened: list[Rank0Saves] = []


def open_once(hook_context: HookContext) -> None:
    """Connect the ranks, the first time that a model is sharded. Collective."""
    if hook_context.size > 1 and not _opened:
        _opened.append(Rank0Saves(hook_context, hook_context.position))


def rank0_saves() -> Rank0Saves | None:
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
        _opened.pop().close()
