"""Rules about nodes, workers and how they meet, and about keys that no run of this kind reads."""

from collections.abc import Iterator

from fsdplaunch.config.resolve import (
    REST,
    converts_to_bf16,
    node_range,
    shards_on_xla,
    uses_xla,
    workers_per_node,
    world_size,
)
from fsdplaunch.config.rules.base import NOTES, SHARDING_SECTIONS, RuleContext, Violation, fsdp, mesh, rule
from fsdplaunch.config.rules.sharding import first_set, leaves_float8_to_script
from fsdplaunch.config.schema.config import Config, KeyPath, all_keys
from fsdplaunch.display_text import counted

_PROCESSES: KeyPath = ("num_processes",)
_MACHINES: KeyPath = ("num_machines",)
_TYPE: KeyPath = ("distributed_type",)
_NODES: KeyPath = ("launch", "nodes")
_PER_NODE: KeyPath = ("launch", "workers_per_node")
_OPTIONS: KeyPath = ("launch", "rendezvous_options")
_OWN = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
)


@rule("workers-per-machine")
def _divisible(context: RuleContext) -> Iterator[Violation]:
    """Refuse num_processes that num_machines does not divide, or that contradicts launch.workers_per_node."""
    config = context.config
    total, machines, per_node = config.num_processes, config.num_machines, config.launch.workers_per_node
    if not isinstance(total, int):
        return
    if isinstance(per_node, int) and total != per_node * machines:
        message = f"{total} is not {per_node} workers_per_node x {machines} nodes"
        hint = "leave num_processes out, or make them agree"
        yield Violation((_PROCESSES, _PER_NODE, _MACHINES), message, hint)
    elif per_node is None and total % machines:
        message = f"{counted(total, 'worker')} cannot be split evenly over {machines} nodes"
        hint = "num_processes counts all nodes; with unequal nodes set launch.workers_per_node: auto"
        yield Violation((_PROCESSES, _MACHINES), message, hint)


@rule("not-distributed")
def _not_distributed(context: RuleContext) -> Iterator[Violation]:
    """Refuse distributed_type: NO with launch.workers_per_node or nodes, which would train independent models."""
    world = world_size(context.config)
    if context.config.distributed_type == "NO" and world is not None and world > 1:
        hint = "use FSDP, or MULTI_GPU where the script distributes itself"
        yield Violation((_TYPE, _PROCESSES, _PER_NODE), f"NO is for one worker, not {world}", hint)


def starts_by_mpirun(config: Config) -> bool:
    """Return whether accelerate would start the workers by mpirun."""
    return config.distributed_type in ("MULTI_CPU", "NO") and bool(config.mpirun_config.get("mpirun_hostfile"))


@rule("mpirun")
def _mpirun(context: RuleContext) -> Iterator[Violation]:
    """Refuse a hostfile in mpirun_config, with which accelerate would start the workers by mpirun."""
    if starts_by_mpirun(context.config):
        hint = "leave mpirun_config out; ssh.hostfile names nodes that fsdplaunch starts workers on"
        yield Violation((("mpirun_config",), _TYPE), "mpirun needs accelerate launch", hint)


@rule("machine-rank")
def _machine_rank(context: RuleContext) -> Iterator[Violation]:
    """Refuse machine_rank outside 0 to num_machines - 1, or to the most nodes of launch.nodes."""
    rank, nodes, most = context.config.machine_rank, context.config.launch.nodes, node_range(context.config)[1]
    if rank is not None and rank >= most:
        limit = f"num_machines {most}" if nodes is None else f"the {most} of launch.nodes {nodes}"
        about = (("machine_rank",), _MACHINES if nodes is None else _NODES)
        yield Violation(about, f"{rank} is not below {limit}; nodes count from 0", "leave machine_rank out")


@rule("gpu-count")
def _gpu_count(context: RuleContext) -> Iterator[Violation]:
    """Refuse gpu_ids with a GPU twice, or with fewer GPUs than workers."""
    ids, workers = context.config.gpu_ids, workers_per_node(context.config)
    if ids is None or ids == "all":
        return
    names = ids.split(",")
    if len(set(names)) < len(names):
        yield Violation((("gpu_ids",),), f"{ids} names a GPU twice", "name each GPU once")
    elif workers is not None and len(names) < workers and not context.config.use_cpu:
        message = f"{counted(len(names), 'GPU')} cannot serve {counted(workers, 'worker')} on each node"
        hint = f"name {workers} GPUs, or lower the number of workers"
        yield Violation((("gpu_ids",), _PROCESSES, _PER_NODE), message, hint)


