"""Where this rank's script is: counts that are the same on all ranks whenever they are at the same place.

A rank that has begun a pass or a collective that rank 0 has not come to waits there for rank 0: by its host where
collectives wait (gloo), by its device where they return early (NCCL). Until rank 0 comes nothing that it has can
change, so its shards are safe to read from another thread.
"""

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdplaunch.runtime.inspection.units import is_unit
from fsdplaunch.runtime.torch_internals.distributed import issued_collectives, local_tensor
from fsdplaunch.runtime.torch_internals.fsdp import count_shard_changes, group_refs, is_in_flat_parameter
from fsdplaunch.runtime.torch_internals.modules import untraced
from fsdplaunch.runtime.torch_internals.tensors import change_count

_MOST_MARKS = 1024
"""How far a rank's host may be ahead of its device; drivers take about as many kernels before they block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A place in the script."""

    steps: int  # of optimizers that train shards: others may be one rank's own
    passes: int  # of sharded models, begun by all ranks
    collectives: int  # of the default group since the last step; messages of unequal numbers do not count for long
    changes: int  # how often shards of the models were written to since the last step

    def is_past(self, other: "Place") -> bool:
        """Return whether a rank that is here waits for one that is there."""
        if self.steps != other.steps:
            return self.steps > other.steps
        return self.passes > other.passes or self.collectives > other.collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A pass or a step that begins: where the script was then, and on a GPU what its device had to do before."""

    place: Place
    is_step: bool
    event: torch.cuda.Event | None

    def is_after(self, place: Place) -> bool:
        """Return whether it comes after a place at which rank 0 is."""
        return self.place.steps >= place.steps if self.is_step else self.place.passes >= place.passes


class Position:
    """One rank's place."""

    def __init__(self) -> None:
        self.steps = self.passes = 0
        self.met = 0  # calls that every rank must make, and in which all have met
        self.inside: str | None = None  # the one that this rank is in
        # The calls for states of shards, at the latest places (steps, passes, met).
        self.states: dict[tuple[int, int, int], list[str]] = {}
        self.ended = False  # the script, or it has destroyed the process group
        self.marks: deque[Mark] = deque(maxlen=_MOST_MARKS)
        # Models and optimizers, from one step to the next: a function that trains returns on other ranks while
        # rank 0 still saves in it what its variables held.
        self.held: list[Any] = []
        self.moved = threading.Condition()
        self._watched: weakref.WeakKeyDictionary[nn.Module, tuple[list[Any], list[int]]]
        self._watched = weakref.WeakKeyDictionary()
        self._collectives_at_step = 0

    def place(self) -> Place:
        """Return where the script is now."""
        watched = list(self._watched.values())
        return self._place(
            _replaced_in_all[0] + sum(count_shard_changes(refs) - before[0] for refs, before in watched)
        )

    def watch(self, model: nn.Module) -> None:
        """Count from now on how often a model's shards are written to."""
        refs = [ref for unit in model.modules() if is_unit(unit) for ref in group_refs(unit)]
        self._watched[model] = refs, [count_shard_changes(refs)]

    def begin_pass(self) -> None:
        """Note that a sharded model is called, by all ranks."""
        self._mark(self.place(), is_step=False)
        self.passes += 1
        self.note()

    def begin_step(self) -> None:
        """Note that an optimizer begins to train shards."""
        self.held.clear()  # all ranks have averaged gradients: rank 0 is past what it saved before
        last = self.marks[-1].place if self.marks else None  # between a pass and its step nobody writes
        changes = last.changes if last is not None and last.steps == self.steps else 0
        self._mark(self._place(changes), is_step=True)

    def end_step(self) -> None:
        """Note that an optimizer has trained shards."""
        self._collectives_at_step = issued_collectives()  # first: a thread may look between the two
        self.steps += 1
        _replaced_in_all[0] = 0
        for refs, before in list(self._watched.values()):
            before[0] = count_shard_changes(refs)

    def note_state(self, call: str) -> list[str]:
        """Note a call for the state of shards, and return those that were made at this place."""
        calls = self.states.setdefault((self.steps, self.passes, self.met), [])
        calls.append(call)
        while len(self.states) > _MOST_MARKS:
            del self.states[next(iter(self.states))]
        self.note()
        return calls

    def end(self) -> None:
        """Note that the script is at its end."""
        self.ended = True
        self.note()

    def note(self) -> None:
        """Let the serving thread, if it waits for this rank, look again."""
        with self.moved:
            self.moved.notify_all()

    @contextmanager
    def being_inside(self, call: str) -> Iterator[None]:
        """Note that this rank is in a call that every rank must make."""
        self.inside = call
        self.note()
        try:
            yield
        finally:
            self.inside = None

    def _place(self, changes: int) -> Place:
        collectives = issued_collectives() - self._collectives_at_step
        return Place(steps=self.steps, passes=self.passes, collectives=collectives, changes=changes)

    def _mark(self, place: Place, *, is_step: bool) -> None:
        event = None
        if torch.cuda.is_initialized():
            event = torch.cuda.Event()
            event.record()
        self.marks.append(Mark(place=place, is_step=is_step, event=event))


_replaced_in_all = [0]  # what counts of changes lack since the last step, of parameters whose memory was exchanged


@contextmanager
def counting_one_change(tensor: Any) -> Iterator[None]:
    """Count what gives a shard other memory, which counts its own changes, as one change; on all ranks."""
    before = change_count(tensor) + change_count(local_tensor(tensor))
    yield
    _replaced_in_all[0] += before + 1 - change_count(tensor) - change_count(local_tensor(tensor))


def trains_shards(optimizer: Optimizer) -> bool:
    """Return whether an optimizer trains what is divided over ranks: all ranks step it."""
    trained = (param for group in optimizer.param_groups for param in group["params"])
    return any(isinstance(param, DTensor) or is_in_flat_parameter(param) for param in trained)


_stepping: list[bool] = []


def in_optimizer_step() -> bool:
    """Return whether an optimizer of torch's steps: all ranks do."""
    return bool(_stepping)


def track_position(hook_context: Any) -> None:
    """Count optimizer steps; rule 6."""
    position = hook_context.position

    def begin(optimizer: Optimizer, *_: Any) -> None:
        _stepping.append(True)
        if hook_context.size > 1 and trains_shards(optimizer):
            position.begin_step()

    def end(optimizer: Optimizer, *_: Any) -> None:
        _stepping.clear()
        if trains_shards(optimizer):
            if hook_context.size > 1:
                optimizers = (each for _, each in hook_context.numbered_optimizers())
                position.held[:] = [*hook_context.numbers, *optimizers]
            position.end_step()

    hook_context.undo.callback(register_optimizer_step_pre_hook(untraced(begin)).remove)
    hook_context.undo.callback(register_optimizer_step_post_hook(untraced(end)).remove)
    hook_context.undo.callback(position.held.clear)
