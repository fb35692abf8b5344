"""Rules about how the model is sharded, computed and loaded, by torch's FSDP and by PyTorch/XLA's."""

from collections.abc import Iterator

from fsdplaunch.config.resolve import (
    KEEPS_GATHERED,
    REST,
    is_read_by_xla,
    node_range,
    runs_spmd,
    shards_models,
    shards_on_xla,
    split_world,
    strategy_named,
    uses_xla,
    world_size,
)
from fsdplaunch.config.rules.base import NOTES, RuleContext, Violation, fsdp, mesh, rule
from fsdplaunch.config.schema.config import Config, KeyPath, all_keys, value_at
from fsdplaunch.config.schema.kinds import write
from fsdplaunch.display_text import counted

_PRECISION: KeyPath = ("mixed_precision",)
_TYPE: KeyPath = ("distributed_type",)
_VERSION = fsdp("version")
_STRATEGY, _RESHARD, _STATE_DICT = (
    fsdp("sharding_strategy"),
    fsdp("reshard_after_forward"),
    fsdp("state_dict_type"),
)
_POLICY, _RECOMPUTE = fsdp("auto_wrap_policy"), fsdp("activation_checkpointing")
AXES = ("dp_replicate", "dp_shard", "cp", "tp")  # the mesh's axes, as parallelism_config names them


@rule("needs-another-key")
def _needs(context: RuleContext) -> Iterator[Violation]:
    """Refuse a key about split layers, split sequences or recomputed blocks where there are none."""
    whole, kept = context.axes, not context.fsdp.fsdp_activation_checkpointing
    plan, attention = ("sharding", "tensor_parallel_plan"), ("sharding", "context_parallel_attention")
    offload, every = fsdp("activation_checkpointing_offload"), ("sharding", "checkpoint_every")
    for missing, key, other, message in (
        (whole.tensor == 1, plan, mesh("tp"), "there are no ranks to split layers: tp_size is 1"),
        (whole.context == 1, attention, mesh("cp"), "there are no ranks to split sequences: cp_size is 1"),
        (kept, offload, _RECOMPUTE, "there is nothing to offload without fsdp_activation_checkpointing"),
        (kept, every, _RECOMPUTE, "there is nothing to recompute without fsdp_activation_checkpointing"),
    ):
        if missing and context.sets(key):
            yield Violation((key, other), message, f"set {other[-1]} as well")


@rule("local-state-dict")
def _local_state_dict(context: RuleContext) -> Iterator[Violation]:
    """Refuse LOCAL_STATE_DICT under FSDP2, or with a strategy that makes replicas, which torch cannot write."""
    replicas = context.strategy.startswith("HYBRID") or context.strategy == "NO_SHARD"
    if context.fsdp.fsdp_state_dict_type != "LOCAL_STATE_DICT":
        return
    if context.version != 1:
        message = "LOCAL_STATE_DICT exists only under FSDP1"
        yield Violation((_STATE_DICT, _VERSION), message, "use SHARDED_STATE_DICT")
    elif replicas:
        message = f"LOCAL_STATE_DICT cannot hold a model with replicas, as {context.strategy} makes them"
        yield Violation((_STATE_DICT, _STRATEGY), message, "use SHARDED_STATE_DICT")


@rule("reshard-value")
def _reshard_value(context: RuleContext) -> Iterator[Violation]:
    """Refuse a value of fsdp_reshard_after_forward that the other FSDP version has."""
    reshard, about = context.given.fsdp_config.fsdp_reshard_after_forward, (_RESHARD, _VERSION)
    if context.version != 1 and isinstance(reshard, str):
        message = f"{reshard} is a strategy of FSDP1; FSDP2 needs true, false or a number of ranks"
        yield Violation(about, message, f"write fsdp_sharding_strategy: {reshard}, or true or false here")
    if context.version == 1 and not isinstance(reshard, bool | None) and strategy_named(reshard) is None:
        message = f"{write(reshard)} is not a sharding strategy, which FSDP1 needs here"
        yield Violation(about, message, "name one, as in fsdp_sharding_strategy; or use fsdp_version: 2")


