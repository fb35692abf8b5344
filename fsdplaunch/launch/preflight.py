"""What would stop a launch on this node, found before torch is imported by checks that yield it and do nothing."""

import os
import re
import resource
import shutil
import socket
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from fsdplaunch.config.environment import ALLOW_UNSHARDED
from fsdplaunch.config.resolve import uses_xla
from fsdplaunch.config.schema.config import Config
from fsdplaunch.display_text import GIB, MIB
from fsdplaunch.errors import CheckpointError, LaunchError, MachineError
from fsdplaunch.features import WARM_CLIENT, feature
from fsdplaunch.launch.plan import LaunchPlan, LaunchTarget, join_port, opens_port
from fsdplaunch.probe import torch_version
from fsdplaunch.probe.hardware import Gpu, Hardware, driver_problem

_LITTLE_SPACE, _NO_SPACE = GIB, 64 * MIB
_CORRECT = "correct the script"
_SHARDERS = re.compile(r"(?i)fsdp|fully_?shard|accelerat|transformers|trainer|\btrl\b|lightning|deepspeed")
FILES, _FILES_PER_WORKER = 64, 8
"""Open files that one process of a run has to be allowed: pipes, sockets, logs, what torch opens itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is in the way."""

    message: str  # what is wrong, in one line
    hint: str
    fatal: bool = True  # the run cannot work; otherwise it may, and the user should know
    in_script: bool = False  # the script is at fault and not this machine: it would end with 1 anywhere

    @property
    def error(self) -> LaunchError:
        """Return it as an error."""
        return (LaunchError if self.in_script else MachineError)(self.message, hint=self.hint)


def is_taken(port: int) -> bool:
    """Return whether no server could listen on all addresses now, as torch's store does; port 0 is always free."""
    if not port:
        return False
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):  # noqa: S104  (see above)
        with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((address, port))
            trial.listen(1)
            return False
    return True


def find_obstacles(plan: LaunchPlan, hardware: Hardware) -> list[Finding]:
    """Check everything a launch needs here."""
    config, found = plan.config, []
    # Torch waits long for a file that it cannot open.
    limit, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], FILES + _FILES_PER_WORKER * plan.workers
    if 0 <= limit < needed:
        message = f"a process here may open {limit} files, and {plan.workers} workers need {needed}"
        found = [
            Finding(message=message, hint=f"ulimit -n {max(1024, needed)}, in the shell that starts the launch")
        ]
    return [
        *check_target(plan.target),
        *check_sharder(plan),
        *check_torch(with_xla=uses_xla(config)),
        *check_device(plan, hardware),
        *check_gpus(config, [gpu for gpu in hardware.gpus if {gpu.visible_name, gpu.uuid} & {*plan.gpus}]),
        *check_space([plan.run_dir.parent, Path(config.checkpoint.dir)]),
        *check_weights(config),
        *check_port(config),
        *check_metrics(config),
        *found,
        *check_warm_folder(config),
    ]


def check_warm_folder(config: Config) -> Iterator[Finding]:
    """Check that an interpreter that is to stay after the run has a folder of this user's alone to listen in."""
    if not config.launch.keep_warm_seconds:
        return
    try:
        problem = feature(WARM_CLIENT).folder_problem(os.environ)
    except LaunchError as error:
        yield Finding(message=error.message, hint="leave launch.keep_warm_seconds out")
        return
    if problem:
        hint = "remove it; fsdplaunch makes it again, for your user only"
        yield Finding(message=f"no interpreter is kept warm: {problem}", hint=hint, fatal=False)


def check_target(target: LaunchTarget) -> Iterator[Finding]:
    """Check that what is to run can be found, and compiled or executed."""
    name, path = target.name, Path(target.name)
    if not target.is_python:
        if shutil.which(name) is None:
            message = f"{name} is not an executable program"
            yield Finding(message=message, hint="leave --no-python out for a script")
    elif target.is_module:
        top, found = name.partition(".")[0], False
        with suppress(ImportError, ValueError):  # looking for a top-level module imports nothing
            found = PathFinder.find_spec(top, [str(Path.cwd())]) is not None or find_spec(top) is not None
        if not found:
            yield Finding(message=f"no module named {top}", hint=f"looked in {Path.cwd()} and where Python looks")
    elif path.is_dir() or path.suffix in ("", ".py"):  # and not an archive
        yield from _check_source(path / "__main__.py" if path.is_dir() else path)


def _check_source(file: Path) -> Iterator[Finding]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
        return
    except OSError as error:
        message, hint = f"{file} cannot be read: {(error.strerror or '').lower()}", "check its permissions"
    except SyntaxError as error:
        text = f": {error.text.strip()}" if error.text else ""
        message, hint = f"{file}:{error.lineno or 1}: {error.msg}{text}", _CORRECT
    except (RecursionError, MemoryError):
        message, hint = f"{file} nests deeper than Python can compile", _CORRECT
    except ValueError as error:
        message, hint = f"{file}: {error}", "name a Python script, or use --no-python for a program"
    yield Finding(message=message, hint=hint, in_script=hint == _CORRECT)


