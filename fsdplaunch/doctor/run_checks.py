"""Every check in the order of the report, and the exit status that follows."""

from collections.abc import Callable, Iterator, Sequence

from fsdplaunch.doctor.checks import config, gpus, host, network, software
from fsdplaunch.doctor.facts import Check, DoctorFacts
from fsdplaunch.errors import EXIT_MACHINE

CHECKS: Sequence[Callable[[DoctorFacts], Iterator[Check]]] = (
    software.check_python,
    software.check_torch,
    software.check_driver,
    software.check_nccl,
    gpus.check_gpus,
    gpus.check_busy,
    gpus.check_links,
    gpus.check_health,
    gpus.check_dtypes,
    host.check_processors,
    host.check_memory,
    host.check_shared_memory,
    host.check_limits,
    host.check_disks,
    host.check_clock,
    network.check_interfaces,
    network.check_name,
    network.check_port,
    config.check_config,
)


def run_checks(facts: DoctorFacts) -> list[Check]:
    """Run every check.

    Args:
        facts: The node.
    """
    return [found for check in CHECKS for found in check(facts)]


def status_of(checks: Sequence[Check]) -> int:
    """Return the command's exit status: 3 when there is a problem."""
    return EXIT_MACHINE if any(check.status == "problem" for check in checks) else 0


def summary(checks: Sequence[Check]) -> str:
    """Return `1 problem, 2 warnings`, or that all is well."""
    words = []
    for status in ("problem", "warning"):
        count = sum(check.status == status for check in checks)
        words += [f"{count} {status}{'s' if count > 1 else ''}"] if count else []
    return ", ".join(words) or "no problems"