@rule("strategy-against-reshard")
def _strategy_against_reshard(context: RuleContext) -> Iterator[Violation]:
    """Refuse an fsdp_reshard_after_forward that contradicts fsdp_sharding_strategy."""
    given = context.given.fsdp_config
    strategy, reshard = given.fsdp_sharding_strategy, given.fsdp_reshard_after_forward
    if strategy is None or reshard is None:
        return
    message = ""
    if context.version == 1:
        named = strategy_named(reshard)
        if named not in (None, strategy):
            message = f"means {named}, but fsdp_sharding_strategy is {strategy}"
    elif isinstance(reshard, bool) and strategy != "NO_SHARD" and reshard is (strategy in KEEPS_GATHERED):
        message = f"{write(reshard)} contradicts fsdp_sharding_strategy {strategy}"
    if message:
        yield Violation((_RESHARD, _STRATEGY, _VERSION), message, "keep one of the two")


@rule("copies-without-hybrid")
def _copies(context: RuleContext) -> Iterator[Violation]:
    """Refuse mesh sizes that contradict the strategy."""
    sizes, strategy = context.given.parallelism_config, context.strategy
    about = (mesh("dp_replicate"), mesh("dp_shard"), _STRATEGY, _VERSION, _TYPE)
    replicas, shards = sizes.parallelism_config_dp_replicate_size, sizes.parallelism_config_dp_shard_size
    has_mesh = replicas not in (None, 1) or shards is not None
    if context.version == 1 and has_mesh and not strategy.startswith("HYBRID"):
        hint = "use HYBRID_SHARD, HYBRID_SHARD_ZERO2, or fsdp_version: 2"
        yield Violation(about, f"a mesh under FSDP1 needs HYBRID_SHARD, not {strategy}", hint)
    if context.version != 1 and strategy == "NO_SHARD" and shards not in (None, 1):
        message = f"{shards} contradicts fsdp_sharding_strategy NO_SHARD"
        yield Violation((mesh("dp_shard"), *about), message, "leave one of the two out")


@rule("mesh-size")
def _mesh_size(context: RuleContext) -> Iterator[Violation]:
    """Refuse mesh sizes that do not multiply to the number of workers."""
    sizes, world = context.axes, world_size(context.config)
    rest = [axis for axis, size in zip(AXES, sizes, strict=True) if size == REST]
    if len(rest) > 1:
        message = f"{' and '.join(f'{axis}_size' for axis in rest)} cannot both be -1, the rest"
        yield Violation(tuple(map(mesh, rest)), message, "give one of them a number")
    elif world is not None and (world % sizes.world if rest else sizes.world != world):
        message = f"a mesh of {sizes.world if rest else sizes} does not fit {counted(world, 'worker')}"
        about = (*map(mesh, AXES), ("num_processes",), ("launch", "workers_per_node"))
        yield Violation(about, message, "the sizes must multiply to the number of workers")


@rule("split-layers")
def _split_layers(context: RuleContext) -> Iterator[Violation]:
    """Refuse tp_size or cp_size of more than one under FSDP1, and tp_size with mixed_precision: fp8."""
    axes = context.axes
    for axis, size, what in (("tp", axes.tensor, "tensor"), ("cp", axes.context, "context")):
        if context.version == 1 and context.shards and size != 1:
            message = f"{size} needs FSDP2: FSDP1 joins parameters and cannot be combined with {what} parallelism"
            yield Violation((mesh(axis), _VERSION), message, "set fsdp_version: 2")
    if axes.tensor != 1 and context.config.mixed_precision == "fp8" and context.shards:
        message = "float8 layers cannot be split by tensor parallelism here"
        yield Violation((mesh("tp"), _PRECISION), message, "use bf16, or leave tp_size out")


@rule("reshard-group")
def _reshard_group(context: RuleContext) -> Iterator[Violation]:
    """Refuse a group size in fsdp_reshard_after_forward that does not divide the ranks of a replica."""
    group, world = context.fsdp.fsdp_reshard_after_forward, world_size(context.config)
    if context.version == 1 or isinstance(group, bool | str | None) or world is None:
        return
    sizes = split_world(world, context.axes)
    ranks = sizes.shards * sizes.context
    if ranks % group:
        message = f"groups of {group} do not divide the {counted(ranks, 'rank')} a replica is sharded over"
        about = (_RESHARD, mesh("dp_shard"), ("num_processes",))
        yield Violation(about, message, "use true, false or a divisor")