def check_sharder(plan: LaunchPlan) -> Iterator[Finding]:
    """Warn of a script that trains and names nothing that shards, under FSDP1, which shards nothing by itself."""
    config, file = plan.config, Path(plan.target.name)
    if config.distributed_type != "FSDP" or config.fsdp_config.fsdp_version != 1 or ALLOW_UNSHARDED in plan.env:
        return
    is_read = file.suffix == ".py" and os.access(file, os.R_OK)
    text = file.read_text(encoding="utf-8", errors="replace") if is_read else ""
    if "optim" in text and not _SHARDERS.search(text):
        message = f"{file} calls nothing that shards a model, as a script under FSDP1 must"
        hint = "FSDP2 shards it: fsdplaunch launch --fsdp-version 2 ..., or fsdplaunch config set fsdp_version=2"
        yield Finding(message=message, hint=hint, fatal=False)


def check_torch(*, with_xla: bool = False) -> Iterator[Finding]:
    """Check that there is a torch to import, in the tested range, and a torch_xla to go with it, where used."""
    version = torch_version.installed()
    if version is None:
        yield Finding(message=f"{sys.executable} has no torch", hint=torch_version.how_to_install())
    elif (found := torch_version.mismatch(version)) is not None:
        yield Finding(message=found.message, hint=found.hint, fatal=found.is_fatal)
    if with_xla and (problem := torch_version.installed_problem()) is not None:
        yield Finding(message=problem.message, hint=problem.hint)


def check_device(plan: LaunchPlan, hardware: Hardware) -> Iterator[Finding]:
    """Check that GPUs which are here can be used, by torch and its driver, unless the run is to be on the CPU."""
    message = ""
    shown = [name for gpu in hardware.gpus for name in (gpu.visible_name, gpu.uuid)]
    hidden = [name for name in plan.gpus if not any(each.startswith(name) for each in shown)]
    if plan.device == "cuda" and plan.target.is_python and torch_version.is_built_for_the_cpu():
        message = f"this machine has GPUs, and torch {torch_version.installed()} is built for the CPU"
    elif plan.device == "cpu" and not plan.config.use_cpu and (problem := driver_problem(hardware.notes)):
        message = f"{problem.rstrip('.')}; this run would use the CPU"
    if message:
        yield Finding(message=message, hint="fsdplaunch doctor says more; --cpu runs on the CPU with gloo")
    if hidden:
        message = f"gpu_ids names {hidden[0]}, which is not visible here"
        yield Finding(message=message, hint="see CUDA_VISIBLE_DEVICES")


def check_gpus(config: Config, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """Check that the GPUs the workers get can compute in the configured dtype, and are not in use."""
    for gpu in gpus:
        number = gpu.visible_name
        wanted = instead = ""
        if config.mixed_precision == "fp8" and not gpu.has_fp8:
            wanted, instead = "fp8", "bf16" if gpu.has_bf16 else "fp16"
        elif config.precision.param == "bf16" and not gpu.has_bf16:
            wanted, instead = "bf16", "fp16"
        if wanted:
            message = f"GPU {number} ({gpu.name}) cannot compute in {wanted}"
            yield Finding(message=message, hint=f"set mixed_precision to {instead}")
        for pid, used in gpu.busy:
            held = f", which holds {used / GIB:.1f} GiB" if used else ""
            message = f"GPU {number} is in use by process {pid}{held}"
            yield Finding(
                message=message,
                hint=f"choose other GPUs with gpu_ids, or end that process: ps -fp {pid}",
                fatal=False,
            )


def check_space(folders: Sequence[Path]) -> Iterator[Finding]:
    """Check that there is room, and permission, to write in folders, which need not exist yet."""
    places = (
        next(path for path in (folder, *folder.parents) if path.exists()) for folder in map(Path.absolute, folders)
    )
    for place in dict.fromkeys(places):
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            yield Finding(message=f"{place} cannot be written to", hint="choose another log_dir or checkpoint dir")
            continue
        free = shutil.disk_usage(place).free
        if free < _LITTLE_SPACE:
            message = f"{place} has {free / MIB:.0f} MiB of free space left"
            yield Finding(message=message, hint="checkpoints need more", fatal=free < _NO_SPACE)


def check_weights(config: Config) -> Iterator[Finding]:
    """Check that the pretrained weights are there and complete, as far as their headers and their index tell."""
    if config.checkpoint.weights is None:
        return
    from fsdplaunch.checkpoint.model_weights import find_weight_files

    try:
        find_weight_files(Path(config.checkpoint.weights))
    except CheckpointError as error:
        message = f"checkpoint.weights: {error.message}"
        yield Finding(message=message, hint=error.hint or "see checkpoint.weights")


def check_metrics(config: Config) -> Iterator[Finding]:
    """Check that what is measured can be written where launch.metrics says."""
    metrics = config.launch.metrics
    if metrics and not config.launch.measure:
        yield Finding(message="launch.metrics has nothing to write: launch.measure is false", hint="leave one out")
    if "tensorboard" in metrics and find_spec("tensorboard") is None:
        message = f"launch.metrics.tensorboard needs tensorboard, and {sys.executable} has none"
        yield Finding(message=message, hint="pip install tensorboard, or leave it out: jsonl needs nothing")
    port = int(metrics.get("prometheus", 0))
    if is_taken(port) and not config.machine_rank:
        message = f"launch.metrics.prometheus: port {port} is in use, as ss -ltnp shows"
        yield Finding(message=message, hint="set a free one")


def check_port(config: Config) -> Iterator[Finding]:
    """Check that the port the nodes join at is free, where this node opens it. A lone node takes another."""
    port = join_port(config)
    if config.num_machines > 1 and opens_port(config) and is_taken(port):
        message = f"port {port} is in use, as ss -ltnp shows"
        yield Finding(message=message, hint="set main_process_port to a free one, the same on every node")
