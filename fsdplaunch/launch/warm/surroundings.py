"""What a process inherits at its start, beside variables and files: what must agree, and what can be handed over.

A process that is forked elsewhere inherits from there. What it can change by itself is handed over; in all else
launcher and warm interpreter must agree, or the launch is a cold one.
"""

import ctypes
import os
import platform
import resource
from contextlib import suppress
from typing import Any

_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")
_STATUS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "THP_enabled", "TracerPid")
_FILES = ("cgroup", "attr/current", "personality", "loginuid", "timerslack_ns")
_GET_IO_PRIORITY = {"x86_64": 251, "aarch64": 31}
_OF_PROCESS = 1
_IGNORED, _BLOCKED = "SigIgn", "SigBlk"
SETTINGS = {"oom_score_adj": "", "coredump_filter": "0x"}
"""Files of /proc/self that a process may write, with what the kernel leaves out when it shows their number."""
LIMITS = tuple(sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}))


def surroundings() -> dict[str, Any]:
    """Return what must be the same: users, rights, group, name spaces, processors, priorities, stack size."""
    status = _status()
    return {
        "users": [*os.getresuid(), *os.getresgid(), *sorted(os.getgroups())],
        "namespaces": {name: _link(f"ns/{name}") for name in _NAMESPACES},
        "root": _link("root"),
        "processors": sorted(os.sched_getaffinity(0)),
        "scheduling": [os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0), _io_priority()],
        "memory nodes": [status.get("Mems_allowed"), _memory_policy()],
        "stack": list(resource.getrlimit(resource.RLIMIT_STACK)),
        "status": {name: status.get(name) for name in _STATUS},
        **{name: _text(name) for name in _FILES},
    }


def handed_over() -> dict[str, Any]:
    """Return what a forked process takes over: umask, limits, signals, settings of /proc.

    Returns:
        `ignored` and `blocked` are the kernel's masks, in hexadecimal digits.
    """
    status = _status()
    return {
        "umask": int(status.get("Umask", "0022"), 8),
        "limits": {str(number): list(resource.getrlimit(number)) for number in LIMITS},
        "ignored": status.get(_IGNORED, "0"),
        "blocked": status.get(_BLOCKED, "0"),
        "settings": {name: setting(name) for name in SETTINGS},
    }


def setting(name: str) -> str:
    """Return one of this process' settings as it can be written again; empty where the kernel has none."""
    text = _text(name)
    return SETTINGS[name] + text if text else ""


def difference(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    """Return the name of something in which two surroundings differ; None where they agree."""
    return next((name for name in {**one, **other} if one.get(name) != other.get(name)), None)


def signals_in(mask: str) -> set[int]:
    """Return the numbers of the signals in one of the kernel's masks."""
    bits = int(mask, 16)
    return {number for number in range(1, 65) if bits >> (number - 1) & 1}


def _status() -> dict[str, str]:
    lines = (line.partition(":") for line in _text("status").splitlines())
    return {name: value.strip() for name, _, value in lines}


def _text(name: str) -> str:
    with suppress(OSError), open(f"/proc/self/{name}", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
        return file.read().strip()
    return ""


def _link(name: str) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/self/{name}")  # noqa: PTH115
    return ""


def _io_priority() -> int:
    number = _GET_IO_PRIORITY.get(platform.machine())
    if number is None:
        return 0
    found = int(ctypes.CDLL(None).syscall(*map(ctypes.c_long, (number, _OF_PROCESS, 0))))
    return max(0, found)  # a kernel without it says -1


def _memory_policy() -> str:
    """Return what numactl may have set: the policy of the first mapping, `default` as a rule."""
    with suppress(OSError), open("/proc/self/numa_maps", encoding="ascii", errors="replace") as file:  # noqa: PTH123
        return file.readline().split(" ")[1]
    return ""
