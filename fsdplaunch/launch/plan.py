"""Config -> LaunchPlan: everything a launch will do, as data, before anything is done.

`--dry-run` prints the very object that `fsdplaunch.launch.runner.run_plan` takes. Nothing here reads the disk, the
clock or the machine; what has to be known is passed in.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdplaunch.config.environment import ALLOW_UNSHARDED, RUN_DIR, encode
from fsdplaunch.config.schema import Config
from fsdplaunch.config.world import with_mesh
from fsdplaunch.errors import MachineError, UsageError

BOOTSTRAP = "fsdplaunch.runtime.bootstrap"
"""The module that is every Python worker's entry."""
LAUNCHER = "FSDPLAUNCH_LAUNCHER"
"""Contract variable, not a key: the process id of the launcher that its agent must not outlive."""
CPU_WORKERS = 2
"""Workers for `auto` on a machine without GPUs: the smallest number that really shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """One node's part of a launch.

    Attributes:
        run_id: Unique name of this run and attempt; also the rendezvous id.
        run_dir: Folder that gets the plan, the result and each rank's files.
        argv: The command that starts the elastic agent, one item per argument.
        env: Variables added to the caller's environment, all texts.
        script: The script (or module) as the user wrote it.
        workers: Worker processes on this node.
        nodes: Machines that take part.
        device: `cuda` or `cpu`.
        config: The resolved configuration.
        notes: What the user should be told once.
    """

    run_id: str
    run_dir: Path
    argv: tuple[str, ...]
    env: Mapping[str, str]
    script: str
    workers: int
    nodes: int
    device: str
    config: Config
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Ranks over all nodes."""
        return self.workers * self.nodes

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, for `--json` and the run's folder."""
        return {
            "run_id": self.run_id,
            "run_dir": str(self.run_dir),
            "argv": list(self.argv),
            "env": dict(self.env),
            "script": self.script,
            "workers": self.workers,
            "nodes": self.nodes,
            "world_size": self.world_size,
            "device": self.device,
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a plan needs to know about the machine it is for.

    Attributes:
        gpus: Visible GPUs.
        cpus: Usable cores.
        python: The interpreter that workers run.
        environ: The caller's environment; a variable the user set is not overridden by a guess of ours.
    """

    gpus: int
    cpus: int
    python: str = sys.executable
    environ: Mapping[str, str]


def build_plan(
    config: Config,
    *,
    machine: Machine,
    script: str,
    arguments: Sequence[str] = (),
    module: bool = False,
    run_id: str,
    run_dir: Path,
    allow_unsharded: bool = False,
    notes: Sequence[str] = (),
) -> LaunchPlan:
    """Decide everything a launch does on this node.

    Args:
        config: Resolved configuration.
        machine: Facts about this node.
        script: Path of the script, or a module's name when `module`.
        arguments: The script's own arguments, passed on untouched.
        module: Run `script` as `python -m` would.
        run_id: Unique per run and attempt.
        run_dir: The run's folder; must be absolute, workers may change directory.
        allow_unsharded: Let a script end without having sharded a model.
        notes: Notes gathered before, kept first.

    Raises:
        UsageError: The configuration contradicts itself or lacks an address.
        MachineError: This machine has not what the configuration asks for.
    """
    gpus = _chosen_gpus(config, machine)
    device = "cpu" if config.use_cpu or gpus == 0 else "cuda"
    workers = workers_on_node(config, gpus=gpus if device == "cuda" else 0)
    if device == "cuda" and workers > gpus:
        msg = f"the configuration asks for {workers} workers on this machine, but it has {gpus} visible GPUs"
        raise MachineError(msg, hint="lower num_processes, or set use_cpu: true to run on CPU with gloo")
    target = (*(("-m",) if module else ()), script, *arguments)
    said = [*notes]
    if device == "cpu" and not config.use_cpu:
        said.append("no GPU is visible: running on CPU with gloo")
    return LaunchPlan(
        run_id=run_id,
        run_dir=run_dir,
        argv=(*_agent_command(config, machine, run_id, run_dir, workers), *target),
        env=_environment(config, machine, run_dir, workers, allow_unsharded),
        script=script,
        workers=workers,
        nodes=config.num_machines,
        device=device,
        config=config,
        notes=tuple(said),
    )


def workers_on_node(config: Config, *, gpus: int) -> int:
    """How many workers run on each machine.

    Args:
        config: Resolved configuration.
        gpus: GPUs that workers will use; 0 on CPU.
    """
    auto = gpus or CPU_WORKERS
    asked = config.launch.workers_per_node
    if asked is not None:
        return auto if asked == "auto" else asked
    if config.num_processes == "auto":
        return auto
    return config.num_processes // config.num_machines


def _chosen_gpus(config: Config, machine: Machine) -> int:
    """GPUs left to this run: those `gpu_ids` names, or all visible ones."""
    if config.gpu_ids is None or config.gpu_ids.strip().lower() == "all":
        return machine.gpus
    wanted = [item.strip() for item in config.gpu_ids.split(",") if item.strip()]
    missing = [item for item in wanted if item.isdigit() and int(item) >= machine.gpus]
    if missing and not config.use_cpu:
        msg = f"gpu_ids names GPU {', '.join(missing)}, but this machine has {machine.gpus} visible GPUs"
        raise MachineError(msg, hint="set gpu_ids to numbers from 0, or leave it out to use all")
    return len(wanted)


def _agent_command(config: Config, machine: Machine, run_id: str, run_dir: Path, workers: int) -> list[str]:
    """The agent takes torchrun's own options, so that what is printed can be read with torchrun's help."""
    return [
        machine.python,
        "-u",
        # By its path: with -m, python would look for modules in the current folder first, and find the user's own.
        str(Path(__file__).with_name("agent.py")),
        f"--nnodes={config.num_machines}",
        f"--nproc-per-node={workers}",
        f"--max-restarts={config.launch.max_restarts}",
        *_rendezvous(config, run_id),
        f"--log-dir={run_dir}",
        "-m",
        BOOTSTRAP,
    ]


def _rendezvous(config: Config, run_id: str) -> list[str]:
    """Where the agents meet. `is_host` and the local address are always said: torchrun's guesses hang."""
    timeout = round(config.launch.rendezvous_timeout_seconds)
    if config.num_machines == 1:
        port = config.main_process_port or 0
        return [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={config.launch.rendezvous_endpoint or f'127.0.0.1:{port}'}",
            f"--rdzv-id={run_id}",
            f"--rdzv-conf=is_host=1,join_timeout={timeout}",
            "--local-addr=127.0.0.1",
        ]
    endpoint = config.launch.rendezvous_endpoint
    if endpoint is None and config.main_process_ip:
        endpoint = f"{config.main_process_ip}:{config.main_process_port or 29500}"
    if endpoint is None:
        msg = f"num_machines is {config.num_machines}, but nothing says where the machines meet"
        raise UsageError(msg, hint="set main_process_ip (and main_process_port) to machine 0's address")
    if config.machine_rank is None:
        msg = f"num_machines is {config.num_machines}, but nothing says which machine this is"
        raise UsageError(msg, hint="set FSDPLAUNCH_MACHINE_RANK on each machine: 0 on the first, 1 on the next")
    if config.rdzv_backend == "static":
        host, _, port_text = endpoint.rpartition(":")
        place = [f"--master-addr={host}", f"--master-port={port_text}", f"--node-rank={config.machine_rank}"]
        return ["--rdzv-backend=static", *place]
    is_host = int(config.machine_rank == 0)
    conf = f"is_host={is_host},join_timeout={timeout}"
    return [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={endpoint}",
        f"--rdzv-conf={conf}",
    ]


def _environment(
    config: Config, machine: Machine, run_dir: Path, workers: int, allow_unsharded: bool
) -> dict[str, str]:
    env = encode(with_mesh(config, workers * config.num_machines))  # other libraries want sizes as numbers
    env[RUN_DIR] = str(run_dir)
    if allow_unsharded:
        env[ALLOW_UNSHARDED] = "1"
    if config.gpu_ids is not None and config.gpu_ids.strip().lower() != "all":
        env["CUDA_VISIBLE_DEVICES"] = config.gpu_ids
    if "OMP_NUM_THREADS" not in machine.environ:
        env["OMP_NUM_THREADS"] = str(max(1, machine.cpus // workers))
    if config.launch.max_restarts:
        # Without it torch keeps one store for all attempts, and new workers meet the dead ones' addresses.
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return env | config.launch.env
