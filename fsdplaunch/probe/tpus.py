"""TPU chips that are attached to this host, and the hosts of its pod; read from the kernel and the environment."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_DEVICES = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"
_TPUS = frozenset({"0x0027", "0x005e", "0x0063", "0x006f", "0x0056", "0x0062", "0x0076"})
"""PCI device numbers of TPU v2 to v7x, as in torch_xla 2.9."""


def count_tpu_chips(devices: Path = _DEVICES) -> int:
    """Return how many TPU chips the kernel lists.

    Args:
        devices: The folder of PCI devices.
    """
    return sum(
        _read(vendor.parent / "device") in _TPUS for vendor in devices.glob("*/vendor") if _is_google(vendor)
    )


def pod_settings(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return what a TPU pod's variables say of keys that nobody else sets, as KEY=VALUE.

    Args:
        environ: The launcher's. TPU_WORKER_HOSTNAMES names the hosts, TPU_WORKER_ID this one.
    """
    hosts = [name for name in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if name.strip()]
    own = environ.get("TPU_WORKER_ID", "")
    if len(hosts) < 2 or not (own.isascii() and own.isdecimal()):  # noqa: PLR2004  (one host is no pod)
        return ()
    return (f"num_machines={len(hosts)}", f"machine_rank={int(own)}", f"main_process_ip={hosts[0].strip()}")


def _is_google(vendor: Path) -> bool:
    return _read(vendor) == _GOOGLE


def _read(path: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="ascii").strip()
    return ""
