"""Rules about nodes, workers and how they meet."""

from collections.abc import Iterator

from fsdplaunch.config.resolve import REST, node_range, workers_per_node, world_size
from fsdplaunch.config.rules.base import RuleContext, Violation, mesh, note_rule, rule
from fsdplaunch.config.schema.config import Config, all_keys, keys_by_path

_PROCESSES = ("num_processes",)
_NODES = ("launch", "nodes")
_MACHINES = ("num_machines",)
_PER_NODE = ("launch", "workers_per_node")
_REPLICAS = ("parallelism_config", "parallelism_config_dp_replicate_size")
_OWN = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
)


@rule("workers-per-machine")
def _divisible(context: RuleContext) -> Iterator[Violation]:
    """Refuse num_processes that num_machines does not divide, or that contradicts launch.workers_per_node."""
    total, machines, per_node = (
        context.config.num_processes,
        context.config.num_machines,
        context.config.launch.workers_per_node,
    )
    if not isinstance(total, int):
        return
    if isinstance(per_node, int):
        if total != per_node * machines:
            message = f"{total} is not {per_node} workers_per_node x {machines} nodes"
            about = (_PROCESSES, _PER_NODE, _MACHINES)
            yield Violation(about=about, message=message, hint="leave num_processes out, or make them agree")
    elif per_node is None and total % machines:
        message = f"{total} workers cannot be split evenly over {machines} nodes"
        hint = "num_processes counts all nodes; with unequal nodes set launch.workers_per_node: auto"
        yield Violation(about=(_PROCESSES, _MACHINES), message=message, hint=hint)


@rule("not-distributed")
def _not_distributed(context: RuleContext) -> Iterator[Violation]:
    """Refuse distributed_type: NO with launch.workers_per_node or nodes, which would train independent models."""
    world = world_size(context.config)
    if context.config.distributed_type == "NO" and world is not None and world > 1:
        message = f"NO is for one worker, not {world}"
        about = (("distributed_type",), _PROCESSES, _PER_NODE)
        yield Violation(
            about=about, message=message, hint="use FSDP, or MULTI_GPU where the script distributes itself"
        )


def starts_by_mpirun(config: Config) -> bool:
    """Return whether accelerate would start the workers by mpirun."""
    return config.distributed_type in ("MULTI_CPU", "NO") and bool(config.mpirun_config.get("mpirun_hostfile"))


@rule("mpirun")
def _mpirun(context: RuleContext) -> Iterator[Violation]:
    """Refuse a hostfile in mpirun_config, with which accelerate would start the workers by mpirun."""
    if starts_by_mpirun(context.config):
        message = "mpirun needs accelerate launch"
        hint = "leave mpirun_config out; ssh.hostfile names nodes that fsdplaunch starts workers on"
        yield Violation(about=(("mpirun_config",), ("distributed_type",)), message=message, hint=hint)


@rule("machine-rank")
def _machine_rank(context: RuleContext) -> Iterator[Violation]:
    """Refuse machine_rank outside 0 to num_machines - 1, or to the most nodes of launch.nodes."""
    rank, nodes, most = context.config.machine_rank, context.config.launch.nodes, node_range(context.config)[1]
    if rank is not None and rank >= most:
        limit = f"num_machines {most}" if nodes is None else f"the {most} of launch.nodes {nodes}"
        message = f"{rank} is not below {limit}; nodes count from 0"
        about = (("machine_rank",), _MACHINES if nodes is None else ("launch", "nodes"))
        yield Violation(about=about, message=message, hint="leave machine_rank out")


@rule("gpu-count")
def _gpu_count(context: RuleContext) -> Iterator[Violation]:
    """Refuse gpu_ids with a GPU twice, or with fewer GPUs than workers."""
    ids, workers = context.config.gpu_ids, workers_per_node(context.config)
    if ids in (None, "all") or ids is None:
        return
    names = ids.split(",")
    if len(set(names)) < len(names):
        yield Violation(about=(("gpu_ids",),), message=f"{ids} names a GPU twice", hint="name each GPU once")
    elif workers is not None and len(names) < workers and not context.config.use_cpu:
        message = f"{len(names)} GPUs cannot serve {workers} workers on each node"
        about = (("gpu_ids",), _PROCESSES, _PER_NODE)
        yield Violation(about=about, message=message, hint=f"name {workers} GPUs, or lower the number of workers")


