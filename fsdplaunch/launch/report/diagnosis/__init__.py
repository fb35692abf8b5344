"""Why a run failed and what to try, told from what is recorded. Pure: one small function per kind of failure."""

from collections.abc import Callable, Sequence

from fsdplaunch.launch.report.diagnosis import communication, out_of_memory, script
from fsdplaunch.launch.report.diagnosis.facts import Diagnosis, FailureFacts

__all__ = ["Diagnosis", "FailureFacts", "diagnose"]

_KINDS: Sequence[Callable[[FailureFacts], Diagnosis | None]] = (
    script.own_hint,
    script.never_sharded,
    out_of_memory.gpu_out_of_memory,
    out_of_memory.host_out_of_memory,
    out_of_memory.bus_error,
    communication.unequal_collectives,
    communication.collective_timeout,
    communication.port_in_use,
    communication.lost_connection,
    communication.killed_from_outside,
    script.native_crash,
    script.missing_module,
    script.wrong_block_class,
    script.no_bf16,
    script.too_few_gpus,
    script.needs_a_gpu,
    out_of_memory.disk_full,
    script.left_by_itself,
)
"""In this order: the first that recognises the failure speaks."""


def diagnose(facts: FailureFacts) -> Diagnosis:
    """Return what can be said about a failure; nothing when no function recognises it."""
    for recognise in _KINDS:
        found = recognise(facts)
        if found is not None:
            return found
    return Diagnosis()
