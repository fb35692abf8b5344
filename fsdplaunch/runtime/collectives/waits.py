"""Notice that ranks wait for others that will never come, before a collective hangs, and say where each one is.

A thread looks once a second at where the main thread stands. Only while that is one and the same place in torch's
code for some seconds does it write to the process group's store; a run that makes progress never does. Calls that
every rank must make meet in the store, where waiting can be watched: a rank that is merely late is waited for.
"""

import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdplaunch.display_text import listed
from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.patch import GROUP_IS_ABANDONED, call_if_imported
from fsdplaunch.runtime.torch_internals.distributed import default_store, default_timeout

PERIOD_SECONDS = 0.5
STILL_SECONDS = 3.0
"""How long the main thread must have stood in one place."""
WARN_SECONDS = 10.0
"""How long it must have when rank 0 looks whether all ranks wait in collectives, at different lines."""
AGAIN_SECONDS = 5.0
"""How long rank 0 must then have seen them there."""
_COLLECTIVE = " in a collective"
"""What is added to a place in one."""

MOVING = "-"
"""What a rank that waited reports afterwards."""

_TORCH = str(Path(torch.__file__).parent)
_COLLECTIVES = f"{_TORCH}/distributed"
_OURS = str(Path(__file__).parents[2])
_CLOSED = (RuntimeError, ValueError, AssertionError)
"""What torch raises of a closed store, a destroyed group, or none at all."""
_watching: list[threading.Thread] = []
_left: list[bool] = []
"""Not empty where a wait that was reported has ended with an error, and the script may go on."""


def watch_main_thread() -> None:
    """Start the thread, once."""
    if not _watching and dist.is_initialized() and dist.get_world_size() > 1:
        thread = threading.Thread(target=_watch, name="fsdplaunch-hang-detector", daemon=True)
        _watching.append(thread)
        thread.start()


def place_key(rank: int) -> str:
    """Return the key under which a rank that waits reports where."""
    return f"fsdplaunch/waiting/{rank}"


def _watch() -> None:
    main = threading.main_thread().ident or 0
    seen: tuple[int, int] | None = None
    since, reported, warned = 0.0, False, False
    places: list[str] | None = None
    same_since = 0.0
    while dist.is_initialized():
        time.sleep(PERIOD_SECONDS)
        frame = sys._current_frames().get(main)
        now = time.monotonic()
        mark = None if frame is None else (id(frame), frame.f_lasti)
        if mark != seen or frame is None:
            seen, since, places = mark, now, None
            reported = reported and not report_wait(MOVING)
            _forget_left()
        elif not reported and now - since > STILL_SECONDS and in_torch(frame):
            in_collective = frame.f_code.co_filename.startswith(_COLLECTIVES)
            reported = report_wait(user_line(frame) + (_COLLECTIVE if in_collective else ""))
        elif reported and not warned and now - since > WARN_SECONDS and dist.get_rank() == 0:
            with suppress(*_CLOSED):
                before, places = places, _places_in_collectives()
                same_since = same_since if places == before else now
                if places and len({*places}) > 1 and now - same_since > AGAIN_SECONDS:
                    warned = True
                    _warn(places)
        del frame


def _places_in_collectives() -> list[str] | None:
    """Return where each rank waits in a collective; None while one does not."""
    store, keys = default_store(), [place_key(rank) for rank in range(dist.get_world_size())]
    places = [store.get(key).decode() for key in keys] if store.check(keys) else [""]
    return [each.removesuffix(_COLLECTIVE) for each in places] if all(map(_is_collective, places)) else None


def _is_collective(place: str) -> bool:
    return place.endswith(_COLLECTIVE)


def _warn(lines: list[str]) -> None:
    where = [
        f"rank {listed([str(rank) for rank, at in enumerate(lines) if at == line], 3)} at {line}"
        for line in dict.fromkeys(lines)
    ]
    messages.say(
        f"the ranks wait for each other at different lines, and none goes on: {'; '.join(where[:4])}\n"
        "  try  make each pass, backward and collective on all ranks: what leaves one out must be decided by a"
        " number that all of them have (torch.distributed.all_reduce)"
    )


