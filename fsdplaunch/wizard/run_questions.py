"""The questions about where a run takes place: nodes, workers, TPUs."""

import json
import re
import socket
from collections.abc import Mapping
from typing import Any

from fsdplaunch.config.resolve import CPU_WORKERS, uses_xla
from fsdplaunch.config.schema.config import Config, KeyPath, keys_by_path
from fsdplaunch.config.schema.kinds import MAX_PORT, join_endpoint, write
from fsdplaunch.config.schema.sharding_sections import parse_xla_settings
from fsdplaunch.launch.plan import DEFAULT_PORT
from fsdplaunch.wizard.question import Choice, Question
from fsdplaunch.wizard.state import WizardState

_SEVERAL = ("machines", "slurm")
_USE_CPU: KeyPath = ("use_cpu",)
_XLA: KeyPath = ("fsdp_config", "xla")
_MACHINES: KeyPath = ("num_machines",)
_IP: KeyPath = ("main_process_ip",)
_PORT: KeyPath = ("main_process_port",)
_ENDPOINT: KeyPath = ("launch", "rendezvous_endpoint")
_PROCESSES: KeyPath = ("num_processes",)
_WORKERS: KeyPath = ("launch", "workers_per_node")


def _where_choices(state: WizardState) -> tuple[Choice, ...]:
    facts = state.facts
    gpus, job = len(facts.hardware.gpus), facts.cluster
    seen = f"{gpus} GPU{'s' if gpus > 1 else ''}" if gpus else "no GPU was found"
    in_job = f"job {job.job_id}" if job.kind == "slurm" else "inside an allocation"
    return (
        Choice(value="here", title="On this machine's GPUs", consequence=seen),
        Choice(value="machines", title="On several nodes", detail="Each one runs the same launch command."),
        Choice(value="slurm", title="In a SLURM job", consequence=in_job, detail="Start it with srun."),
        Choice(
            value="cpu",
            title="On this machine's CPUs",
            consequence="to try things out",
            detail="The same sharding, checkpoints and merging, over gloo.",
        ),
        Choice(
            value="tpu",
            title="On TPUs",
            consequence="with PyTorch/XLA",
            detail="Hosts of a pod find each other by its variables; without a TPU it computes on the CPU.",
        ),
    )


def _read_where(config: Config, state: WizardState) -> str:
    if uses_xla(config):
        return "tpu"
    if config.use_cpu:
        return "cpu"
    in_slurm = state.facts.cluster.kind == "slurm"
    if config.num_machines > 1 or (in_slurm and not state.editing):
        return "slurm" if in_slurm else "machines"
    return "here"


def _write_where(answer: str, _: WizardState) -> Mapping[KeyPath, Any]:
    return {"cpu": {_USE_CPU: True}, "tpu": {_XLA: True}}.get(answer, {})


def _is_several(state: WizardState) -> bool:
    return state.answers.get("where") in _SEVERAL


def _nodes_unknown(state: WizardState) -> bool:
    return state.answers.get("where") != "slurm" or state.facts.cluster.num_nodes is None


def _whole_number(text: str, *, least: int, what: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) < least:
        msg = f"must be {what}, got {text!r}"
        raise ValueError(msg)
    return int(text)


def _check_nodes(text: str, state: WizardState) -> str:
    in_slurm = state.answers.get("where") == "slurm"
    least = 1 if in_slurm else 2
    return str(_whole_number(text, least=least, what=f"a whole number from {least}"))


def _read_nodes(config: Config, state: WizardState) -> str | None:
    if config.num_machines > 1 or state.answers.get("where") == "slurm":
        return str(config.num_machines)
    return "2"


def _nodes_known(state: WizardState) -> bool:
    return state.editing or state.facts.cluster.num_nodes is not None


def _write_nodes(answer: str, _: WizardState) -> Mapping[KeyPath, Any]:
    return {_MACHINES: int(answer)}


def _needs_address(state: WizardState) -> bool:
    return state.answers.get("where") == "machines"


def _read_rendezvous(config: Config, _: WizardState) -> str | None:
    if config.launch.rendezvous_endpoint:
        return config.launch.rendezvous_endpoint
    if config.main_process_ip:
        return join_endpoint(config.main_process_ip, config.main_process_port or DEFAULT_PORT)
    return join_endpoint(socket.gethostname(), DEFAULT_PORT)


