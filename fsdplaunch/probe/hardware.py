"""What this machine offers a training run: GPUs, processors, memory. Never imports torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fsdplaunch.byte_sizes import GIB
from fsdplaunch.probe.cgroup_limits import usable_cpus, usable_memory
from fsdplaunch.probe.gpus import Gpu, read_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """This machine, as a worker started from here would see it.

    Attributes:
        gpus: GPUs CUDA would show, in its order.
        cpu_count: Processors this process may use (affinity and cgroup quota).
        memory_bytes: Host memory it may use (installed, or the cgroup's limit); None where unknown.
        notes: What the reader should know about how this was found.
    """

    gpus: tuple[Gpu, ...] = ()
    cpu_count: int = 1
    memory_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def gpu_memory_bytes(self) -> int | None:
        """Return memory of the smallest GPU, which is what a plan must fit in; None where none is known."""
        return min((gpu.memory_bytes for gpu in self.gpus if gpu.memory_bytes), default=None)

    @property
    def all_have_bf16(self) -> bool:
        """Tell whether there are GPUs and every one computes bf16."""
        return bool(self.gpus) and all(gpu.has_bf16 for gpu in self.gpus)


def read_hardware(environ: Mapping[str, str], *, root: Path = Path("/")) -> Hardware:
    """Look at this machine; takes some tens of milliseconds.

    Args:
        environ: Variables of the workers to be; CUDA_VISIBLE_DEVICES is honoured.
        root: Where /proc and /sys are found.
    """
    gpus, notes = read_gpus(environ)
    if not gpus and not notes and (root / "dev/kfd").exists():
        notes = ("an AMD GPU driver is loaded, but only NVIDIA GPUs are counted here",)
    return Hardware(gpus=gpus, cpu_count=usable_cpus(root), memory_bytes=usable_memory(root), notes=notes)


def describe_hardware(hardware: Hardware) -> str:
    """Return one line: GPUs by kind, memory, processors.

    Args:
        hardware: What was found.
    """
    return "   ".join([*_gpu_words(hardware.gpus), *_host_words(hardware)])


def _gpu_words(gpus: tuple[Gpu, ...]) -> list[str]:
    kinds: dict[tuple[str, int, tuple[int, int]], int] = {}
    for gpu in gpus:
        kind = (gpu.name, gpu.memory_bytes, gpu.compute_capability)
        kinds[kind] = kinds.get(kind, 0) + 1
    words = []
    for (name, memory, (major, minor)), count in kinds.items():
        size = f"{memory / GIB:.0f} GiB, " if memory else ""
        words.append(f"{count} x {name} ({size}sm_{major}{minor})")
    return words or ["no NVIDIA GPU"]


def _host_words(hardware: Hardware) -> list[str]:
    memory = [] if hardware.memory_bytes is None else [f"{hardware.memory_bytes / GIB:.0f} GiB of memory"]
    return [*memory, f"{hardware.cpu_count} processors"]
