"""Why a run failed and what to try, told from what is recorded. Pure: one small function per kind of failure."""

from collections.abc import Callable, Sequence

from fsdplaunch.launch.diagnosis import memory, peers, script
from fsdplaunch.launch.diagnosis.scene import Diagnosis, Scene

__all__ = ["Diagnosis", "Scene", "diagnose"]

_KINDS: Sequence[Callable[[Scene], Diagnosis | None]] = (
    script.own_hint,
    script.never_sharded,
    memory.gpu_out_of_memory,
    memory.host_out_of_memory,
    memory.bus_error,
    peers.collective_timeout,
    peers.port_in_use,
    peers.lost_connection,
    peers.killed_from_outside,
    script.native_crash,
    script.missing_module,
    script.wrong_block_class,
    script.no_bf16,
    script.too_few_gpus,
    memory.disk_full,
    script.left_by_itself,
)
"""In this order: the first that recognises the failure speaks."""


def diagnose(scene: Scene) -> Diagnosis:
    """Return what can be said about a failure; nothing when no function recognises it."""
    for recognise in _KINDS:
        found = recognise(scene)
        if found is not None:
            return found
    return Diagnosis()
