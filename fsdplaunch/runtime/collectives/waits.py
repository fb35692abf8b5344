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
from typing import Any

import torch
import torch.distributed as dist

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
AGAIN_SECONDS = 5.0  # how long rank 0 must then have seen them there
_COLLECTIVE = " in a collective"  # what is added to a place in one

MOVING = "-"  # what a rank that waited reports afterwards

_TORCH = str(Path(torch.__file__).parent)
_COLLECTIVES = f"{_TORCH}/distributed"
_OURS = str(Path(__file__).parents[2])
_MEASURING = str(Path(__file__).parents[1] / "measuring.py")
"""What calls a collective's end, to see how long it takes."""
_CLOSED = (RuntimeError, ValueError, AssertionError)
"""What torch raises of a closed store, a destroyed group, or none at all."""
_watching: list[threading.Thread] = []
_left: list[bool] = []
"""Not empty where a wait has ended with an error: what was reported holds until the script is seen to go on."""


def watch_main_thread() -> None:
    """Start the thread, once."""
    if not _watching and dist.is_initialized() and dist.get_world_size() > 1:
        thread = threading.Thread(target=_watch, name="fsdplaunch-hang-detector", daemon=True)
        _watching.append(thread)
        thread.start()


def _place_key(rank: int) -> str:
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
            if _left and not call_if_imported(GROUP_IS_ABANDONED):
                _left.clear()
                report_wait(MOVING)
        elif not reported and now - since > STILL_SECONDS and in_torch(frame):
            in_collective = in_torch(frame, _COLLECTIVES)
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
    store, keys = default_store(), [_place_key(rank) for rank in range(dist.get_world_size())]
    places = [store.get(key).decode() for key in keys] if store.check(keys) else [""]
    in_collectives = all(place.endswith(_COLLECTIVE) for place in places)
    return [each.removesuffix(_COLLECTIVE) for each in places] if in_collectives else None


def _warn(lines: list[str]) -> None:
    where = [
        f"rank {listed([str(rank) for rank, at in enumerate(lines) if at == line], 3)} at {line}"
        for line in dict.fromkeys(lines)
    ]
    messages.say(
        f"the ranks wait for each other at different lines, and none can continue: {'; '.join(where[:4])}\n"
        "  try  make each pass, backward and collective on all ranks: a condition that skips one must depend on a"
        " number that is equal on all of them (torch.distributed.all_reduce)"
    )


def report_wait(place: str | None = None) -> bool:
    """Report that this rank waits at a place, the running line when left out; False where the run is ending."""
    try:
        default_store().set(_place_key(dist.get_rank()), place or user_line(sys._getframe(1)))
    except _CLOSED:
        return False
    return True


def report_end() -> None:
    """Report that this rank's script has ended: those that wait for it in a call learn that it will not come."""
    if _watching:
        report_wait("the end of the script")


def in_torch(frame: FrameType, place: str = _TORCH) -> bool:
    """Return whether a thread with this innermost frame is in torch's code, or in this part of it."""
    outer = frame.f_back if frame.f_code.co_filename == _MEASURING else None
    return (outer or frame).f_code.co_filename.startswith(place)


def user_line(frame: FrameType) -> str:
    """Return the innermost line that is neither torch's nor ours: `train.py:48 (main)`."""
    at: FrameType | None = frame
    while at is not None and at.f_code.co_filename.startswith((_TORCH, _OURS)):
        at = at.f_back
    at = at or frame
    return f"{Path(at.f_code.co_filename).name}:{at.f_lineno} ({at.f_code.co_name})"


NOTICE_SECONDS = 5.0  # how late a rank may be before it is mentioned
CONFIRM_SECONDS = 2.0  # how long the missing ranks must all have waited
_SHORT, _LONG = 0.0005, 0.05
_SHOWN = 8

_calls: dict[str, int] = {}