def leave_wait() -> None:
    """Note that a wait ends with an error: what was reported holds until the script is seen to go on after it."""
    _left.append(True)


def _forget_left() -> None:
    if _left and not call_if_imported(GROUP_IS_ABANDONED):
        _left.clear()
        report_wait(MOVING)


def report_wait(place: str | None = None) -> bool:
    """Report that this rank waits for others at a place, the running line when left out, or that it goes on.

    Returns:
        Whether it could be reported; a run that is ending may have no store any more.
    """
    try:
        default_store().set(place_key(dist.get_rank()), place or user_line(sys._getframe(1)))
    except _CLOSED:
        return False
    return True


def report_end() -> None:
    """Report that this rank's script has ended: those that wait for it in a call learn that it will not come."""
    if _watching:
        report_wait("the end of the script")


def in_torch(frame: FrameType) -> bool:
    """Return whether a thread with this innermost frame is in torch's code."""
    return frame.f_code.co_filename.startswith(_TORCH)


def user_line(frame: FrameType) -> str:
    """Return the innermost line that is neither torch's nor ours: `train.py:48 (main)`."""
    at: FrameType | None = frame
    while at is not None and at.f_code.co_filename.startswith((_TORCH, _OURS)):
        at = at.f_back
    at = at or frame
    return f"{Path(at.f_code.co_filename).name}:{at.f_lineno} ({at.f_code.co_name})"


NOTICE_SECONDS = 5.0
"""How late a rank may be before it is mentioned."""
CONFIRM_SECONDS = 2.0
"""How long the missing ranks must all have waited."""
_SHORT, _LONG = 0.0005, 0.05
_SHOWN = 8

_calls: dict[str, int] = {}


def monitored_barrier(call: str, hint: str | None = None, ranks: Sequence[int] | None = None) -> None:
    """Wait until every rank is in this call.

    Args:
        call: The function's name, with what else must be the same on all ranks.
        hint: What to do when some ranks did not call it.
        ranks: Those that must be, this one among them; left out, all.

    Raises:
        CheckpointError: The missing ranks wait elsewhere for the ones that are here, or for longer than the
            process group's timeout.
    """
    wanted = range(dist.get_world_size()) if ranks is None else ranks
    name = call if ranks is None else f"{call}/{wanted[0]}"
    number = _calls[name] = _calls.get(name, 0) + 1
    if len(wanted) == 1:
        return
    prefix = f"fsdplaunch/barrier/{name}/{number}"
    group_store = default_store()
    group_store.set(f"{prefix}/{dist.get_rank()}", "here")
    if group_store.add(f"{prefix}/count", 1) == len(wanted):
        group_store.set(f"{prefix}/all", "here")
    start, pause, waiting_since = time.monotonic(), _SHORT, 0.0
    noticed = reported = False
    while not group_store.check([f"{prefix}/all"]):
        time.sleep(pause)
        pause = min(2 * pause, _LONG)
        waited = time.monotonic() - start
        if waited < NOTICE_SECONDS:
            continue
        missing = [rank for rank in wanted if not group_store.check([f"{prefix}/{rank}"])]
        noticed = noticed or _notice(call, missing)
        reported = reported or report_wait()  # those missing may wait in another call for this rank
        places = waiting_places(missing)
        waiting_since = (waiting_since or waited) if missing and len(places) == len(missing) else 0.0
        if waiting_since and waited - waiting_since > CONFIRM_SECONDS:
            _withdraw(name, prefix)
            raise _alone(call, missing, places, wanted, hint)
        if waited > default_timeout():
            _withdraw(name, prefix)
            raise _absent(call, missing, waited)
        time.sleep(0.5)
    if reported:
        report_wait(MOVING)
    _forget(name, number - 1)