@rule("ram-efficient-without-sync")
def _ram_efficient(context: RuleContext) -> Iterator[Violation]:
    """Refuse fsdp_cpu_ram_efficient_loading with fsdp_sync_module_states: false."""
    given = context.given.fsdp_config
    if given.fsdp_cpu_ram_efficient_loading and given.fsdp_sync_module_states is False:
        message = "false contradicts fsdp_cpu_ram_efficient_loading: true, under which rank 0 sends its weights"
        about = (fsdp("sync_module_states"), fsdp("cpu_ram_efficient_loading"))
        yield Violation(about, message, "leave fsdp_sync_module_states out")


def leaves_float8_to_script(config: Config) -> bool:
    """Return whether a script's Accelerator computes in float8 by itself, with whichever library is configured."""
    return config.mixed_precision == "fp8" and not shards_models(config)


@rule("fp8")
def _fp8(context: RuleContext) -> Iterator[Violation]:
    """Refuse mixed_precision: fp8 with another library than torchao where the model is sharded, or under FSDP1."""
    if context.config.mixed_precision != "fp8" or not context.shards:
        return
    backend = context.config.fp8_config.backend
    if backend not in (None, "AO"):
        message = f"{backend} cannot compute a sharded model here, only AO (torchao) can"
        yield Violation((("fp8_config", "backend"), _PRECISION), message, "use AO, or leave it out")
    if context.version == 1:
        yield Violation((_PRECISION, _VERSION), "fp8 needs FSDP2", "set fsdp_version: 2")


@rule("whole-graph-of-units")
def _whole_graph(context: RuleContext) -> Iterator[Violation]:
    """Refuse dynamo_use_fullgraph for the full forward of a model that is sharded in units."""
    dynamo = context.config.dynamo_config
    whole = dynamo.dynamo_use_fullgraph and not dynamo.dynamo_use_regional_compilation
    in_units = context.shards and context.fsdp.fsdp_auto_wrap_policy != "NO_WRAP"
    if dynamo.dynamo_backend != "NO" and whole and in_units:
        about = tuple(("dynamo_config", f"dynamo_use_{name}") for name in ("fullgraph", "regional_compilation"))
        message = "true is not possible for a model sharded in units: the graph breaks where they are gathered"
        hint = "set dynamo_use_regional_compilation: true, which compiles each unit by itself"
        yield Violation(about, message, hint)


LEFT_OVER: dict[KeyPath, str] = {
    fsdp("backward_prefetch"): "FSDP2 gathers the next unit ahead, as BACKWARD_PRE does",
    fsdp("use_orig_params"): "FSDP2 always shows the model's own parameters",
    fsdp("limit_all_gathers"): "FSDP2 always limits gathers",
}
"""What FSDP2 does, whatever these keys of FSDP1 say."""
_INSTEAD: dict[KeyPath, str] = {
    ("precision", "buffer"): "FSDP2 leaves buffers in their own dtype; leave it out",
    fsdp("activation_checkpointing_offload"): "use fsdp_version: 2, or leave it out",
    ("precision", "output"): "use fsdp_version: 2, or leave it out",
}


@rule("wrong-version")
def _wrong_version(context: RuleContext) -> Iterator[Violation]:
    """Refuse a value of a key of one FSDP version that would be lost under the other."""
    for spec in context.keys_set(lambda spec: context.version not in spec.key.versions):
        if spec.path not in LEFT_OVER:
            value = write(value_at(context.given, spec.path))
            message = f"{value} has no meaning under FSDP{context.version}"
            yield Violation((spec.path, _VERSION), message, _INSTEAD.get(spec.path))


@rule("key-of-other-version", NOTES)
def _other_version(context: RuleContext) -> Iterator[Violation]:
    """Name a key of FSDP1 in a file for FSDP2, or fsdp_reshard_after_forward: true or false under FSDP1."""
    for path, what in LEFT_OVER.items():
        value = value_at(context.given, path)
        if context.version != 1 and path in context.set_paths and value is not None:
            yield Violation((path, _VERSION), f"{write(value)} is left out: {what}")
    reshard = context.given.fsdp_config.fsdp_reshard_after_forward
    if context.version == 1 and isinstance(reshard, bool):
        goes_by = f"FSDP1 follows fsdp_sharding_strategy, here {context.strategy}"
        yield Violation((_RESHARD, _VERSION), f"{write(reshard)} is left out: {goes_by}")


_XLA: KeyPath = ("fsdp_config", "xla")


