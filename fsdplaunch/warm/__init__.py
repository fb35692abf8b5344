"""Where warm interpreter and launch meet, and what must agree between them, or be handed over.

Each interpreter listens under a name of its own in a folder (0700), which stands in XDG_RUNTIME_DIR or else in
/tmp. It is opened once and looked at through its descriptor, so that nothing can be put in its place between look
and use.

The name says what the interpreter was started with. What Python code reads while it is imported is noted at that
time, variable by variable, and compared when a launch comes. What a forked process can change by itself is handed
over; in all else both must agree, or the launch is a cold one.
"""

import hashlib
import json
import os
import resource
import socket
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from fsdplaunch import __version__
from fsdplaunch.launch.agent_process import READ_AT_START

PROTOCOL = 3
_PREFIXES = (
    *READ_AT_START,
    # threads and arithmetic
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "NUMEXPR_", "NPY_", "DNNL_", "ONEDNN_"),
    # torch
    *("TORCH", "PYTORCH", "ATEN_", "CAFFE2_", "KINETO_", "TRITON_", "XLA_", "PJRT_"),
    # devices
    *("CUDA_", "NVIDIA_", "CUBLAS", "CUDNN", "NVTX_", "HIP_", "HSA_", "ROC", "AMD_", "ZE_", "SYCL_", "ONEAPI_"),
    # the network
    *("NCCL_", "RCCL_", "GLOO_", "UCC_", "UCX_", "FI_"),
    # checkers and profilers
    *("ASAN_", "LSAN_", "TSAN_", "UBSAN_"),
)
_PER_RUN = ("TORCHELASTIC_", "TORCH_FR_DUMP_TEMP_FILE")
"""Of those, what differs from run to run and is read only while one runs."""
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")
_STATUS = (
    *("Uid", "Gid", "Groups", "Cpus_allowed", "Mems_allowed", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"),
    *("NoNewPrivs", "Seccomp", "THP_enabled", "TracerPid"),
)
_FILES = ("cgroup", "attr/current", "personality", "loginuid", "timerslack_ns")
_NAME = "fsdplaunch_warm"  # not the prefix of `fsdplaunch.private_dir`, whose folders go with their processes
SUFFIX = ".sock"
_CREDENTIALS = struct.Struct("@iII")


def native_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that native code may read before, or while, it is loaded."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(_PREFIXES) and not name.startswith(_PER_RUN)
    }


def has_say(name: str) -> bool:
    """Return whether a variable counts that Python code was seen to read while it was imported."""
    return not name.startswith(("FSDPLAUNCH_", *_PER_RUN)) and name not in ("PWD", "OLDPWD", "SHLVL", "_")


def server_name(python: str, modules: Sequence[Sequence[str]], environ: Mapping[str, str], *, folder: str) -> str:
    """Return the name under which a warm interpreter for such launches listens.

    The current folder counts where PYTHONPATH has relative entries.
    """
    path = environ.get("PYTHONPATH", "")
    is_relative = bool(path) and not all(map(os.path.isabs, path.split(os.pathsep)))
    found = os.stat(python)  # noqa: PTH116  (of the file behind the links)
    text = json.dumps(
        [
            *(PROTOCOL, __version__, python, found.st_mtime_ns, found.st_size),
            *(list(map(list, modules)), native_variables(environ), folder if is_relative else ""),
        ]
    )
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:20]


_LIMITS = tuple(sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}))


def surroundings() -> dict[str, Any]:
    """Return what must be the same: users, rights, group, name spaces, processors, priorities, stack size."""
    status = _status()
    return {
        **{name: status.get(name) for name in _STATUS},
        **{name: kernel_text(name) for name in _FILES},
        **{f"the {name} namespace": _link(f"ns/{name}") for name in _NAMESPACES},
        "the root folder": _link("root"),
        "scheduling": [os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)],
        "the memory policy": kernel_text("numa_maps", first_line=True).split(" ")[1:2],  # as numactl sets it
        "the stack's size": list(resource.getrlimit(resource.RLIMIT_STACK)),
    }


