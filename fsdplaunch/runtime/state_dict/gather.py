"""Gather full tensors one at a time, where they are wanted: all ranks take part, or rank 0 alone fetches them.

What a save gathers is kept in temporary files, not in memory, until it is written: rank 0 can give any library a
state of the model's size, of plain tensors, and hold one of them.
"""

import ctypes
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.collectives import waits
from fsdplaunch.runtime.collectives.rank_group import from_all, raise_on_all_ranks
from fsdplaunch.runtime.collectives.waits import in_torch
from fsdplaunch.runtime.inspection.units import full_tensor
from fsdplaunch.runtime.messages import script_line
from fsdplaunch.runtime.torch_internals.tensors import storage_identity


def split_like(full: torch.Tensor, like: DTensor) -> DTensor:
    """Split a full tensor as another one is, on its device and without communication or gradients."""
    local = full.detach().to(like.to_local().device)
    return distribute_tensor(local, like.device_mesh, like.placements, src_data_rank=None)


def cut_to_shard(value: Any, param: nn.Parameter) -> Any:
    """Return this rank's shard of a tensor of the parameter's shape; a copy of what has another shape."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != param.shape or not isinstance(param, DTensor):
        return value.clone()  # step counts: two optimizers must not count on one tensor
    return split_like(value, param)


SMALLEST = 1 << 16  # bytes below which a gathered tensor stays in memory: a file of its own is not worth it
KEPT_BYTES = 1 << 25  # of the first tensors of a save, which stay there as well: most of a small model's
HINT = (
    "save on all ranks, or on rank 0, which can save alone from the optimizer's first step on: decide by a number"
    " equal on all ranks, such as a loss on validation data or one averaged by torch.distributed.all_reduce"
)


class ShardGatherer:
    """Gathers the sharded tensors of one call of the script's; the full ones are kept where they are wanted.

    Args:
        call: The call, which all ranks must make, or rank 0 alone.
        keep: Whether this rank wants the full tensors.
        at: Where it is; left out, the script's line.
        spool: Keep them in temporary files: they are written and not computed with.
    """

    def __init__(self, call: str, *, keep: bool, at: str | None = None, spool: bool = False) -> None:
        self.call = f"{call} at {at or script_line()}"
        self.keep = keep
        self.together = True  # all ranks make the call; otherwise rank 0 alone does, and fetches what others hold
        self.by_rank = False  # whether each rank writes a file of its own
        self.count = 0  # how many tensors were asked for
        self._room = KEPT_BYTES if spool else sys.maxsize  # bytes that may still stay in memory
        self._met = False
        self._full: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def meet(self) -> None:
        """Wait until all ranks are in this call, or rank 0 knows that it is alone; once."""
        if not self._met:
            self._met = True
            await_main_thread(self.call)
            self.together = waits.meets(self.call, HINT)
            # One rank may see its threads earlier than another; what only one raised, the others would wait for.
            if self.together and any(from_all(len(_threads) > 1)):
                msg = f"{self.call} gathers shards on all ranks in several threads at once, whose order may differ"
                raise CheckpointError(msg, hint="save on rank 0 alone, or one after the other in one thread")

    def full(self, tensor: DTensor) -> torch.Tensor:
        """Return the full tensor in host memory or in a file, the same one for tied tensors. Collective.

        It is a plain one of the tensor's shape and dtype, a parameter if that is one; empty where not wanted.
        """
        self.meet()
        self.count += 1
        detached: Any = tensor.detach()
        local = detached.to_local()
        key = (storage_identity(local), local.storage_offset(), tuple(tensor.shape), tensor.dtype)
        if key not in self._full:
            full = self.gather(tensor)
            self._room -= full.nbytes
            # The shard is kept as well: its storage's address must not be given to another while this one counts.
            self._full[key] = local, full if self._room >= 0 else spooled(full)
        full = self._full[key][1]
        return nn.Parameter(full, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else full

    def gather(self, tensor: DTensor) -> torch.Tensor:
        """Return the full tensor in host memory as `full` does, without keeping it; after `meet`. Collective."""
        detached: Any = tensor.detach()
        if self.together:
            full: torch.Tensor = full_tensor(detached)
        elif all(placement.is_replicate() for placement in tensor.placements):
            full = detached.to_local()
        else:
            full = waits.current().full(tensor, self.call)
        if not self.keep:
            return full.new_empty(0)
        if full.untyped_storage().nbytes() != full.nbytes:  # a slice of uneven shards with their padding
            full = full.clone()
        return full.cpu()

    def full_or_own(self, value: Any) -> Any:
        """Return the full tensor of a sharded one, and anything else itself."""
        return self.full(value) if isinstance(value, DTensor) else value

    def finish(self, doing: str) -> Any:
        """Return a context that ends the call, and raises what fails in `doing` it on all ranks that take part."""
        if self.together:
            return raise_on_all_ranks(doing)
        ending = ExitStack()
        ending.callback(waits.current().done)
        return ending

    def leave(self) -> None:
        """End what writes nothing itself: where rank 0 is alone, the others may go on."""
        if not self.together:
            waits.current().done()


def gathered(tensors: Mapping[str, Any], gathering: ShardGatherer) -> dict[str, Any]:
    """Return the same mapping with full tensors."""
    return {name: gathering.full_or_own(value) for name, value in tensors.items()}


def spooled(tensor: torch.Tensor) -> torch.Tensor:
    """Return an equal tensor whose memory is a temporary file, which the system writes out when it needs room.

    The file has no name and goes with the tensor; what is written into the tensor stays this process's own. Where
    the folder for temporary files (TMPDIR) has no room the tensor itself is returned.
    """
    if tensor.nbytes < SMALLEST:
        return tensor
    # Return to the system what earlier tensors have freed: glibc keeps it, and often takes other for the next.
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
    try:
        with tempfile.NamedTemporaryFile(prefix="fsdplaunch-") as file:
            tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tofile(file)
            file.flush()
            memory = torch.from_file(file.name, shared=False, size=tensor.nbytes, dtype=torch.uint8)
    except OSError:
        return tensor
    return memory.view(tensor.dtype).view(tensor.shape)


_saves_of_ranks: list[bool] = []


@contextmanager
def files_of_ranks() -> Iterator[None]:
    """Let each rank write files of its own while the context lasts, as in a checkpoint of shards."""
    _saves_of_ranks.append(True)
    try:
        yield
    finally:
        _saves_of_ranks.pop()


def are_files_of_ranks() -> bool:
    """Return whether what is written now are files of each rank."""
    return bool(_saves_of_ranks)


PATIENCE_SECONDS = 5.0
"""How long the main thread may take to the line where it waits for a thread that gathers."""
_WAITING = {"join", "result", "select", "shutdown"}
_HOMES = ("/threading.py", "/selectors.py", "/concurrent/futures/_base.py", "/concurrent/futures/thread.py")

_turn = threading.RLock()
_threads: set[threading.Thread] = set()  # those that gather, or wait until another one has
failed: list[CheckpointError] = []
"""What threads could not do. A script need not look at a thread's error, and would end well without its save."""