@rule("xla-cannot")
def _cannot(context: RuleContext) -> Iterator[Violation]:
    """Refuse a key that asks for what there is not under PyTorch/XLA."""
    if uses_xla(context.config):
        for about, message, hint in _impossible_on_xla(context):
            yield Violation((about, _XLA, _TYPE), message, hint)


def _impossible_on_xla(context: RuleContext) -> Iterator[tuple[KeyPath, str, str]]:
    """Yield the keys of what there is not: where they stand, what is wrong, and what to do."""
    config, given = context.config, context.given
    least, most = node_range(config)
    if config.launch.shard == "always":
        message = "always is not possible under PyTorch/XLA, where the script calls the sharding itself"
        yield ("launch", "shard"), message, "use auto"
    if least != most:
        message = f"{config.launch.nodes}: a TPU slice has a fixed number of hosts"
        yield ("launch", "nodes"), message, "use num_machines"
    if config.tpu_use_cluster:
        hint = "run this command on every host, as gcloud's --worker=all does, or use --hosts"
        yield ("tpu_use_cluster",), "true is not supported: fsdplaunch does not call gcloud", hint
    if config.mixed_precision == "fp8":
        yield _PRECISION, "fp8 is not possible under PyTorch/XLA", "use bf16"
    if config.dynamo_config.dynamo_backend != "NO":
        yield ("dynamo_config", "dynamo_backend"), "PyTorch/XLA compiles by itself", "leave it out"
    if given.xla.cpu_devices not in (None, 1) and not runs_spmd(config):
        message = f"{given.xla.cpu_devices}: without xla_fsdp_v2 a process has one CPU device"
        yield ("xla", "cpu_devices"), message, "set xla_fsdp_v2: true, or leave it out"
    if shards_on_xla(config):
        yield from _impossible_ways_to_shard(context)


def _impossible_ways_to_shard(context: RuleContext) -> Iterator[tuple[KeyPath, str, str]]:
    given = context.given.fsdp_config
    strategy, weights = given.fsdp_sharding_strategy or "", context.config.checkpoint.weights
    if strategy == "NO_SHARD" or strategy.startswith("HYBRID"):
        hint = "use FULL_SHARD or SHARD_GRAD_OP"
        yield _STRATEGY, f"{strategy} is not possible: PyTorch/XLA shards over all devices", hint
    if given.fsdp_state_dict_type == "LOCAL_STATE_DICT":
        yield _STATE_DICT, "LOCAL_STATE_DICT is FSDP1's, not PyTorch/XLA's", "use SHARDED_STATE_DICT"
    if given.fsdp_ignored_modules is not None:
        yield fsdp("ignored_modules"), "PyTorch/XLA's FSDP takes all parameters", "leave it out"
    for axis, size in (("tp", context.axes.tensor), ("cp", context.axes.context)):
        if size > 1:
            yield mesh(axis), "layers and sequences are not split under PyTorch/XLA", "leave it out"
    if weights is not None:
        message = f"{weights} is not read under PyTorch/XLA"
        yield ("checkpoint", "weights"), message, "load the weights in the script, before prepare"


@rule("unread-by-xla", NOTES)
def _unread(context: RuleContext) -> Iterator[Violation]:
    """Name keys of torch's FSDP that PyTorch/XLA does not read; all in one note."""
    unread = [
        spec
        for spec in all_keys()
        if spec.path in context.set_paths
        and value_at(context.given, spec.path) is not None
        and not is_read_by_xla(spec.path)
    ]
    if unread and shards_on_xla(context.config):
        others = ", ".join(spec.name for spec in unread[1:])
        message = "PyTorch/XLA decides this by itself" + (f", and {others}" if others else "")
        yield Violation((unread[0].path, _XLA), message)


@rule("unused-xla-settings", NOTES)
def _settings(context: RuleContext) -> Iterator[Violation]:
    """Name xla_fsdp_settings under xla_fsdp_v2, which is another class; keys and section without PyTorch/XLA."""
    for spec in context.keys_set(lambda spec: spec.path[0] == "xla" and not uses_xla(context.config)):
        yield Violation((spec.path, _XLA), "is read under PyTorch/XLA only")
    for spec in context.keys_set(lambda spec: spec.name.startswith("xla_fsdp_") and not context.fsdp.xla):
        yield Violation((spec.path, _XLA), "is read under xla: true only")
    if context.fsdp.xla and context.fsdp.xla_fsdp_settings and runs_spmd(context.config):
        message = "is not used: it is for XlaFullyShardedDataParallel, which xla_fsdp_v2 replaces"
        yield Violation((("fsdp_config", "xla_fsdp_settings"), _XLA), message)


