"""Config -> LaunchPlan: everything a launch will do, as data, before anything is done.

`--dry-run` prints the very object that `fsdplaunch.launch.runner.run_plan` takes. Nothing here reads the disk, the
clock or the node; what has to be known is passed in. The agent takes torchrun's own options, so that its command
can be read with torchrun's help.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fsdplaunch.config.environment import ALLOW_UNSHARDED, DEVICE, encode
from fsdplaunch.config.resolve import CPU_WORKERS, converts_to_bf16, runs_spmd, shards_on_xla, uses_xla, with_mesh
from fsdplaunch.config.schema.config import Config, variable_of
from fsdplaunch.display_text import counted
from fsdplaunch.errors import MachineError, UsageError
from fsdplaunch.launch.entry_points import AGENT, BOOTSTRAP
from fsdplaunch.launch.secret_variables import HIDDEN, is_secret, without_variables
from fsdplaunch.run_dir import FLIGHT_RECORDER, RUN_DIR

DEFAULT_PORT = 29500
XLA_DEVICE, _CPU_DEVICES = "PJRT_DEVICE", "CPU_NUM_DEVICES"
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What a plan needs to know about the node it is for."""

    gpus: Sequence[str] = ()  # visible GPUs, by the names that CUDA_VISIBLE_DEVICES has for them, in CUDA's order
    cpus: int
    python: str = sys.executable  # the interpreter that workers run
    has_amd: bool = False  # there are GPUs of AMD's, which are not used
    tpu_chips: int = 0  # TPU chips that are attached
    port_is_taken: bool = False  # somebody listens on the port the configuration names
    # The caller's environment; a variable the user set is not overridden by a guess of ours.
    environ: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchTarget:
    """What every rank runs."""

    name: str  # path of the script, name of the module or of the program, as the user wrote it
    arguments: tuple[str, ...] = ()  # its own arguments, passed on untouched
    is_module: bool = False
    is_python: bool = True  # run it in Python; otherwise it is a program of its own

    @property
    def command(self) -> tuple[str, ...]:
        """Return what follows the agent's options on its command line."""
        flags = ("-m", BOOTSTRAP, *(("-m",) if self.is_module else ())) if self.is_python else ()
        return (*flags, self.name, *self.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """One node's part of a launch."""

    run_id: str  # unique name of this run and attempt; also the rendezvous id
    run_dir: Path  # folder that gets the plan, the result and each rank's files
    argv: tuple[str, ...]  # the command that starts the elastic agent, one item per argument
    env: Mapping[str, str]  # variables added to the caller's environment, all texts
    target: LaunchTarget
    workers: int
    nodes: int
    device: str  # `cuda`, `cpu`, or `xla` for whatever PyTorch/XLA computes on
    gpus: tuple[str, ...] = ()  # the GPU of each local rank, by number or name; empty on CPU
    config: Config
    notes: tuple[str, ...] = ()  # what the user should read once
    # Workers over all nodes, where they are known; nodes may have different numbers of them.
    ranks: int | None = None
    origins: Mapping[str, str] = field(default_factory=dict)  # of each key that is set, where, in words
    sent: str | None = None  # what the command is given to read, where it hands the run to a scheduler

    @property
    def script(self) -> str:
        """Return the script (or module) as the user wrote it."""
        return self.target.name

    @property
    def world_size(self) -> int:
        """Return the ranks over all nodes."""
        return self.workers * self.nodes if self.ranks is None else self.ranks

    def hides(self, name: str) -> bool:
        """Return whether a variable of the workers is not to be shown."""
        return name in self.config.launch.env or is_secret(name, self.env[name])

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, for `--json` and the run's folder; without the values of secrets."""
        return {
            "run_id": self.run_id,
            "run_dir": str(self.run_dir),
            "argv": list(self.argv),
            "env": {name: HIDDEN if self.hides(name) else value for name, value in self.env.items()},
            "script": self.script,
            "arguments": list(self.target.arguments),
            "workers": self.workers,
            "nodes": self.nodes,
            "world_size": self.world_size,
            "device": self.device,
            "gpus": list(self.gpus),
            "origins": dict(self.origins),
            "notes": list(self.notes),
            **({"sent": self.sent} if self.sent is not None else {}),
        }


def build_plan(
    config: Config,
    *,
    node: NodeFacts,
    target: LaunchTarget,
    run_id: str,
    run_dir: Path,
    allow_unsharded: bool = False,
    notes: Sequence[str] = (),
    ranks: int | None = None,
) -> LaunchPlan:
    """Decide everything a launch does on this node.

    The run's folder is absolute, as workers may change directory. `ranks` are the workers over all nodes, where
    they are known.
    """
    if target.is_module and not target.is_python:
        msg = "-m names a Python module, and --no-python says that there is no Python to run"
        raise UsageError(msg, hint="leave one of them out")
    gpus = () if uses_xla(config) else _chosen_gpus(config, node)
    device = "xla" if uses_xla(config) else "cpu" if config.use_cpu or not gpus else "cuda"
    workers = _workers_here(config, node, device, len(gpus))
    launch = config.launch
    command = [
        *(node.python, "-u", str(AGENT)),
        f"--nnodes={launch.nodes or config.num_machines}",
        f"--nproc-per-node={workers}",
        f"--max-restarts={launch.max_restarts}",
        f"--monitor-interval={launch.monitor_interval_seconds}",
        f"--role={launch.role}",
        *([f"--event-log-handler={launch.event_log}"] if launch.event_log else []),
        *_rendezvous(config, node, run_id),
        f"--log-dir={run_dir}",
    ]
    env = _worker_variables(config, node, workers, device=device, run_dir=run_dir, ranks=ranks)
    if allow_unsharded:
        env[ALLOW_UNSHARDED] = "1"
    if device == "xla":
        env |= _xla_variables(config, environ=node.environ, chips=node.tpu_chips)
    return LaunchPlan(
        run_id=run_id,
        run_dir=run_dir,
        argv=(*command, *target.command),
        env=env,
        target=target,
        workers=workers,
        nodes=config.num_machines,
        device=device,
        gpus=gpus[:workers] if device == "cuda" else (),
        config=config,
        notes=(*notes, *_notes(config, node, target, device)),
        ranks=ranks,
    )


def _workers_here(config: Config, node: NodeFacts, device: str, gpus: int) -> int:
    if device == "xla":
        on_cpu = _is_on_cpu(config, environ=node.environ, chips=node.tpu_chips)
        processes = config.xla.processes_per_host or (1 if on_cpu else max(node.tpu_chips, 1))
        if on_cpu and (processes > 1 or config.num_machines > 1):
            where = f"{processes} processes" if processes > 1 else f"{config.num_machines} nodes"
            msg = f"PyTorch/XLA on a CPU cannot join {where}: each would train a model of its own"
            hint = "use one node and xla.processes_per_host: 1; xla.cpu_devices makes several devices"
            raise MachineError(msg, hint=hint)
        return processes
    gpus = gpus if device == "cuda" else 0
    auto, asked = gpus or CPU_WORKERS, config.launch.workers_per_node
    if config.distributed_type == "NO":
        workers = 1
    elif asked == "gpu" and not gpus:
        msg = "launch.workers_per_node is gpu, but this run has no GPUs"
        raise MachineError(msg, hint="set it to auto or to a number to run on CPU with gloo")
    elif asked is not None:
        workers = asked if isinstance(asked, int) else node.cpus if asked == "cpu" else auto
    else:
        workers = auto if config.num_processes == "auto" else config.num_processes // config.num_machines
    if device == "cuda" and workers > gpus:
        here = counted(gpus, "visible GPU")
        msg = f"the configuration asks for {counted(workers, 'worker')} on this node, but it has {here}"
        raise MachineError(msg, hint="lower num_processes, or set use_cpu: true to run on CPU with gloo")
    return workers


def _chosen_gpus(config: Config, node: NodeFacts) -> tuple[str, ...]:
    if _names_all_gpus(config) or not node.gpus:
        return tuple(node.gpus)
    wanted = [item.strip() for item in (config.gpu_ids or "").split(",") if item.strip()]
    missing = [item for item in wanted if item.isdigit() and item not in node.gpus]
    if missing and not config.use_cpu:
        msg = f"gpu_ids names GPU {', '.join(missing)}, and this node shows {', '.join(node.gpus)}"
        raise MachineError(msg, hint="name some of these, or leave gpu_ids out to use all")
    return tuple(wanted)


def _names_all_gpus(config: Config) -> bool:
    return config.gpu_ids is None or config.gpu_ids.strip().lower() == "all"


def _worker_variables(
    config: Config, node: NodeFacts, workers: int, *, device: str, run_dir: Path, ranks: int | None
) -> dict[str, str]:
    if device == "cpu" and config.distributed_type.startswith("MULTI"):
        config = replace(config, use_cpu=True)  # accelerate would make no process group without it
    # Sizes of meshes as numbers, which other libraries want; launch.env once, as the variables they are.
    on_xla, world = uses_xla(config), workers * config.num_machines if ranks is None else ranks
    env = encode(without_variables(config if on_xla else with_mesh(config, world)))
    env |= {RUN_DIR: str(run_dir), DEVICE: device}
    if on_xla:
        env.pop("ACCELERATE_USE_CPU", None)  # PJRT_DEVICE says it; accelerate would do without PyTorch/XLA
    if device == "cpu":
        # Whatever torch or a script finds by itself, the workers compute where the plan says.
        env |= {"CUDA_VISIBLE_DEVICES": ""} | ({"HIP_VISIBLE_DEVICES": "-1"} if node.has_amd else {})
    elif not _names_all_gpus(config):
        env["CUDA_VISIBLE_DEVICES"] = config.gpu_ids or ""
    if config.launch.max_restarts or config.launch.nodes:
        # Without it torch keeps one store for all attempts, and new workers meet the dead ones' addresses.
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    defaults = {
        "OMP_NUM_THREADS": str(max(1, node.cpus // workers)),
        # Torch remembers the last collectives, about 1 MB per rank, and writes them when one of them times out.
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(run_dir / FLIGHT_RECORDER),
    }
    if config.launch.keep_global_batch:  # a script that numbers the words of a set numbers them alike on all ranks
        defaults["PYTHONHASHSEED"] = "0"
    env |= {name: value for name, value in defaults.items() if name not in node.environ}
    return env | config.launch.env


def _rendezvous(config: Config, node: NodeFacts, run_id: str) -> list[str]:
    """Return where the agents meet. `is_host` and the local address are always given: torchrun's guesses hang."""
    launch, endpoint, address = config.launch, config.launch.rendezvous_endpoint, config.launch.local_address
    if config.num_machines == 1:
        address, port = address or "127.0.0.1", config.main_process_port or 0
        if node.port_is_taken:  # any free one; several nodes could not agree on another one here
            endpoint, port = None, 0
        endpoint = endpoint or f"{address}:{port}"
    elif endpoint is None and config.main_process_ip:
        endpoint = f"{config.main_process_ip}:{config.main_process_port or DEFAULT_PORT}"
    if endpoint is None:
        msg = f"num_machines is {config.num_machines}, but nothing says where the nodes meet"
        raise UsageError(msg, hint="set main_process_ip (and main_process_port) to node 0's address")
    if config.num_machines > 1 and config.machine_rank is None:
        msg = f"num_machines is {config.num_machines}, but nothing says which node this is"
        hint = f"set {variable_of('machine_rank')} on each node: 0 on the first, 1 on the next"
        raise UsageError(msg, hint=hint)
    timeout = max(1, round(launch.rendezvous_timeout_seconds))
    settings = {"is_host": int(opens_port(config)), "join_timeout": timeout} | launch.rendezvous_options
    return [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={launch.rendezvous_id or (run_id if config.num_machines == 1 else endpoint)}",
        f"--rdzv-conf={','.join(f'{name}={value}' for name, value in settings.items())}",
        *([f"--local-addr={address}"] if address else []),
    ]


def _notes(config: Config, node: NodeFacts, target: LaunchTarget, device: str) -> list[str]:
    notes = []
    if device == "xla" and not config.use_cpu and _is_on_cpu(config, environ=node.environ, chips=node.tpu_chips):
        notes.append("no TPU is attached: running PyTorch/XLA on CPU")
    if device == "cpu" and not config.use_cpu:
        named = "" if _names_all_gpus(config) else f", though gpu_ids names {config.gpu_ids}"
        notes.append(f"no GPU is visible{named}: running on CPU with gloo")
    if config.num_machines == 1 and node.port_is_taken:
        notes.append("the configured port is in use: another one is used")
    if not target.is_python and config.distributed_type == "FSDP":
        notes.append(f"{target.name} runs as a program of its own: whether it shards its model is not checked")
    return notes


def join_port(config: Config) -> int:
    """Return the configured port; 0 when any will do."""
    if config.launch.rendezvous_endpoint:
        return int(config.launch.rendezvous_endpoint.rpartition(":")[2])
    return config.main_process_port or (DEFAULT_PORT if config.num_machines > 1 else 0)


def opens_port(config: Config) -> bool:
    """Return whether this node is the one that listens there."""
    return config.num_machines == 1 or config.machine_rank == 0


def _is_on_cpu(config: Config, *, environ: Mapping[str, str], chips: int) -> bool:
    if config.use_cpu:
        return True
    return environ.get(XLA_DEVICE, "").upper() == "CPU" if environ.get(XLA_DEVICE) else chips == 0


def check_groups(config: Config) -> None:
    """Refuse sharding_groups: all processes shard together, and between groups PyTorch/XLA exchanges nothing."""
    if (
        "sharding_groups" in config.fsdp_config.xla_fsdp_settings
        and shards_on_xla(config)
        and not runs_spmd(config)
    ):
        msg = "sharding_groups is not supported: each group would train its own model"
        raise UsageError(msg, hint="leave it out: all processes shard together")


def _xla_variables(config: Config, *, environ: Mapping[str, str], chips: int) -> dict[str, str]:
    found = {} if environ.get(_LOG_LEVEL) else {_LOG_LEVEL: "2"}  # a line for every compilation otherwise
    if _is_on_cpu(config, environ=environ, chips=chips):
        given = environ.get(_CPU_DEVICES, "").strip()
        if given and not (given.isascii() and given.isdecimal() and int(given)):
            msg = f"{_CPU_DEVICES} is {given!r}, which is not a number of devices (at least 1)"
            raise UsageError(msg, hint=f"unset {_CPU_DEVICES}; or set xla.cpu_devices")
        devices = str(config.xla.cpu_devices or 1) if runs_spmd(config) else "1"
        return found | {XLA_DEVICE: "CPU", _CPU_DEVICES: given or devices}
    if not environ.get(XLA_DEVICE):
        found[XLA_DEVICE] = "TPU"
    if converts_to_bf16(config) and config.downcast_bf16:  # of floats alone; accelerate's own is read in workers
        found |= {"XLA_DOWNCAST_BF16": "1", "ACCELERATE_DOWNCAST_BF16": "1"}
    elif converts_to_bf16(config):  # of doubles too
        found["XLA_USE_BF16"] = "1"
    return found
