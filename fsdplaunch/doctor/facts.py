"""What is known about a node before it trains, as plain values: read once, and made safe for a bug report."""

import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fsdplaunch.config.load import LoadedConfig
from fsdplaunch.config.schema.config import Config
from fsdplaunch.files import read_text
from fsdplaunch.launch.coordination.network import interfaces
from fsdplaunch.launch.plan import join_port, opens_port
from fsdplaunch.launch.preflight import is_taken
from fsdplaunch.launch.secret_variables import HIDDEN, IN_URL, SECRET_VALUE, TELLING, is_secret
from fsdplaunch.parent_death import ended_with_us
from fsdplaunch.probe.hardware import Driver, Gpu, read_driver, read_hardware

Status = Literal["ok", "warning", "problem", "skipped"]


@dataclass(frozen=True, slots=True)
class Check:
    """What one check found."""

    topic: str  # what was looked at, in one or two words
    status: Status  # ok, warning, problem (this node cannot do it) or skipped
    text: str
    hint: str = ""  # what to do about it; empty when there is nothing to do


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """The installed torch, as a process that imported it says."""

    version: str = ""  # for example `2.13.0+cpu`; empty when it cannot be imported
    cuda: str = ""  # version of CUDA it was built for; empty for a CPU build
    nccl: str = ""  # version of NCCL it was built with; empty without
    archs: tuple[str, ...] = ()  # GPU architectures it has code for, `sm_90`
    sees_gpus: int = 0  # GPUs on which torch has made a tensor
    gpu_error: str = ""  # why it could not on the others; empty when it could
    lacks: str = ""  # what of torch.distributed is not there, without which nothing runs
    error: str = ""  # why it could not be imported or asked; empty when it could


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A folder that files will be written to."""

    use: str
    path: str  # the folder, or its nearest parent that exists
    kind: str  # of the file system, `ext4`; empty when unknown
    free: int  # bytes
    writable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkInterface:
    """A network interface that is up; its first IPv4 address, and megabits per second where it says them."""

    name: str
    address: str
    speed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFacts:
    """Everything that checks look at."""

    python: str
    torch: TorchFacts | None  # of the same interpreter; None when it was not asked
    driver: Driver = field(default_factory=Driver)
    gpus: tuple[Gpu, ...] = ()  # those CUDA would show
    notes: tuple[str, ...] = ()
    cpus: int = 1  # processors this process may use
    memory: int | None = None  # host memory it may use, in bytes; None when unknown
    shared_memory: int | None = None  # size of /dev/shm in bytes; None when there is none
    open_files: tuple[int, int] = (-1, -1)  # limits of open files, soft and hard; -1 for none
    locked_memory: int = -1  # limit of locked memory in bytes, soft; -1 for none
    disks: tuple[Disk, ...] = ()
    interfaces: tuple[NetworkInterface, ...] = ()
    hostname: str = ""
    own_address: str = ""  # what that name resolves to; empty when it does not
    port_is_taken: bool = False  # somebody listens on the port the nodes meet at
    port: int = 0  # that port, 0 for any
    environ: Mapping[str, str] = field(default_factory=dict)
    config: Config | None = None
    config_path: str = ""
    config_errors: tuple[str, ...] = ()

    @property
    def wants_gpus(self) -> bool:
        """Return whether the configuration leaves the choice of GPUs open, or asks for them."""
        return self.config is None or not self.config.use_cpu

    @property
    def nodes(self) -> int:
        """Return the nodes of the configured run."""
        return self.config.num_machines if self.config else 1


VARIABLES = ("NCCL_", "GLOO_", "CUDA_", "TORCH_", "OMP_NUM_THREADS", "UCX_", "FI_", "PYTORCH_", "FSDP")
"""Variables that change how training runs."""


def collect_facts(
    loaded: LoadedConfig | None,
    *,
    config_errors: tuple[str, ...],
    torch: TorchFacts | None,
    environ: Mapping[str, str],
) -> DoctorFacts:
    """Look at this node; the configuration may be one that could not be read."""
    config = loaded.config if loaded else None
    hardware = read_hardware(environ)
    port = join_port(config) if config and opens_port(config) else 0
    folders = {"run folders": config.launch.log_dir if config else "runs"}
    folders["checkpoints"] = config.checkpoint.dir if config else "checkpoints"
    shared, address = None, ""
    with suppress(OSError):
        shared = shutil.disk_usage("/dev/shm").total  # noqa: S108  (asked about, not written to)
    with suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # RLIM_INFINITY is -1
    return DoctorFacts(
        python=f"{platform.python_version()} ({sys.executable})",
        torch=torch,
        driver=read_driver(hardware.gpus),
        gpus=hardware.gpus,
        notes=hardware.notes,
        cpus=hardware.cpu_count,
        memory=hardware.memory_bytes,
        shared_memory=shared,
        open_files=(soft, hard),
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        disks=tuple(_disk(use, Path(folder)) for use, folder in folders.items()),
        interfaces=tuple(read_interfaces()),
        hostname=socket.gethostname(),
        own_address=address,
        port=port,
        port_is_taken=is_taken(port),
        environ={name: value for name, value in environ.items() if name.startswith(VARIABLES)},
        config=config,
        config_path=str(loaded.path) if loaded and loaded.path else "none, built-in defaults",
        config_errors=config_errors,
    )


def read_interfaces(root: Path = Path("/sys/class/net")) -> Iterator[NetworkInterface]:
    """Yield the interfaces that are up, as the kernel lists them in `root`."""
    addresses = interfaces()
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if read_text(folder / "operstate").strip() in ("up", "unknown"):
            speed = read_text(folder / "speed").strip()
            known = int(speed) if speed.isdecimal() and int(speed) > 0 else None
            yield NetworkInterface(name=folder.name, address=addresses.get(folder.name, ""), speed=known)


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
    """Return the kind of file system a folder (absolute) is on, by the kernel's table; empty when unknown."""
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


