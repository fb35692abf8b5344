"""Let every rank know before a backward pass what the losses of all ranks are, by one small exchange.

It is of one size and made at every backward, whatever a rank's own loss is: an exchange that depends on what a
rank computed is one that other ranks do not make.
"""

import itertools
import time
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.collectives.hang_detector import MOVING, report_wait, store
from fsdplaunch.runtime.collectives.monitored_barrier import (
    NOTICE_SECONDS,
    name_ranks,
    waiting_places,
)

CONFIRM_SECONDS = 15.0
"""How long the ranks that do not come must have stood in one call of torch, which may be a long computation."""
_WIDTH = 16
"""Numbers of a rank in the first exchange; one whose loss has more amounts sends them in a second."""
_SHORTEST, _LONGEST = 2e-5, 1e-3
"""Seconds between two looks at an exchange."""


class RankLoss(NamedTuple):
    """What one rank has sent of its loss.

    Attributes:
        digest: Of the script's line and of the loss's reductions.
        passes: How many passes of sharded models were begun.
        batches: How many shares of batches were drawn.
        rates: Digest of the learning rates of its last step.
        parts: Digest of the tensors that its script holds of the loss.
        amounts: What its reductions are divided by.
    """

    digest: float
    passes: int
    batches: int
    rates: float
    parts: float
    amounts: list[float]


def digest_of(key: Any) -> float:
    """Return a number of 48 bits that is equal on ranks with equal keys, and exact as a float64."""
    return float(int.from_bytes(blake2b(repr(key).encode(), digest_size=6).digest(), "big"))


class LossExchange:
    """One worker's exchanges, in a group of their own: a rank that does not come is in another collective."""

    def __init__(self) -> None:
        self._group: Any = None
        self._count = itertools.count(1)

    def open(self) -> None:
        """Make the group, once. Collective; it is of CPU tensors, so that no device is waited for."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo")

    def group(self) -> Any:
        """Return the group, which is opened."""
        self.open()
        return self._group

    def all_ranks(self, own: RankLoss, line: str) -> list[RankLoss]:
        """Return what every rank has sent, in the order of ranks. Collective.

        Args:
            own: This rank's.
            line: Of the script, that calls backward.

        Raises:
            ShardingError: Another rank goes on without a backward.
        """
        self.open()
        head = [*map(float, own[:-1]), float(len(own.amounts))]
        room = _WIDTH - len(head)
        rows = self._summed([*head, *own.amounts[:room]], _WIDTH, line)
        most = int(max(row[len(head) - 1] for row in rows))
        amounts = [row[len(head) :] for row in rows] if most <= room else self._summed(own.amounts, most, line)
        return [
            RankLoss(row[0], int(row[1]), int(row[2]), row[3], row[4], numbers[: int(row[5])])
            for row, numbers in zip(rows, amounts, strict=True)
        ]

    def _summed(self, own: Sequence[float], width: int, line: str) -> list[list[float]]:
        """Return the numbers of every rank, as a sum of tables in which each has filled its row."""
        table = torch.zeros(dist.get_world_size(), width, dtype=torch.float64)
        table[dist.get_rank(), : len(own)] = torch.tensor(own, dtype=torch.float64)
        work = dist.all_reduce(table, group=self._group, async_op=True)
        _await(work, next(self._count), line)
        rows: list[list[float]] = table.tolist()
        return rows


def _await(work: Any, number: int, line: str) -> None:
    """Wait for an exchange, and find out when it takes long whether it will ever end.

    Raises:
        ShardingError: The ranks that do not come wait elsewhere for those that did.
    """
    start, pause, waiting_since = time.monotonic(), _SHORTEST, 0.0
    key = f"fsdplaunch/backward/{number}/"
    while not work.is_completed():
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
        waited = time.monotonic() - start
        if waited < NOTICE_SECONDS:
            continue
        pause = 0.1
        store().set(f"{key}{dist.get_rank()}", "here")
        report_wait()
        missing = [rank for rank in range(dist.get_world_size()) if not store().check([f"{key}{rank}"])]
        places = waiting_places(missing)
        waiting_since = (waiting_since or waited) if missing and len(places) == len(missing) else 0.0
        if waiting_since and waited - waiting_since > CONFIRM_SECONDS:
            raise _left_out(line, missing, places)
    work.wait()
    if time.monotonic() - start > NOTICE_SECONDS:
        report_wait(MOVING)
        store().delete_key(f"{key}{dist.get_rank()}")


def _left_out(line: str, missing: Sequence[int], places: dict[int, str]) -> ShardingError:
    here = [rank for rank in range(dist.get_world_size()) if rank not in missing]
    msg = (
        f"{line}: backward is called on {name_ranks(here)} only: {name_ranks(missing)} went on without one, to"
        f" {places[missing[0]]}"
    )
    return ShardingError(msg, hint=HINT)


HINT = (
    "decide by a number that all ranks have alike whether a batch is left out, or multiply its loss by 0 and call"
    " backward all the same"
)
"""What to do where ranks skip backward passes."""


def check_passes(losses: Sequence[RankLoss], line: str) -> None:
    """Check that ranks have made as many passes before this backward.

    Args:
        losses: Of each rank.
        line: Of the script, that calls backward.

    Raises:
        ShardingError: They have not: some have skipped a backward, or a pass.
    """
    passes = [each.passes for each in losses]
    if len(set(passes)) > 1:
        more, fewer = passes.index(max(passes)), passes.index(min(passes))
        msg = (
            f"{line}: rank {more} has begun {max(passes)} passes of its models up to this backward and rank"
            f" {fewer} {min(passes)}: a backward or a pass was made on some ranks only"
        )
        raise ShardingError(msg, hint=HINT)