@rule("xla-processes", NOTES)
def _processes(context: RuleContext) -> Iterator[Violation]:
    """Name num_processes under PyTorch/XLA, which starts as many as there are hosts or devices."""
    number = context.given.num_processes
    if not uses_xla(context.config) or number in ("auto", 1):
        return
    message = f"{number} is left out: PyTorch/XLA has one process per device"
    if runs_spmd(context.config):
        message = f"{number} is for the devices of a CPU only: PyTorch/XLA has one process per host"
    yield Violation((("num_processes",), _XLA), message)


def first_set(context: RuleContext, section: str) -> KeyPath | None:
    """Return the first key of a section that is set to another value than its default."""
    found = context.keys_set(lambda spec: spec.path[0] == section and not spec.key.leftover)
    return found[0].path if found else None


@rule("one-replica", NOTES)
def _one_replica(context: RuleContext) -> Iterator[Violation]:
    """Name HYBRID_SHARD or HYBRID_SHARD_ZERO2 where there is one replica only."""
    sizes, strategy = context.config.parallelism_config, context.strategy
    alone = context.config.num_machines == 1 and sizes.parallelism_config_dp_replicate_size == 1
    if strategy.startswith("HYBRID") and alone and sizes.parallelism_config_dp_shard_size in (None, -1):
        inside = "SHARD_GRAD_OP" if strategy.endswith("ZERO2") else "FULL_SHARD"
        message = f"{strategy} on one node shards over the node's workers, one replica, as {inside} does"
        about = (fsdp("sharding_strategy"), fsdp("reshard_after_forward"), mesh("dp_replicate"), ("num_machines",))
        yield Violation(about, message)


@rule("unused-context-parallel", NOTES)
def _unused_context(context: RuleContext) -> Iterator[Violation]:
    """Name cp_comm_strategy without cp_size."""
    path = ("parallelism_config", "parallelism_config_cp_comm_strategy")
    if context.sets(path) and context.axes.context == 1:
        yield Violation((path, mesh("cp")), "is not used: nothing splits the sequence in this run")


@rule("unused-unit-keys", NOTES)
def _unused_unit_keys(context: RuleContext) -> Iterator[Violation]:
    """Name block names or fsdp_min_num_params under a wrap policy that does not look at them, or 0, no units."""
    names, size, given = fsdp("transformer_layer_cls_to_wrap"), fsdp("min_num_params"), context.given.fsdp_config
    policy, least = given.fsdp_auto_wrap_policy, given.fsdp_min_num_params
    if not shards_models(context.config):
        return
    if context.sets(names) and policy != "TRANSFORMER_BASED_WRAP":
        message = f"is not used: fsdp_auto_wrap_policy {policy} does not look at names"
        yield Violation((names, _POLICY), message)
    if policy == "SIZE_BASED_WRAP" and not least:
        yield Violation((size, _POLICY), "0 makes no units: the whole model is one, as under NO_WRAP")
    elif policy != "SIZE_BASED_WRAP" and least and context.sets(size):
        message = f"{least} is not used: fsdp_auto_wrap_policy {policy} does not look at sizes"
        yield Violation((size, _POLICY), message)


@rule("unused-fp8", NOTES)
def _unused_fp8(context: RuleContext) -> Iterator[Violation]:
    """Name keys of fp8_config without mixed_precision: fp8."""
    first, precision = first_set(context, "fp8_config"), context.config.mixed_precision
    if first and precision != "fp8":
        yield Violation((first, ("mixed_precision",)), f"fp8_config is not used: mixed_precision is {precision}")


@rule("unused-compile", NOTES)
def _unused_compile(context: RuleContext) -> Iterator[Violation]:
    """Name keys of dynamo_config without a backend."""
    first = first_set(context, "dynamo_config")
    if first and context.config.dynamo_config.dynamo_backend == "NO":
        message = "dynamo_config is not used: dynamo_backend is NO, nothing is compiled"
        if uses_xla(context.config) and context.given.dynamo_config.dynamo_backend != "NO":
            message = "is not used: PyTorch/XLA compiles by itself"
        yield Violation((first, ("dynamo_config", "dynamo_backend")), message)