def monitored_barrier(call: str, hint: str | None = None, ranks: Sequence[int] | None = None) -> None:
    """Wait until every rank, or each of these, is in this call, named with what must be the same on all.

    Where missing ranks wait elsewhere for the ones here, or for longer than the group's timeout, it is a
    CheckpointError; `hint` says what to do when some ranks did not call it.
    """
    wanted = range(dist.get_world_size()) if ranks is None else ranks
    name = call if ranks is None else f"{call}/{wanted[0]}"
    number = _calls[name] = _calls.get(name, 0) + 1
    if len(wanted) == 1:
        return
    prefix = f"fsdplaunch/barrier/{name}/{number}"
    store = default_store()
    store.set(f"{prefix}/{dist.get_rank()}", "here")
    if store.add(f"{prefix}/count", 1) == len(wanted):
        store.set(f"{prefix}/all", "here")
    start, pause, waiting_since = time.monotonic(), _SHORT, 0.0
    noticed = reported = False
    while not store.check([f"{prefix}/all"]):
        time.sleep(pause)
        pause = min(2 * pause, _LONG)
        waited = time.monotonic() - start
        if waited < NOTICE_SECONDS:
            continue
        missing = [rank for rank in wanted if not store.check([f"{prefix}/{rank}"])]
        if missing and not noticed:
            noticed = True
            messages.say_anywhere(f"{call} waits for {name_ranks(missing)} to call it too")
        reported = reported or report_wait()  # those missing may wait in another call for this rank
        waiting = {r: store.get(_place_key(r)).decode() for r in missing if store.check([_place_key(r)])}
        places = {rank: at.removesuffix(_COLLECTIVE) for rank, at in waiting.items() if at != MOVING}
        waiting_since = (waiting_since or waited) if missing and len(places) == len(missing) else 0.0
        is_alone = bool(waiting_since) and waited - waiting_since > CONFIRM_SECONDS
        if is_alone or waited > default_timeout():
            _calls[name] -= 1  # the next call on all ranks is the same one on all
            _left.append(True)
            store.add(f"{prefix}/count", -1)
            store.delete_key(f"{prefix}/{dist.get_rank()}")
            raise _missed(call, wanted, missing, places if is_alone else {}, hint)
        time.sleep(0.5)
    if reported:
        report_wait(MOVING)
    if number > 1:  # every rank has left the call before by now
        store.delete_key(f"fsdplaunch/barrier/{name}/{number - 1}/{dist.get_rank()}")


def _missed(
    call: str, wanted: Sequence[int], missing: Sequence[int], places: dict[int, str], hint: str | None
) -> CheckpointError:
    if not places:
        msg = f"{name_ranks(missing)} did not call {call} within {default_timeout():.0f} s"
        hint = f"call {call} on all ranks, or set launch.process_group_timeout_seconds higher"
        return CheckpointError(msg, hint=hint)
    here = name_ranks([rank for rank in wanted if rank not in missing])
    whose = f" (rank {missing[0]})" if len(missing) > 1 else ""
    msg = (
        f"{call} was called on {here} only: {name_ranks(missing)} went on, waiting for {here} at"
        f" {places[missing[0]]}{whose}"
    )
    return CheckpointError(msg, hint=hint or f"call {call} on all ranks; take it out of `if rank == 0:`")


def name_ranks(ranks: Iterable[int]) -> str:
    """Return `rank 3`, `ranks 0, 1 and 5`, or with many of them the first few and their number."""
    several = [str(rank) for rank in ranks]
    if len(several) == 1:
        return f"rank {several[0]}"
    if len(several) > _SHOWN:
        return f"ranks {listed(several, _SHOWN)}"
    return f"ranks {', '.join(several[:-1])} and {several[-1]}"


_provided: list[Any] = []
"""What gives rank 0 full tensors while the other ranks are elsewhere: `auto.rank0.service.Service`."""


def provide(service: Any) -> None:
    """Have rank 0 ask this service from now on; None takes it away."""
    _provided[:] = [] if service is None else [service]


def current() -> Any:
    """Return the service; None while nothing provides one."""
    return _provided[0] if _provided else None


def meets(call: str, hint: str, ranks: Sequence[int] | None = None) -> bool:
    """Wait until all ranks are in this call, as `monitored_barrier`, or rank 0 knows that the others are not.

    Returns False in the second case, on rank 0 only, where a service is: it may go on alone, ask that for `full`
    tensors, and call `done` at the end.
    """
    if _provided:
        return bool(_provided[0].meets(call, hint, ranks))
    monitored_barrier(call, hint, ranks)
    return True
