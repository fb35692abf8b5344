"""Every check in the order it is told, and the exit status that follows."""

from collections.abc import Callable, Iterator, Sequence

from fsdplaunch.doctor import devices, host, rules, software, wires
from fsdplaunch.doctor.facts import Check, Facts
from fsdplaunch.errors import EXIT_MACHINE

CHECKS: Sequence[Callable[[Facts], Iterator[Check]]] = (
    software.check_python,
    software.check_torch,
    software.check_driver,
    software.check_nccl,
    devices.check_gpus,
    devices.check_busy,
    devices.check_links,
    devices.check_health,
    devices.check_formats,
    host.check_processors,
    host.check_memory,
    host.check_shared_memory,
    host.check_limits,
    host.check_disks,
    host.check_clock,
    wires.check_interfaces,
    wires.check_name,
    wires.check_port,
    rules.check_config,
)


def examine(facts: Facts) -> list[Check]:
    """Run every check.

    Args:
        facts: The machine.
    """
    return [found for check in CHECKS for found in check(facts)]


def status_of(checks: Sequence[Check]) -> int:
    """The command's exit status: 3 when there is a problem."""
    return EXIT_MACHINE if any(check.status == "problem" for check in checks) else 0


def summary(checks: Sequence[Check]) -> str:
    """`1 problem, 2 warnings`, or that all is well."""
    words = []
    for status in ("problem", "warning"):
        count = sum(check.status == status for check in checks)
        words += [f"{count} {status}{'s' if count > 1 else ''}"] if count else []
    return ", ".join(words) or "no problems"
