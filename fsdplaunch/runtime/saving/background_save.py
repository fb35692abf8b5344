"""At most one save that is made while training goes on: copied, written, put in place by a thread of its own.

`dcp.async_save` copies before it returns, or leaves it to the script to wait before its next step; it writes no
full or flat states, and its ranks gather all their plans. Here the optimizer's step waits by itself, if it must.
"""

import atexit
import ctypes
import mmap
import os
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

from fsdplaunch.checkpoint.output_folder import NUMBERED
from fsdplaunch.display_text import printable, shortened, text_of
from fsdplaunch.errors import CheckpointError
from fsdplaunch.files import flush_both, write_error
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.collectives.rank_group import from_all, raise_on_all_ranks
from fsdplaunch.runtime.inspection import clean_name
from fsdplaunch.runtime.inspection.units import fsdp1_wrappers
from fsdplaunch.runtime.patch import GROUP_IS_ABANDONED, call_if_imported
from fsdplaunch.runtime.saving.save_job import SaveJob, tensors_of
from fsdplaunch.runtime.torch_internals.distributed import (
    ShardedTensor,
    TensorShard,
    local_tensor,
    with_local_shards,
    with_local_tensor,
)
from fsdplaunch.runtime.torch_internals.tensors import change_count, storage_identity, tree_map

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor of this rank, maybe a shard, and where its copy goes: host memory, at first without its values."""

    source: torch.Tensor
    place: torch.Tensor
    is_shard: bool


class HostBuffer:
    """Memory for one save at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def place(self, state: Any) -> tuple[Any, list[PlacedTensor]]:
        """Return `state` with a place in this buffer for each tensor of this rank, and what is to be copied there.

        Dictionaries, lists and tuples are made anew; other values are kept, they are not changed in place.
        """
        tensors = {id(part): (part, part is not each) for each in tensors_of(state) for part in _parts(each)}
        self._reserve(sum(_room(tensor) for tensor, _ in tensors.values()))
        memory, position = self._memory.numpy(), 0
        placed: dict[int, PlacedTensor] = {}
        for tensor, is_shard in tensors.values():
            # Each is a storage by itself: of a part of one, torch writes a copy or all of it.
            if size := tensor.nbytes:
                flat = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=position)
                place = flat.view(tensor.dtype).view(tensor.shape)
            else:
                place = torch.empty(tensor.shape, dtype=tensor.dtype)
            placed[id(tensor)] = PlacedTensor(tensor.detach(), place, is_shard)
            position += _room(tensor)
        places = {key: each.place for key, each in placed.items()}
        return tree_map(lambda leaf: _placed(leaf, places), state), list(placed.values())

    def _reserve(self, size: int) -> None:
        if size <= len(self._memory):
            return
        self._memory = torch.empty(0, dtype=torch.uint8)  # the old one goes first
        if torch.cuda.is_available():
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            return
        memory = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)  # a five-hundredth of the page faults
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _parts(tensor: torch.Tensor | ShardedTensor) -> list[torch.Tensor]:
    if isinstance(tensor, ShardedTensor):
        return [shard.tensor for shard in tensor.local_shards()]
    return [_shard(tensor)]


def _placed(value: Any, places: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, DTensor):
        # Not from_local: that would move the copy back to the mesh's device.
        return with_local_tensor(value, places[id(local_tensor(value))])
    if isinstance(value, ShardedTensor):
        shards = [TensorShard(places[id(shard.tensor)], shard.metadata) for shard in value.local_shards()]
        return with_local_shards(value, shards)
    return places[id(value)] if isinstance(value, torch.Tensor) else value


def _storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {storage_identity(_shard(tensor)) for tensor in tensors}


def _shard(tensor: torch.Tensor) -> torch.Tensor:
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


PIECE = 32 * 2**20
AT_ONCE = 16 * 2**20
"""Up to so many bytes are copied before the call returns: that takes milliseconds, and nothing has to wait."""
GRACE_SECONDS = 0.1
"""How long after the copy a change is still looked for: torch counts one when it ends, not when it begins."""