@rule("two-addresses")
def _two_addresses(context: RuleContext) -> Iterator[Violation]:
    """Refuse launch.rendezvous_endpoint against main_process_ip or main_process_port."""
    endpoint = context.config.launch.rendezvous_endpoint
    if endpoint is None:
        return
    host, _, port = endpoint.rpartition(":")
    about = (("launch", "rendezvous_endpoint"), ("main_process_ip",), ("main_process_port",))
    if context.config.main_process_ip not in (None, host) or context.config.main_process_port not in (
        None,
        0,
        int(port),
    ):
        other = f"{context.config.main_process_ip or host}:{context.config.main_process_port or port}"
        message = f"{endpoint} contradicts main_process_ip and main_process_port, {other}"
        yield Violation(about=about, message=message, hint="keep one of the two")


@rule("static-restarts")
def _static_restarts(context: RuleContext) -> Iterator[Violation]:
    """Refuse launch.max_restarts with torch's static rendezvous, whose store keeps dead workers' addresses."""
    config = context.config
    torchs_own = config.num_machines > 1 and not config.launch.meeting
    if torchs_own and config.rdzv_backend == "static" and config.launch.max_restarts:
        message = "static cannot start workers again: each new one would look for the dead ones"
        about = (("rdzv_backend",), ("launch", "max_restarts"))
        yield Violation(about=about, message=message, hint="use c10d, or leave launch.max_restarts out")


@rule("elastic-run")
def _elastic_run(context: RuleContext) -> Iterator[Violation]:
    """Refuse launch.nodes with a range, and keys that count on a fixed number of nodes."""
    config = context.config
    least, most = node_range(config)
    if least == most:
        return
    why = f"launch.nodes {config.launch.nodes} lets nodes come and go"
    if config.rdzv_backend == "static":
        yield Violation(about=(("rdzv_backend",), _NODES), message=f"{why}, and static cannot", hint="use c10d")
    if isinstance(config.num_processes, int):
        hint = "set launch.workers_per_node"
        message = f"{why}, and {config.num_processes} workers do not"  # distributed_type: NO is one worker
        yield Violation(about=(_PROCESSES, _NODES), message=message, hint=hint)
    hybrid = (config.fsdp_config.fsdp_sharding_strategy or "").startswith("HYBRID") and context.shards
    if hybrid or config.parallelism_config.parallelism_config_dp_replicate_size not in (None, 1):
        about = (("fsdp_config", "fsdp_sharding_strategy"), _REPLICAS, _NODES)  # a dp_shard_size leaves one, too
        message = f"{why}, and a number of replicas does not"
        yield Violation(about=about, message=message, hint="use FULL_SHARD, over however many nodes there are")
    for axis in ("tp", "cp"):
        if getattr(config.parallelism_config, mesh(axis)[-1]) == REST:
            message = f"{why}, and the model would be split into as many parts"
            yield Violation(about=(mesh(axis), _NODES), message=message, hint="give it a number")


@rule("shown-rank")
def _shown_rank(context: RuleContext) -> Iterator[Violation]:
    """Refuse a rank in launch.show_ranks that does not exist."""
    world, shown = world_size(context.config), context.config.launch.show_ranks
    ranks = [] if shown == "all" else [int(rank) for rank in shown.split(",")]
    if world is not None and ranks and max(ranks) >= world:
        message = f"rank {max(ranks)} does not exist among {world} workers; ranks count from 0"
        about = (("launch", "show_ranks"), _PROCESSES, _PER_NODE)
        yield Violation(about=about, message=message, hint="use all, or ranks that exist")


@rule("local-rank")
def _local_rank(context: RuleContext) -> Iterator[Violation]:
    """Refuse a worker in launch.redirects, tee or show_local_ranks that a node does not have."""
    workers, launch = workers_per_node(context.config), context.config.launch
    uses = {
        "redirects": _streamed_ranks(launch.redirects),
        "tee": _streamed_ranks(launch.tee),
        "show_local_ranks": _plain_ranks(launch.show_local_ranks),
    }
    for name, ranks in uses.items():
        if workers is not None and ranks and max(ranks) >= workers:
            message = f"local rank {max(ranks)} does not exist among {workers} workers on each node"
            yield Violation(about=(("launch", name), _PROCESSES, _PER_NODE), message=message, hint="count from 0")


