"""Failures for want of room: on the GPU, in the host's memory, in shared memory, on disk."""

import re

from fsdplaunch.byte_sizes import GIB
from fsdplaunch.config.schema.config import Config
from fsdplaunch.launch.report.diagnosis.facts import Diagnosis, FailureFacts

_SIZE = r"([\d.]+ [KMGT]iB)"


def gpu_out_of_memory(scene: FailureFacts) -> Diagnosis | None:
    """CUDA out of memory: what was asked for, what there was, which keys save memory."""
    if "CUDA out of memory" not in scene.text and "OutOfMemoryError" not in scene.text:
        return None
    asked = re.search(rf"Tried to allocate {_SIZE}", scene.text)
    total = re.search(rf"total capacity of {_SIZE}", scene.text)
    free = re.search(rf"of which {_SIZE} is free", scene.text)
    why = "the GPU's memory is used up"
    if total and free:
        why = f"of the GPU's {total[1]} only {free[1]} were free" + (
            f", and {asked[1]} were wanted" if asked else ""
        )
    others = re.search(rf"Process \d+ has {_SIZE} memory in use", scene.text)
    if others:
        why += f"; another process holds {others[1]}"
    return Diagnosis(why=why, remedies=tuple(_savings(scene.config)))


def _savings(config: Config | None) -> list[str]:
    """Keys that save GPU memory and are not in use, the cheapest first."""
    if config is None or config.distributed_type != "FSDP":
        return ["a smaller batch"]
    fsdp = config.fsdp_config
    found = [
        ("--fsdp-activation-checkpointing true", not fsdp.fsdp_activation_checkpointing),
        ("--mixed-precision bf16", config.mixed_precision == "no" and config.precision.param is None),
        ("--fsdp-sharding-strategy FULL_SHARD", fsdp.fsdp_sharding_strategy in ("SHARD_GRAD_OP", "NO_SHARD")),
        ("a smaller batch", True),
        ("--fsdp-offload-params true (slower)", not fsdp.fsdp_offload_params),
    ]
    return [text for text, applies in found if applies]


def host_out_of_memory(scene: FailureFacts) -> Diagnosis | None:
    """SIGKILL that we did not send, and the kernel has counted a kill for want of memory."""
    if scene.died_of != "SIGKILL" or not scene.memory_kills:
        return None
    limit = f" of {scene.memory_limit / GIB:.1f} GiB" if scene.memory_limit else ""
    peak = scene.cause["peak_bytes"]
    held = f"; this rank held up to {peak / GIB:.1f} GiB" if peak else ""
    remedies = ["more host memory, or fewer data loader workers"]
    if scene.config is not None and not scene.config.fsdp_config.fsdp_cpu_ram_efficient_loading:
        remedies.insert(0, "--fsdp-cpu-ram-efficient-loading true, so that only rank 0 loads the whole model")
    return Diagnosis(
        why=f"the kernel killed it: the memory limit{limit} was reached{held}", remedies=tuple(remedies)
    )


def bus_error(scene: FailureFacts) -> Diagnosis | None:
    """SIGBUS: shared memory that is too small, nearly always."""
    if scene.died_of != "SIGBUS" and "insufficient shared memory" not in scene.text:
        return None
    return Diagnosis(
        why="shared memory (/dev/shm) is used up, which data loaders pass their batches through",
        remedies=("fewer data loader workers", "a larger /dev/shm (docker run --shm-size=8g)"),
    )


def disk_full(scene: FailureFacts) -> Diagnosis | None:
    """No room to write."""
    if "No space left on device" not in scene.text and "Disk quota exceeded" not in scene.text:
        return None
    return Diagnosis(why="the disk is full", remedies=("make room, or choose another --checkpoint.dir",))
