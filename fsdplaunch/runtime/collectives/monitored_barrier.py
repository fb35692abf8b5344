"""Detect that only some ranks entered a call that every rank must make, before a collective hangs.

Ranks meet in the process group's store, where waiting can be watched. A rank that is merely late is waited for.
When every rank that is missing stands still inside torch, waiting for those that are here, none will ever come.
"""

import time
from collections.abc import Iterable, Sequence

import torch.distributed as dist

from fsdplaunch.errors import CheckpointError
from fsdplaunch.name_lists import listed
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.collectives.hang_detector import MOVING, leave_wait, place_key, report_wait, store
from fsdplaunch.runtime.torch_internals.process_groups import default_timeout

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
    group_store = store()
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
    group_store = store()
    waiting = {r: group_store.get(place_key(r)).decode() for r in ranks if group_store.check([place_key(r)])}
    return {rank: place for rank, place in waiting.items() if place != MOVING}


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
    store().add(f"{prefix}/count", -1)
    store().delete_key(f"{prefix}/{dist.get_rank()}")


def _forget(name: str, number: int) -> None:
    """Remove what this rank wrote for an earlier call, which every rank has left by now."""
    if number > 0:
        store().delete_key(f"fsdplaunch/barrier/{name}/{number}/{dist.get_rank()}")