class HostCopies:
    """Copies of one save's tensors: what no optimizer of it trains at once, the rest by `make`."""

    def __init__(
        self, states: list[Any], buffer: HostBuffer, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> None:
        self.states, placed = buffer.place(states)
        names = {id(param): clean_name(name) for model in models for name, param in model.named_parameters()}
        trained = [
            (names.get(id(param), "a parameter"), tensor)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for param in group["params"]
            for tensor in (param, *dict(optimizer.state.get(param) or {}).values())
            if isinstance(tensor, torch.Tensor)
        ]
        storages = _storages(tensor for _, tensor in trained)
        # Numbers of steps go at once: under FSDP1 there is nothing else to wait for.
        later = [each for each in placed if each.source.dim() and storage_identity(each.source) in storages]
        self._later = later if sum(each.place.nbytes for each in later) > AT_ONCE else []
        self._own: list[PlacedTensor] = []
        if any(map(fsdp1_wrappers, models)):  # it makes new shards for each state dict, which are nobody else's
            storages |= _storages(each for model in models for each in (*model.parameters(), *model.buffers()))
            self._own = [
                each for each in placed if each.is_shard and storage_identity(each.source) not in storages
            ]
        watched = _storages(each.source for each in self._later)
        self._counts = [
            (name, part, change_count(part))
            for name, each in trained
            if storage_identity(shard := _shard(each)) in watched
            for part in {id(each): each, id(shard): shard}.values()  # torch counts for each of the two by itself
        ]
        self._copied, self._released = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._is_checked = False
        self._changed: str | None = None
        waiting = {id(each) for each in (*self._later, *self._own)}
        at_once = [each for each in placed if id(each) not in waiting]
        self._stream = _copy_from_device(at_once, [*self._later, *self._own])
        _copy_on_host(at_once)
        if not self._later:
            self._copied.set()

    def make(self) -> None:
        """Make the copies, beside the training; raise if anything but a step changed a parameter meanwhile."""
        try:
            _copy_on_host(self._later)
            if self._stream is not None:
                self._stream.synchronize()
        finally:
            self._copied.set()
        while self._own:
            _copy_on_host([self._own.pop()])  # and its memory is given back
        self._released.wait(GRACE_SECONDS)
        self._check()
        self._later = []
        if self._changed is not None:
            msg = f"{self._changed} was changed by something other than an optimizer's step while it was copied"
            hint = "change it before save_checkpoint or after the next step, or set checkpoint.async to false"
            raise CheckpointError(msg, hint=hint)

    def wait(self) -> None:
        """Wait until what is trained has been copied; called by who is about to change it."""
        self._copied.wait()
        self._check()
        self._released.set()

    def _check(self) -> None:
        """Note what, or whose state, was changed, once; torch does not count changes through `.data`."""
        with self._lock:
            if not self._is_checked:
                self._is_checked = True
                changed = (name for name, tensor, count in self._counts if change_count(tensor) != count)
                self._changed = next(changed, None)


def _copy_on_host(tensors: Iterable[PlacedTensor]) -> None:
    """Copy what is on the host, in one thread and without the interpreter's lock, so that training goes on."""
    for each in tensors:
        source, place = each.source, each.place
        if source.device.type != "cpu":
            continue
        if not source.is_contiguous() or source.is_conj() or source.is_neg():
            place.copy_(source)
            continue
        size = source.numel() * source.element_size()
        for offset in range(0, size, PIECE):
            begin, count = source.data_ptr() + offset, min(PIECE, size - offset)
            ctypes.memmove(place.data_ptr() + offset, begin, count)


def _copy_from_device(at_once: list[PlacedTensor], later: list[PlacedTensor]) -> Any:
    """Begin to copy what is on GPUs, and return the stream that does; None without any.

    What computes on the GPU afterwards waits there for the tensors of `at_once`, the script does not.
    """
    if not any(each.source.is_cuda for each in (*at_once, *later)):
        return None
    stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for tensors in (at_once, later):
            for each in tensors:
                if each.source.is_cuda:
                    each.place.copy_(each.source, non_blocking=True)
            if tensors is at_once:
                current.wait_event(stream.record_event())
    return stream


EXIT_SECONDS = 25.0  # how long a script that failed waits at exit for a save that is under way
NOTABLE_SECONDS = 0.02


class BackgroundSave:
    """At most one save, which talks to the other ranks over a process group beside training's."""

    def __init__(self) -> None:
        self._buffer = HostBuffer()
        self._group: tuple[Any, dist.ProcessGroup] | None = None
        self._folders: set[Path] = set()
        self._thread: threading.Thread | None = None
        self._copies: HostCopies | None = None
        self._hooks: list[Any] = []
        self._failure: BaseException | None = None
        self._is_set_up = self._told = False

    def start(self, save: SaveJob, models: list[nn.Module], trainers: list[Optimizer]) -> None:
        """Begin to copy everything to host memory and to write it; all ranks call this, `finish` before.

        What is wrong with a folder is found before the first save into it returns, and later beside the training.
        The step of what these optimizers train waits for its copy.
        """
        if not self._is_set_up:
            atexit.register(_at_exit)  # not sooner: it must come before the one that ends the process group
            optimizers.register_optimizer_step_pre_hook(self._before_step)
            self._is_set_up = True
        default = dist.group.WORLD
        if self._group is None or self._group[0] is not default:
            self._group = (default, dist.new_group(backend="gloo"))
        # The script may change to another folder meanwhile.
        save = replace(save, target=save.target.absolute())
        folder = save.target.parent if NUMBERED.fullmatch(save.target.name) else save.target
        is_open = any(from_all(folder not in self._folders))
        if is_open:
            save.open()
            self._folders.add(folder)
        try:
            with raise_on_all_ranks(save.doing):
                copies = HostCopies([each.state for each in save.states], self._buffer, models, trainers)
        except BaseException:
            save.discard()
            raise
        copied = tuple(replace(each, state=copy) for each, copy in zip(save.states, copies.states, strict=True))
        self._copies = copies
        self._hooks = [model.register_load_state_dict_pre_hook(_before_loading) for model in models]
        save, group = replace(save, states=copied), self._group[1]

        def write() -> None:
            try:
                save.write(group, prepare=copies.make, is_open=is_open)
            except BaseException as failure:
                self._failure = failure

        self._thread = threading.Thread(target=write, name="fsdplaunch-save", daemon=True)
        self._thread.start()

    def _before_step(self, *_: Any) -> None:
        self.wait_for_copies()
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        """Take the hooks out of the models, so that nothing that pickles or copies one meets them for long."""
        while self._hooks:
            self._hooks.pop().remove()

    def wait_for_copies(self) -> None:
        """Wait until all that is trained has been copied, before it changes; say the first time how long."""
        if self._copies is None:
            return
        begin = time.monotonic()
        self._copies.wait()
        self._copies = None
        waited = time.monotonic() - begin
        if waited > NOTABLE_SECONDS and not self._told:
            self._told = True
            messages.say(
                f"checkpoint.async: the optimizer's step waited {waited:.2f} s for the copy to host memory"
            )

    def finish(self, seconds: float | None = None) -> None:
        """Wait for the save under way, if there is one, and raise if it failed."""
        if self._thread is None:
            return
        self._thread.join(seconds)
        self._thread = self._copies = None
        self._remove_hooks()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


background = BackgroundSave()


def _before_loading(*_: Any) -> None:
    """Wait before a model's `load_state_dict`; found by its name when the model is pickled."""
    background.wait_for_copies()


wait_for_copies = background.wait_for_copies
finish_saves = background.finish


def _at_exit() -> None:
    """Finish the save under way, for runs that no launcher's bootstrap ends."""
    failed = bool(call_if_imported(GROUP_IS_ABANDONED))
    try:
        background.finish(EXIT_SECONDS if failed else None)
    except BaseException as failure:
        write_error(f"error: {printable(shortened(text_of(failure)))}\n")
        with suppress(OSError, ValueError):
            flush_both()
        if not failed:
            os._exit(1)  # an exit handler has no other way to change the status
