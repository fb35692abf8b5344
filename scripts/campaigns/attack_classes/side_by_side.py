"""Run cases in processes forked from this one, several at a time: what one leaves in its process stays there."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from fsdplaunch.parent_death import ended_with_us
from scripts.campaigns.attack_classes.case import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one case.

    Attributes:
        group: Its class.
        name: What it does.
        seconds: How long it took.
        problem: The end of a traceback; empty where it held.
    """

    group: str
    name: str
    seconds: float
    problem: str = ""


def run_all(cases: Sequence[tuple[str, Case]], processes: int) -> Iterator[Outcome]:
    """Return the outcome of each case as it comes, a case whose process died among them.

    Args:
        cases: Each with its class, in the order in which they are begun.
        processes: How many at a time.
    """
    waiting = iter(range(len(cases)))
    at_work: dict[Any, int] = {}  # which case each pipe's process is at

    def give(pipe: Connection, done: str | None = None) -> None:
        number = next(waiting, None)
        if number is None:
            pipe.close()
            return
        if done not in (None, cases[number][0]):  # threads and memory of one class are not those of another
            pipe.close()
            pipe = _start(cases)
        at_work[pipe] = number
        pipe.send(number)

    for _ in range(processes):
        give(_start(cases))
    while at_work:
        for ready in wait(list(at_work)):
            group, case = cases[at_work.pop(ready)]
            pipe: Any = ready
            try:
                seconds, problem = pipe.recv()
            except (EOFError, OSError):
                seconds, problem, pipe = 0.0, "the process that ran it has died", _start(cases)
            yield Outcome(group=group, name=case.name, seconds=seconds, problem=problem)
            give(pipe, group)


def _start(cases: Sequence[tuple[str, Case]]) -> Connection:
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    context.Process(target=_work, args=(cases, theirs, ours, ended_with_us()), daemon=True).start()
    theirs.close()
    return ours


def _work(cases: Sequence[tuple[str, Case]], pipe: Connection, other: Connection, die: Callable[[], None]) -> None:
    die()
    other.close()
    while True:
        try:
            _, case = cases[pipe.recv()]
        except (EOFError, OSError):
            os._exit(0)
        start, problem = time.monotonic(), ""
        try:
            case.attack()
        except Exception:
            problem = traceback.format_exc(limit=-3)
        pipe.send((time.monotonic() - start, problem))
