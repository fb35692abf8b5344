"""What a launch decides for PyTorch/XLA: processes per host, and the variables that its runtime reads. Pure."""

from collections.abc import Mapping

from fsdplaunch.config.resolve import converts_to_bf16, runs_spmd, shards_on_xla
from fsdplaunch.config.schema.config import Config
from fsdplaunch.errors import MachineError, UsageError

DEVICE, _CPU_DEVICES = "PJRT_DEVICE", "CPU_NUM_DEVICES"
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


def is_on_cpu(config: Config, *, environ: Mapping[str, str], chips: int) -> bool:
    """Return whether PyTorch/XLA computes on the CPU: it is set, also by PJRT_DEVICE, or there is no TPU."""
    if config.use_cpu:
        return True
    return environ.get(DEVICE, "").upper() == "CPU" if environ.get(DEVICE) else chips == 0


def xla_processes(config: Config, *, environ: Mapping[str, str], chips: int) -> int:
    """Return how many processes PyTorch/XLA has on this host, which has so many TPU chips."""
    on_cpu = is_on_cpu(config, environ=environ, chips=chips)
    processes = config.xla.processes_per_host or (1 if on_cpu else max(chips, 1))
    if on_cpu and (processes > 1 or config.num_machines > 1):
        where = f"{processes} processes" if processes > 1 else f"{config.num_machines} nodes"
        msg = f"PyTorch/XLA on a CPU cannot join {where}: each would train a model of its own"
        hint = "use one node and xla.processes_per_host: 1; xla.cpu_devices makes several devices"
        raise MachineError(msg, hint=hint)
    return processes


def check_groups(config: Config) -> None:
    """Refuse sharding_groups: all processes shard together, and between groups PyTorch/XLA exchanges nothing."""
    if (
        "sharding_groups" in config.fsdp_config.xla_fsdp_settings
        and shards_on_xla(config)
        and not runs_spmd(config)
    ):
        msg = "sharding_groups cannot be followed: groups would each train a model of their own"
        raise UsageError(msg, hint="leave it out: all processes shard together")


def xla_variables(config: Config, *, environ: Mapping[str, str], chips: int) -> dict[str, str]:
    """Return the variables that choose PyTorch/XLA's device, as far as the caller has not."""
    found = {} if environ.get(_LOG_LEVEL) else {_LOG_LEVEL: "2"}  # a line for every compilation otherwise
    if is_on_cpu(config, environ=environ, chips=chips):
        given = environ.get(_CPU_DEVICES, "").strip()
        if given and not (given.isascii() and given.isdecimal() and int(given)):
            msg = f"{_CPU_DEVICES} is {given!r}, and is to be a number of devices, at least 1"
            raise UsageError(msg, hint=f"unset {_CPU_DEVICES}; xla.cpu_devices says it, too")
        devices = str(config.xla.cpu_devices or 1) if runs_spmd(config) else "1"
        return found | {DEVICE: "CPU", _CPU_DEVICES: given or devices}
    if not environ.get(DEVICE):
        found[DEVICE] = "TPU"
    if converts_to_bf16(config) and config.downcast_bf16:  # of floats alone; accelerate's own is read in workers
        found |= {"XLA_DOWNCAST_BF16": "1", "ACCELERATE_DOWNCAST_BF16": "1"}
    elif converts_to_bf16(config):  # of doubles too
        found["XLA_USE_BF16"] = "1"
    return found