@rule("two-addresses")
def _two_addresses(context: RuleContext) -> Iterator[Violation]:
    """Refuse launch.rendezvous_endpoint against main_process_ip or main_process_port."""
    endpoint = context.config.launch.rendezvous_endpoint
    host, _, port = (endpoint or "").rpartition(":")
    first, its_port = context.config.main_process_ip or host, context.config.main_process_port or port
    if endpoint and (first, str(its_port)) != (host, port):
        message = f"{endpoint} contradicts main_process_ip and main_process_port, {first}:{its_port}"
        about = (("launch", "rendezvous_endpoint"), ("main_process_ip",), ("main_process_port",))
        yield Violation(about, message, "keep one of the two")


@rule("elastic-run")
def _elastic_run(context: RuleContext) -> Iterator[Violation]:
    """Refuse launch.nodes with a range, and keys that count on a fixed number of nodes."""
    config = context.config
    least, most = node_range(config)
    if least == most:
        return
    why = f"launch.nodes {config.launch.nodes} lets nodes come and go"
    if config.rdzv_backend == "static":
        yield Violation((("rdzv_backend",), _NODES), f"{why}, which static does not support", "use c10d")
    if isinstance(config.num_processes, int):
        message = f"{why}, so the number of workers cannot be {config.num_processes}"  # type NO is one worker
        yield Violation((_PROCESSES, _NODES), message, "set launch.workers_per_node")
    hybrid = context.strategy.startswith("HYBRID") and context.shards
    if hybrid or context.axes.replicas != 1:
        about = (fsdp("sharding_strategy"), mesh("dp_replicate"), _NODES)  # a dp_shard_size leaves one, too
        hint = "use FULL_SHARD, over however many nodes there are"
        yield Violation(about, f"{why}, so the number of replicas cannot be fixed", hint)
    for axis, size in (("tp", context.axes.tensor), ("cp", context.axes.context)):
        if size == REST:
            message = f"{why}, so a size of -1 would change with them"
            yield Violation((mesh(axis), _NODES), message, "give it a number")


@rule("shown-rank")
def _shown_rank(context: RuleContext) -> Iterator[Violation]:
    """Refuse a rank in launch.show_ranks, show_local_ranks, redirects or tee that does not exist."""
    launch, world, workers = context.config.launch, world_size(context.config), workers_per_node(context.config)
    for name in ("show_ranks", "show_local_ranks", "redirects", "tee"):
        text = getattr(launch, name) or "all"
        if text == "all" or (name in ("redirects", "tee") and ":" not in text):
            continue  # one number says which streams, of all ranks
        rank, local = max(int(part.partition(":")[0]) for part in text.split(",")), name != "show_ranks"
        number = workers if local else world
        if number is not None and rank >= number:
            among = f"{counted(number, 'worker')}{' on each node' if local else ''}"
            message = f"{'local ' if local else ''}rank {rank} does not exist among {among}; ranks count from 0"
            yield Violation((("launch", name), _PROCESSES, _PER_NODE), message, "use all, or ranks that exist")


@rule("variable-of-a-key")
def _variable_of_a_key(context: RuleContext) -> Iterator[Violation]:
    """Refuse a variable in launch.env that carries a key or that the launcher sets."""
    about, carriers = (("launch", "env"),), {spec.env: spec.dotted for spec in all_keys()}
    for name in context.config.launch.env:
        if name in carriers:
            yield Violation(about, f"{name} is the variable of {carriers[name]}", f"set {carriers[name]} instead")
        elif name in _OWN or name.startswith(("ACCELERATE_USE_", "FSDPLAUNCH_", "TORCHELASTIC_")):
            yield Violation(about, f"{name} is set by the launcher", "leave it out")


_READ_ALONE = frozenset({"read_timeout"})
_READ_FIXED = _READ_ALONE | {"join_timeout", "timeout"}
_READ_ELASTIC = _READ_FIXED | {"last_call_timeout"}
_FOR_SEVERAL: tuple[KeyPath, ...] = (
    ("main_process_ip",),
    ("launch", "rendezvous_timeout_seconds"),
    ("launch", "machine_timeout_seconds"),
)