TIMEOUT_SECONDS = 120
_CODE = """
import json, sys
import torch
import torch.distributed as dist
there = dist.is_available()
lacks = "torch.distributed" if not there else "" if dist.is_gloo_available() else "gloo"
cuda = torch.version.cuda or ""
nccl = ""
sees_gpus, gpu_error = 0, ""
try:
    if cuda or torch.version.hip:
        torch.cuda.init()
        for number in range(torch.cuda.device_count()):
            torch.empty(1, device=f"cuda:{number}")
            sees_gpus += 1
except Exception as error:
    gpu_error = (str(error).splitlines() or [type(error).__name__])[0]
if there and dist.is_nccl_available() and cuda:
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
sys.stdout.write("\\n" + json.dumps({
    "version": torch.__version__, "cuda": cuda, "nccl": nccl,
    "archs": torch.cuda.get_arch_list() if sees_gpus else [], "sees_gpus": sees_gpus, "gpu_error": gpu_error,
    "lacks": lacks,
}))
"""


def probe_torch(python: str = sys.executable) -> TorchFacts:
    """Start an interpreter, that of the workers, which imports torch and says what it has; takes seconds."""
    streams: dict[str, Any] = {"capture_output": True, "text": True, "timeout": TIMEOUT_SECONDS}
    try:
        done = subprocess.run([python, "-c", _CODE], check=False, preexec_fn=ended_with_us(), **streams)
    except subprocess.TimeoutExpired:
        return TorchFacts(error=f"importing it takes longer than {TIMEOUT_SECONDS} s")
    except OSError as error:
        return TorchFacts(error=f"{python} cannot be started: {error.strerror}")
    if done.returncode:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "")
        return TorchFacts(error=last or f"importing it ended with status {done.returncode}")
    found = json.loads(done.stdout.splitlines()[-1])
    return TorchFacts(**{**found, "archs": tuple(found["archs"])})


_SECRET_PAIR = re.compile(
    rf"""([\w.-]*(?:{TELLING})[\w.-]*["']?\s*[:=]\s*)("[^"]*"|'[^']*'|[^\s,}}\]]+)""", re.IGNORECASE
)
_ADDRESS = re.compile(r"\b(?!127\.0\.0\.1\b)(?:\d{1,3}\.){3}\d{1,3}\b")
_HOME = re.compile(r"/(home|Users)/[^/\s:,)'\"]+")


def redact(text: str, *, users: Sequence[str] = (), hosts: Sequence[str] = ()) -> str:
    """Return a text in which secrets, users, nodes and addresses are replaced."""
    text = _SECRET_PAIR.sub(rf"\1{HIDDEN}", SECRET_VALUE.sub(HIDDEN, text))
    text = IN_URL.sub(f"{HIDDEN}@", text)
    text = _HOME.sub(r"/\1/USER", text)
    for names, word in ((users, "USER"), (hosts, "HOST")):
        for name in sorted({name for name in names if name}, key=len, reverse=True):
            text = re.sub(rf"(?<![A-Za-z0-9_]){re.escape(name)}(?![A-Za-z0-9_])", word, text)
    return _ADDRESS.sub("ADDRESS", text)


def bug_report_block(
    facts: DoctorFacts, checks: Sequence[Check], *, version: str, settings: Mapping[str, str], users: Sequence[str]
) -> str:
    """Return the block for a bug report, as Markdown; `settings` are keys that are not at their default."""

    def hidden(name: str, value: str) -> str:
        return HIDDEN if is_secret(name, value) else value

    words = {"ok": "ok", "warning": "WARNING", "problem": "PROBLEM", "skipped": "-"}
    lines = [f"fsdplaunch {version}", ""]
    lines += [f"{words[check.status]:<8}{check.topic}: {check.text}" for check in checks]
    lines += ["", "configuration:", *(f"  {name}: {hidden(name, value)}" for name, value in settings.items())]
    lines += ["environment:"]
    lines += [f"  {name}={hidden(name, value)}" for name, value in sorted(facts.environ.items())]
    hosts = (facts.hostname, facts.hostname.partition(".")[0])
    return "```\n" + redact("\n".join(lines), users=users, hosts=hosts) + "\n```"