def await_main_thread(call: str) -> None:
    """Refuse to gather in a thread beside a main thread that trains: both would take part in each other's passes.

    A thread that the main thread waits for (`thread.join()`, `future.result()`) may.
    """
    if threading.current_thread() is threading.main_thread():
        return
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not _main_thread_waits():
        if time.monotonic() > deadline:
            msg = f"{call} gathers shards in another thread, while the main thread goes on"
            hint = (
                "join the thread before the next step; or copy what it writes before it starts, by"
                " {name: value.full_tensor().cpu() for ...} on all ranks, or by value.clone() on rank 0 alone"
            )
            failed.append(CheckpointError(msg, hint=hint))
            raise failed[-1]
        time.sleep(0.02)


@contextmanager
def in_turn(call: str) -> Iterator[None]:
    """Let one thread of the script's gather at a time, and have the run end with what it could not do."""
    thread = threading.current_thread()
    if thread is threading.main_thread() or thread in _threads:
        yield
        return
    await_main_thread(f"{call} at {script_line()}")
    _threads.add(thread)
    try:
        with _turn:
            yield
    except CheckpointError as error:
        failed.append(error)
        raise
    finally:
        _threads.discard(thread)


def raise_failed() -> None:
    """Raise in the main thread what another one could not do."""
    if failed and threading.current_thread() is threading.main_thread():
        raise failed.pop()


def _main_thread_waits() -> bool:
    """Return whether the main thread stands where threads are waited for, and nowhere in torch or a queue."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or not frame.f_code.co_filename.endswith(_HOMES):
        return False
    names = set()
    while frame is not None:
        if in_torch(frame) or frame.f_code.co_filename.endswith(("/queue.py", "/connection.py")):
            return False
        if frame.f_code.co_filename.endswith(_HOMES):
            names.add(frame.f_code.co_name)
        frame = frame.f_back
    return bool(names & _WAITING)