def split_endpoint(text: str) -> tuple[str, int]:
    """Return host and port of `HOST`, `HOST:PORT` or `[IPV6]:PORT`.

    Args:
        text: The address; without a port, torchrun's usual 29500.

    Raises:
        ValueError: It is no address.
    """
    match = re.fullmatch(r"\[([0-9A-Fa-f:.%]+)\](?::([0-9]+))?|([A-Za-z0-9_.-]+)(?::([0-9]+))?", text.strip())
    if match is None:
        msg = f"must be HOST:PORT, got {text!r}"
        raise ValueError(msg)
    port = int(match[2] or match[4] or DEFAULT_PORT)
    if not 1 <= port <= MAX_PORT:
        msg = f"the port must be between 1 and {MAX_PORT}, got {port}"
        raise ValueError(msg)
    return match[1] or match[3], port


def _check_rendezvous(text: str, _: WizardState) -> str:
    return join_endpoint(*split_endpoint(text))


def _write_rendezvous(answer: str, _: WizardState) -> Mapping[KeyPath, Any]:
    host, port = split_endpoint(answer)
    return {_IP: host, _PORT: port}


def _on_gpus(state: WizardState) -> bool:
    return state.answers.get("where") != "cpu"


def _has_workers(state: WizardState) -> bool:
    return not state.on_tpus  # PyTorch/XLA has one process per chip or per host


def _ask_workers(state: WizardState) -> bool:
    return state.facts.gpus_per_node != 1 or state.answers.get("where") != "here"


def _workers_remark(state: WizardState) -> str:
    gpus = len(state.facts.hardware.gpus)
    if not _on_gpus(state):
        return f"({state.facts.hardware.cpu_count} processors here)"
    return f"({gpus} GPUs here; auto: one per GPU)" if gpus else "(auto: one per GPU)"


def _check_workers(text: str, state: WizardState) -> str:
    if text.lower() == "auto":
        return "auto"
    number = _whole_number(text, least=1, what="a whole number from 1, or auto")
    gpus = len(state.facts.hardware.gpus)
    if state.answers.get("where") == "here" and number > gpus > 0:
        msg = f"this machine has {gpus} visible GPUs, got {number}"
        raise ValueError(msg)
    return str(number)


def _read_workers(config: Config, state: WizardState) -> str | None:
    if config.launch.workers_per_node is not None:
        return str(config.launch.workers_per_node)
    if config.num_processes == "auto":
        return "auto"
    per_node, rest = divmod(config.num_processes, config.num_machines)
    if not _on_gpus(state) and not config.use_cpu:
        return str(CPU_WORKERS)
    return str(per_node) if rest == 0 else None


def _write_workers(answer: str, state: WizardState) -> Mapping[KeyPath, Any]:
    """Write a number as accelerate has it, over all nodes; only auto needs a key of our own."""
    return {_WORKERS: "auto"} if answer == "auto" else {_PROCESSES: int(answer) * state.num_nodes}


WHERE = Question(
    name="where",
    text="Where will this run?",
    help="Where the run will be: here, machines (several, reached by address), slurm, cpu, or tpu (PyTorch/XLA).",
    metavar="here|machines|slurm|cpu|tpu",
    keys=(_USE_CPU, _XLA),
    write=_write_where,
    read=_read_where,
    choices=_where_choices,
    certain=lambda state: state.facts.gpus_per_node > 0 or state.facts.on_tpus,
)
NODES = Question(
    name="nodes",
    text=keys_by_path()[_MACHINES].key.question or "",
    help="Nodes that take part.",
    metavar="N",
    keys=(_MACHINES,),
    write=_write_nodes,
    read=_read_nodes,
    check=_check_nodes,
    applies=_is_several,
    asked=_nodes_unknown,
    certain=_nodes_known,
)
RENDEZVOUS = Question(
    name="rendezvous",
    text="Where do the nodes meet? Address of node 0",
    help="HOST:PORT of node 0, as the others reach it.",
    metavar="HOST:PORT",
    keys=(_IP, _PORT, _ENDPOINT),
    write=_write_rendezvous,
    read=_read_rendezvous,
    check=_check_rendezvous,
    applies=_needs_address,
    certain=lambda state: state.editing,
)
WORKERS = Question(
    name="workers-per-node",
    text=keys_by_path()[_WORKERS].key.question or "",
    help="Worker processes on each node: a number, or auto for one per GPU.",
    metavar="N|auto",
    keys=(_PROCESSES, _WORKERS),
    write=_write_workers,
    read=_read_workers,
    check=_check_workers,
    applies=_has_workers,
    asked=_ask_workers,
    remark=_workers_remark,
)