def handed_over() -> dict[str, Any]:
    """Return what a forked process takes over: umask, limits, signals, whom the kernel kills first."""
    status = _status()
    return {
        "umask": int(status.get("Umask", "0022"), 8),
        "limits": {str(number): list(resource.getrlimit(number)) for number in _LIMITS},
        "ignored": status.get("SigIgn", "0"),  # the kernel's mask, in hexadecimal digits
        "oom_score_adj": kernel_text("oom_score_adj"),
    }


def _status() -> dict[str, str]:
    lines = (line.partition(":") for line in kernel_text("status").splitlines())
    return {name: value.strip() for name, _, value in lines}


def kernel_text(name: str, *, first_line: bool = False) -> str:
    """Return what a file in /proc/self says; empty where there is none."""
    with suppress(OSError), open(f"/proc/self/{name}", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
        return (file.readline() if first_line else file.read()).strip()
    return ""


def _link(name: str) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/self/{name}")  # noqa: PTH115
    return ""


class UnsafeFolderError(Exception):
    """The folder is not this user's alone."""


def folder_path(environ: Mapping[str, str]) -> str:
    """Return where the folder is, or would be."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    with suppress(OSError):
        found = os.stat(runtime)  # noqa: PTH116
        is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
        if is_ours and os.path.isabs(runtime):  # noqa: PTH117  (a text among texts)
            return f"{runtime}/{_NAME}"
    return f"/tmp/{_NAME}-{os.geteuid()}"  # noqa: S108  (it is checked when it is opened: owner, mode, no link)


@contextmanager
def opened_folder(path: str, *, make: bool = False) -> Iterator[int]:
    """Give a descriptor of the folder, which must be this user's alone; `make` it where it is not there."""
    if make:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)  # noqa: PTH102
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        msg = f"{path} is not a folder ({error.strerror})"
        raise UnsafeFolderError(msg) from None
    try:
        found = os.fstat(folder)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            msg = f"{path} is not yours alone (owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o})"
            raise UnsafeFolderError(msg)
        yield folder
    finally:
        os.close(folder)


def socket_names(folder: int) -> list[str]:
    """Return the names of the sockets in an opened folder, without their suffix."""
    return sorted(name.removesuffix(SUFFIX) for name in os.listdir(folder) if name.endswith(SUFFIX))


def listen(folder: int, name: str) -> tuple[socket.socket, tuple[int, int]]:
    """Listen under a name, in the place of what listened there; return the socket and its file's identity."""
    own = f".{os.getpid()}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    with suppress(FileNotFoundError):
        os.unlink(own, dir_fd=folder)
    listener.bind(f"/proc/self/fd/{folder}/{own}")
    listener.listen(16)
    os.rename(own, name + SUFFIX, src_dir_fd=folder, dst_dir_fd=folder)
    found = os.stat(name + SUFFIX, dir_fd=folder, follow_symlinks=False)
    return listener, (found.st_dev, found.st_ino)


def connect(folder: int, name: str) -> socket.socket | None:
    """Connect to what listens under a name, as this user; None where nothing does. A dead socket is removed."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        end.connect(f"/proc/self/fd/{folder}/{name}{SUFFIX}")  # refused where many wait that it has not answered
        end.setblocking(True)
        if peer_user(end) == os.geteuid():
            return end
    except ConnectionRefusedError:  # it was killed
        with suppress(OSError):
            os.unlink(name + SUFFIX, dir_fd=folder)
    except OSError:
        pass
    end.close()
    return None


def peer_user(end: socket.socket) -> int:
    """Return the user of the process at the other end, as the kernel knows it."""
    _, user, _ = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


def is_at(path: str, name: str, identity: tuple[int, int]) -> bool:
    """Return whether the socket's file is still the one that `listen` made."""
    with suppress(OSError):
        found = os.lstat(f"{path}/{name}{SUFFIX}")
        return (found.st_dev, found.st_ino) == identity
    return False
