"""Read everything that the checks look at. The only part of the doctor that touches the node."""

import ctypes
import os
import platform
import resource
import shutil
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdplaunch.config.load.load import LoadedConfig
from fsdplaunch.doctor.facts import Disk, DoctorFacts, DriverFacts, NetworkInterface, TorchFacts
from fsdplaunch.kernel_files import read_text
from fsdplaunch.launch.agent_command import join_port, opens_port
from fsdplaunch.launch.coordination.network import interfaces
from fsdplaunch.launch.ports import find_holder
from fsdplaunch.launch.preflight import check_gpus
from fsdplaunch.probe.gpus import driver_is_installed
from fsdplaunch.probe.hardware import read_hardware

VARIABLES = ("NCCL_", "GLOO_", "CUDA_", "TORCH_", "OMP_NUM_THREADS", "UCX_", "FI_", "PYTORCH_", "FSDP")
"""Variables that change how training runs."""
_UNSYNCHRONISED = 0x0040


def collect_facts(
    loaded: LoadedConfig | None,
    *,
    config_errors: tuple[str, ...],
    torch: TorchFacts | None,
    environ: Mapping[str, str],
) -> DoctorFacts:
    """Look at this node.

    Args:
        loaded: The configuration; None when it could not be read.
        config_errors: Why it could not.
        torch: What torch says about itself, if it was asked.
        environ: The process's variables.
    """
    config = loaded.config if loaded else None
    hardware = read_hardware(environ)
    port = join_port(config) if config else 0
    folders = {"run folders": config.launch.log_dir if config else "runs"}
    folders["checkpoints"] = config.checkpoint.dir if config else "checkpoints"
    obstacles = []
    if config is not None:
        chosen = [str(number) for number in range(len(hardware.gpus))]
        obstacles = [
            (found.message, found.hint, found.fatal) for found in check_gpus(config, hardware.gpus, chosen)
        ]
        obstacles += list(_counts(config, len(hardware.gpus)))
    return DoctorFacts(
        python=f"{platform.python_version()} ({sys.executable})",
        torch=torch,
        driver=read_driver(),
        gpus=hardware.gpus,
        cpus=hardware.cpu_count,
        memory=hardware.memory_bytes,
        shared_memory=_shared_memory(),
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_memory=_limit(resource.RLIMIT_MEMLOCK)[0],
        disks=tuple(_disk(use, Path(folder)) for use, folder in folders.items()),
        interfaces=tuple(read_interfaces()),
        hostname=socket.gethostname(),
        own_address=_own_address(),
        port=port if config is None or opens_port(config) else 0,
        port_holder=find_holder(port) if config is None or opens_port(config) else None,
        clock_synchronised=_clock(),
        environ={name: value for name, value in environ.items() if name.startswith(VARIABLES)},
        config=config,
        config_path=str(loaded.path) if loaded and loaded.path else "none, built-in defaults",
        config_errors=config_errors,
        obstacles=tuple(dict.fromkeys(obstacles)),
    )


def _counts(config: Any, gpus: int) -> Iterator[tuple[str, str, bool]]:
    """Tell whether there is a GPU for each configured worker."""
    from fsdplaunch.config.world_size import workers_per_node

    configured = workers_per_node(config)
    if configured is not None and gpus and configured > gpus and not config.use_cpu:
        text = f"the configuration sets {configured} workers on this node, it has {gpus} visible GPUs"
        yield text, "lower num_processes, or set use_cpu: true", True


def read_driver() -> DriverFacts:
    """Ask NVIDIA's management library what `probe` does not: versions, links, memory errors."""
    if not driver_is_installed():
        return DriverFacts()
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except Exception as error:
        return DriverFacts(notes=(f"the NVIDIA driver does not answer: {error}",))
    try:
        return _ask(nvml)
    finally:
        nvml.nvmlShutdown()


def _ask(nvml: Any) -> DriverFacts:
    version = nvml.nvmlSystemGetDriverVersion()
    newest = int(nvml.nvmlSystemGetCudaDriverVersion())
    handles = []
    for index in range(nvml.nvmlDeviceGetCount()):
        with suppress(nvml.NVMLError):
            handles.append((index, nvml.nvmlDeviceGetHandleByIndex(index)))
    peers: dict[tuple[int, int], bool] = {}
    links: dict[int, int] = {}
    errors: dict[int, int] = {}
    for index, handle in handles:
        links[index] = sum(1 for link in range(18) if _link_is_up(nvml, handle, link))
        with suppress(nvml.NVMLError):
            count = nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            )
            errors |= {index: int(count)} if count else {}
        for other, second in handles:
            if index < other:
                with suppress(nvml.NVMLError):
                    status = nvml.nvmlDeviceGetP2PStatus(handle, second, nvml.NVML_P2P_CAPS_INDEX_READ)
                    peers[index, other] = status == nvml.NVML_P2P_STATUS_OK
    return DriverFacts(
        version=version.decode() if isinstance(version, bytes) else version,
        cuda=(newest // 1000, newest % 1000 // 10),
        peers=peers,
        nvlinks=links,
        bad_memory=errors,
    )


def _link_is_up(nvml: Any, handle: Any, link: int) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
    except nvml.NVMLError:
        return False


def read_interfaces(root: Path = Path("/sys/class/net")) -> Iterator[NetworkInterface]:
    """Yield the interfaces that are up.

    Args:
        root: Where the kernel lists them.
    """
    addresses = interfaces()
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        state = read_text(folder / "operstate").strip()
        if state not in ("up", "unknown"):
            continue
        speed = read_text(folder / "speed").strip()
        known = int(speed) if speed.isdecimal() and int(speed) > 0 else None
        yield NetworkInterface(name=folder.name, address=addresses.get(folder.name, ""), speed=known)


def _own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _shared_memory() -> int | None:
    try:
        return shutil.disk_usage("/dev/shm").total  # noqa: S108  (asked about, not written to)
    except OSError:
        return None


def _limit(kind: int) -> tuple[int, int]:
    soft, hard = resource.getrlimit(kind)
    return tuple(-1 if value == resource.RLIM_INFINITY else value for value in (soft, hard))  # type: ignore[return-value]


def _disk(use: str, folder: Path) -> Disk:
    absolute = folder.absolute()
    there = next(path for path in (absolute, *absolute.parents) if path.exists())
    return Disk(
        use=use,
        path=str(there),
        kind=file_system(there),
        free=shutil.disk_usage(there).free,
        writable=there.is_dir() and os.access(there, os.W_OK | os.X_OK),
    )


def file_system(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Return the kind of file system a folder is on; empty when unknown.

    Args:
        folder: An absolute path that exists.
        mounts: The kernel's table.
    """
    best, kind = "", ""
    for line in read_text(mounts).splitlines():
        words = line.split()
        if len(words) < 3:  # noqa: PLR2004
            continue
        point = words[1].replace("\\040", " ")
        inside = str(folder) == point or str(folder).startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, words[2]
    return kind


def _clock() -> bool | None:
    """Ask the kernel whether something keeps its clock right: adjtimex(2) with nothing to adjust."""
    buffer = ctypes.create_string_buffer(256)
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    except (OSError, AttributeError):
        return None
    if state < 0:
        return None
    status = struct.unpack_from("i", buffer, 40)[0]  # struct timex on 64-bit Linux: modes, then four longs
    return not status & _UNSYNCHRONISED