def _may_be_several(context: RuleContext) -> bool:
    """Return whether the run may have several nodes; who it is handed to may know more of them than the file."""
    ssh = context.config.ssh
    return node_range(context.config) != (1, 1) or bool(ssh.hosts or ssh.hostfile)


@rule("rendezvous-option")
def _not_a_number(context: RuleContext) -> Iterator[Violation]:
    """Refuse a timeout or an interval in launch.rendezvous_options that is not a whole number."""
    for name, text in context.config.launch.rendezvous_options.items():
        if name in _READ_ELASTIC and not (text.isascii() and text.isdecimal()):
            yield Violation((_OPTIONS,), f"{name} must be a whole number of seconds, got {text or 'nothing'}")


@rule("unused-rendezvous-options", NOTES)
def _unused_options(context: RuleContext) -> Iterator[Violation]:
    """Name settings of torch's rendezvous that the rendezvous of this run does not have."""
    least, most = node_range(context.config)
    if not _may_be_several(context):
        read, why = _READ_ALONE, "a run on one node has no rendezvous"
    else:
        read, why = _READ_FIXED if least == most else _READ_ELASTIC, "the launchers number the nodes themselves"
    unread = sorted(set(context.config.launch.rendezvous_options) - read)
    if unread:
        verb = "is" if len(unread) == 1 else "are"
        yield Violation((_OPTIONS, _MACHINES), f"{', '.join(unread)} {verb} not read: {why}")


@rule("one-node", NOTES)
def _one_node(context: RuleContext) -> Iterator[Violation]:
    """Name keys about how several nodes meet, in a run on one node."""
    for path in () if _may_be_several(context) else _FOR_SEVERAL:
        if context.sets(path):
            yield Violation((path, _MACHINES), "is not used: this run has one node")


@rule("other-engine", NOTES)
def _other_engine(context: RuleContext) -> Iterator[Violation]:
    """Name a key of an engine or a library that this run does not use."""
    for spec in context.keys_set(lambda spec: spec.key.leftover):
        refused = spec.path == ("mpirun_config",) and starts_by_mpirun(context.config)
        passed = spec.path[0] == "fp8_config" and leaves_float8_to_script(context.config)
        if not refused and not passed:
            yield Violation((spec.path, _TYPE), spec.key.leftover)


@rule("nothing-sharded", NOTES)
def _nothing_sharded(context: RuleContext) -> Iterator[Violation]:
    """Name keys of fsdp_config, sharding or parallelism_config without distributed_type: FSDP."""
    for section in () if context.shards or shards_on_xla(context.config) else SHARDING_SECTIONS:
        first, kind = first_set(context, section), context.config.distributed_type
        # Under MULTI_GPU accelerate's variables of the mesh are set, too.
        by_script = section == "parallelism_config" and kind == "MULTI_GPU"
        unused = f"only a script with Accelerator uses {section}" if by_script else f"{section} is not used"
        if first:
            yield Violation((first, _TYPE), f"{unused}: distributed_type {kind} shards nothing")


@rule("one-worker", NOTES)
def _one_worker(context: RuleContext) -> Iterator[Violation]:
    """Name num_processes of more than one under distributed_type: NO, which starts one worker."""
    given = context.given
    if given.distributed_type == "NO" and given.num_processes not in ("auto", 1) and given.num_machines == 1:
        message = f"{given.num_processes} is left out: distributed_type NO starts one worker"
        yield Violation((("num_processes",), _TYPE), message)


@rule("written-by-accelerate", NOTES)
def _noise(context: RuleContext) -> Iterator[Violation]:
    """Name keys that accelerate writes for other hardware than this, or reads nowhere; all in one note."""
    taken = {("downcast_bf16",)} if converts_to_bf16(context.config) else set()
    taken |= {("main_training_function",)} if uses_xla(context.config) else set()
    noise = [spec for spec in all_keys() if spec.key.noise and spec.path in context.set_paths - taken]
    if noise:
        others = ", ".join(spec.name for spec in noise[1:])
        yield Violation((noise[0].path,), "has no effect here" + (f", nor have {others}" if others else ""))