_SPMD: KeyPath = ("fsdp_config", "xla_fsdp_v2")
_RECOMPUTE: KeyPath = ("fsdp_config", "xla_fsdp_grad_ckpt")
_SETTINGS: KeyPath = ("fsdp_config", "xla_fsdp_settings")
SETTINGS_FORM = "must be name=value, separated by commas, such as compute_dtype=bfloat16,flatten_parameters=true"


def _class_choices(_: WizardState) -> tuple[Choice, ...]:
    return (
        Choice(
            value="wrapper",
            title="One process per chip",
            consequence="XlaFullyShardedDataParallel",
            detail="xla_fsdp_settings are its arguments; checkpoints are written by each process.",
        ),
        Choice(
            value="spmd",
            title="One process per host (SPMD)",
            consequence="xla_fsdp_v2",
            detail="It has the whole batch, and the compiler splits batch and parameters over all devices.",
        ),
    )


def _recompute_choices(_: WizardState) -> tuple[Choice, ...]:
    return (
        Choice(value="no", title="Keep activations", consequence="the faster step"),
        Choice(value="yes", title="Compute them again in backward", consequence="less memory"),
    )


def _table(text: str) -> Any:
    """Read arguments as they are typed: name=value, separated by commas, or JSON."""
    if text.startswith("{"):
        try:
            return json.loads(text)
        except ValueError:
            raise ValueError(SETTINGS_FORM) from None
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if not all(equals for _, equals, _ in pairs):
        raise ValueError(SETTINGS_FORM)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _text(settings: Mapping[str, Any]) -> str:
    if any(isinstance(value, list) or "," in write(value) for value in settings.values()):
        return json.dumps(dict(settings))
    return ",".join(f"{name}={write(value)}" for name, value in settings.items())


def _check_settings(text: str, _: WizardState) -> str:
    return _text(parse_xla_settings(_table(text)))


def _write_settings(answer: str, _: WizardState) -> Mapping[KeyPath, Any]:
    return {_SETTINGS: parse_xla_settings(_table(answer))} if answer else {}


def _read_class(config: Config, _: WizardState) -> str:
    return "spmd" if config.fsdp_config.xla_fsdp_v2 else "wrapper"


def _read_recompute(config: Config, _: WizardState) -> str:
    return "yes" if config.fsdp_config.xla_fsdp_grad_ckpt else "no"


def _on_tpus(state: WizardState) -> bool:
    return state.on_tpus


def _with_arguments(state: WizardState) -> bool:
    return state.on_tpus and state.answers.get("xla") == "wrapper"


XLA = Question(
    name="xla",
    text="Which of PyTorch/XLA's ways to shard?",
    help="On TPUs: wrapper (XlaFullyShardedDataParallel, a process per chip) or spmd (xla_fsdp_v2, one per host).",
    metavar="wrapper|spmd",
    keys=(_SPMD,),
    write=lambda answer, state: {_SPMD: answer == "spmd"},  # noqa: ARG005
    read=_read_class,
    choices=_class_choices,
    applies=_on_tpus,
)
XLA_GRAD_CKPT = Question(
    name="xla-grad-ckpt",
    text="Activations?",
    help="On TPUs: yes computes each unit's activations again in backward (xla_fsdp_grad_ckpt).",
    metavar="yes|no",
    keys=(_RECOMPUTE,),
    write=lambda answer, state: {_RECOMPUTE: answer == "yes"},  # noqa: ARG005
    read=_read_recompute,
    choices=_recompute_choices,
    applies=_on_tpus,
)
XLA_SETTINGS = Question(
    name="xla-settings",
    text="Arguments of XlaFullyShardedDataParallel",
    help="On TPUs, for --xla wrapper: xla_fsdp_settings as name=value,..., such as compute_dtype=bfloat16.",
    metavar="NAME=VALUE,...",
    keys=(_SETTINGS,),
    write=_write_settings,
    read=lambda config, state: _text(config.fsdp_config.xla_fsdp_settings),  # noqa: ARG005
    check=_check_settings,
    applies=_with_arguments,
    decided_by=lambda state: "xla" if state.on_tpus else "where",
    remark=lambda state: "(name=value, separated by commas; Enter: none)",  # noqa: ARG005
)