def _streamed_ranks(text: str | None) -> list[int]:
    return [int(part.split(":")[0]) for part in text.split(",")] if text and ":" in text else []


def _plain_ranks(text: str | None) -> list[int]:
    return [int(part) for part in text.split(",")] if text not in (None, "all") and text else []


@rule("variable-of-a-key")
def _variable_of_a_key(context: RuleContext) -> Iterator[Violation]:
    """Refuse a variable in launch.env that carries a key or that the launcher sets."""
    carriers = {spec.env: spec.dotted for spec in all_keys()}
    for name in context.config.launch.env:
        about = (("launch", "env"),)
        if name in carriers:
            yield Violation(
                about=about, message=f"{name} carries {carriers[name]}", hint=f"set {carriers[name]} instead"
            )
        elif name in _OWN or name.startswith(("ACCELERATE_USE_", "FSDPLAUNCH_", "TORCHELASTIC_")):
            yield Violation(about=about, message=f"{name} is set by the launcher", hint="leave it out")


_OPTIONS = ("launch", "rendezvous_options")
_READ_ALONE = frozenset({"read_timeout"})
_READ_FIXED = _READ_ALONE | {"join_timeout", "timeout"}
_READ_ELASTIC = _READ_ALONE | {
    "close_timeout",
    "heartbeat_timeout",
    "join_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
    "last_call_timeout",
}
_NUMBERS = _READ_FIXED | _READ_ELASTIC
_FOR_SEVERAL = (
    ("main_process_ip",),
    ("launch", "rendezvous_timeout_seconds"),
    ("launch", "machine_timeout_seconds"),
    ("launch", "meeting"),
    ("launch", "secret_file"),
)


def _may_be_several(context: RuleContext) -> bool:
    """Tell whether the run may have several nodes; who it is handed to may know more of them than the file."""
    ssh = context.config.ssh
    return node_range(context.config) != (1, 1) or bool(ssh.hosts or ssh.hostfile)


def _options_read(context: RuleContext) -> tuple[frozenset[str], str] | None:
    """Return which of torch's rendezvous settings this run reads, and what numbers its nodes; None for all."""
    if not _may_be_several(context):
        return _READ_ALONE, "one node meets nobody"
    if not context.config.launch.meeting:
        return None
    least, most = node_range(context.config)
    if least == most:
        return _READ_FIXED, "the launchers have numbered the nodes before"
    return _READ_ELASTIC, "the nodes meet at a store whose entries prove the run's secret"


@rule("rendezvous-option")
def _not_a_number(context: RuleContext) -> Iterator[Violation]:
    """Refuse a timeout or an interval in launch.rendezvous_options that is no whole number."""
    for name, text in context.config.launch.rendezvous_options.items():
        if name in _NUMBERS and not (text.isascii() and text.isdecimal()):
            message = f"{name} must be a whole number of seconds, got {text or 'nothing'}"
            if name == "keep_alive_max_attempt":
                message = f"{name} must be a whole number, got {text or 'nothing'}"
            yield Violation(about=(_OPTIONS,), message=message)


@note_rule("unused-rendezvous-options")
def _unused_options(context: RuleContext) -> Iterator[Violation]:
    """Name settings of torch's rendezvous that the rendezvous of this run does not have."""
    read = _options_read(context)
    unread = sorted(set(context.config.launch.rendezvous_options) - read[0]) if read else []
    if read and unread:
        verb = "is" if len(unread) == 1 else "are"
        yield Violation(about=(_OPTIONS, _MACHINES), message=f"{', '.join(unread)} {verb} not read: {read[1]}")


@note_rule("one-node")
def _one_node(context: RuleContext) -> Iterator[Violation]:
    """Name keys about how several nodes meet, in a run on one node."""
    for path in () if _may_be_several(context) else _FOR_SEVERAL:
        if context.sets(keys_by_path()[path]):
            yield Violation(about=(path, _MACHINES), message="is not used: this run has one node")
