"""Failures between ranks, and those that come from outside the run."""

import re

from fsdplaunch.launch.report.diagnosis.facts import Diagnosis, FailureFacts, name_ranks
from fsdplaunch.launch.report.root_cause import UNEQUAL_COLLECTIVES, has_failed, is_consequence

_TIMEOUT = re.compile(
    r"Timed out waiting|Watchdog caught collective operation timeout|Collective .* timed? ?out|Wait timeout", re.I
)


def collective_timeout(facts: FailureFacts) -> Diagnosis | None:
    """Recognise a rank that waited for others that did not come."""
    if not _TIMEOUT.search(facts.text):
        return None
    waited = {worker["rank"] for worker in facts.workers if has_failed(worker) and is_consequence(worker)}
    missing = [worker["rank"] for worker in facts.workers if worker["rank"] not in waited]
    seconds = facts.config.launch.process_group_timeout_seconds if facts.config else None
    limit = f" for {seconds:.0f} s" if seconds else ""
    who = f"rank {name_ranks(missing)}, which did not come" if missing else "the others, which did not come"
    return Diagnosis(
        why=f"it waited in a collective{limit} for {who}: ranks took different paths, or one is slow",
        remedies=(
            "check that every rank makes the same calls, evaluation and saving included",
            "--process-group-timeout-seconds with a larger number, if one rank is meant to take long",
        ),
    )


def unequal_collectives(facts: FailureFacts) -> Diagnosis | None:
    """Recognise ranks that were in different collectives, of which gloo aborts one."""
    if UNEQUAL_COLLECTIVES not in facts.text:
        return None
    draws_own = facts.config is None or not facts.config.launch.keep_global_batch
    alike = "--keep-global-batch, if the script chooses by random numbers: all ranks then draw the same"
    return Diagnosis(
        why="ranks were in different collectives: one called or trained a model where another did not",
        remedies=(
            *((alike,) if draws_own else ()),
            "check that every rank makes the same calls, evaluation and saving included",
        ),
    )


def lost_connection(facts: FailureFacts) -> Diagnosis | None:
    """Recognise a broken connection of which nothing else is known."""
    if not is_consequence(facts.cause):
        return None
    return Diagnosis(
        why="the connection to another rank broke, and no rank of this node says why",
        remedies=("look at the other nodes' logs; on one node, at every rank's stderr.log",),
    )


def port_in_use(facts: FailureFacts) -> Diagnosis | None:
    """Recognise a port that something else holds."""
    if "Address already in use" not in facts.text and "EADDRINUSE" not in facts.text:
        return None
    return Diagnosis(
        why="a port the run needs is held by another program",
        remedies=("leave main_process_port out to take a free one", "see who holds it: ss -ltnp"),
    )


def killed_from_outside(facts: FailureFacts) -> Diagnosis | None:
    """Recognise a SIGKILL without a trace: somebody sent it, or the node ran out of memory."""
    if facts.died_of not in ("SIGKILL", "SIGTERM"):
        return None
    return Diagnosis(
        why=f"something outside this run sent {facts.died_of}: a user, a scheduler, or the kernel of a node"
        " without memory",
        remedies=("the scheduler's log; as root: dmesg | grep -i 'killed process'",),
    )