def waiting_places(ranks: Sequence[int]) -> dict[int, str]:
    """Return where each of some ranks waits; those that do not are left out."""
    group_store = default_store()
    waiting = {r: group_store.get(place_key(r)).decode() for r in ranks if group_store.check([place_key(r)])}
    return {rank: place.removesuffix(_COLLECTIVE) for rank, place in waiting.items() if place != MOVING}


def _notice(call: str, missing: Sequence[int]) -> bool:
    if missing:
        messages.say_anywhere(f"{call} waits for {name_ranks(missing)} to call it too")
    return bool(missing)


def _alone(
    call: str, missing: Sequence[int], places: dict[int, str], wanted: Sequence[int], hint: str | None
) -> CheckpointError:
    here = [rank for rank in wanted if rank not in missing]
    whose = f" (rank {missing[0]})" if len(missing) > 1 else ""
    msg = (
        f"{call} was called on {name_ranks(here)} only: {name_ranks(missing)} went on, waiting for"
        f" {name_ranks(here)} at {places[missing[0]]}{whose}"
    )
    return CheckpointError(msg, hint=hint or f"call {call} on all ranks; take it out of `if rank == 0:`")


def _absent(call: str, missing: Sequence[int], waited: float) -> CheckpointError:
    msg = f"{name_ranks(missing)} did not call {call} within {waited:.0f} s"
    hint = f"call {call} on all ranks, or set launch.process_group_timeout_seconds higher"
    return CheckpointError(msg, hint=hint)


def name_ranks(ranks: Iterable[int]) -> str:
    """Return `rank 3`, `ranks 0, 1 and 5`, or with many of them the first few and their number."""
    several = [str(rank) for rank in ranks]
    if len(several) == 1:
        return f"rank {several[0]}"
    if len(several) > _SHOWN:
        return f"ranks {listed(several, _SHOWN)}"
    return f"ranks {', '.join(several[:-1])} and {several[-1]}"


def _withdraw(name: str, prefix: str) -> None:
    """Undo this call, so that the next one on all ranks is the same one on all."""
    _calls[name] -= 1
    leave_wait()
    default_store().add(f"{prefix}/count", -1)
    default_store().delete_key(f"{prefix}/{dist.get_rank()}")


def _forget(name: str, number: int) -> None:
    """Remove what this rank wrote for an earlier call, which every rank has left by now."""
    if number > 0:
        default_store().delete_key(f"fsdplaunch/barrier/{name}/{number}/{dist.get_rank()}")


class Rank0Service(Protocol):
    """Gives rank 0 full tensors while the other ranks are elsewhere."""

    def meets(self, call: str, hint: str, ranks: Sequence[int] | None = None) -> bool:
        """Wait until all ranks are in this call, or until rank 0 knows that the others are not.

        Args:
            call: What it is, the same on all ranks.
            hint: What to do where only some ranks make the call.
            ranks: Those that must make it, this one among them; left out, all.

        Returns:
            Whether all are in it. False on rank 0 only: it may go on alone, and call `full`.

        Raises:
            CheckpointError: Some ranks are in it and some are not, or a rank has ended.
        """

    def full(self, tensor: DTensor, call: str) -> torch.Tensor:
        """Return the full tensor in host memory, on rank 0 alone, after `meets` was False.

        Raises:
            CheckpointError: The other ranks do not have it as it is now, or one has ended.
        """

    def done(self) -> None:
        """End what rank 0 has done alone: the other ranks may go on."""


_provided: list[Rank0Service] = []


def provide(service: Rank0Service | None) -> None:
    """Have rank 0 ask this service from now on; None takes it away."""
    _provided[:] = [] if service is None else [service]


def current() -> Rank0Service | None:
    """Return the service; None while nothing provides one."""
    return _provided[0] if _provided else None


def meets(call: str, hint: str, ranks: Sequence[int] | None = None) -> bool:
    """Do what `Rank0Service.meets` does; without a service wait for all ranks, and return True.

    Raises:
        CheckpointError: Some ranks do not come.
    """
    service = current()
    if service is not None:
        return service.meets(call, hint, ranks)
    monitored_barrier(call, hint, ranks)
    return True
