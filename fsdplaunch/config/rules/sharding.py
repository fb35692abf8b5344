"""Rules about how the model is sharded, computed and loaded, by torch's FSDP and by PyTorch/XLA's."""

from collections.abc import Iterator

from fsdplaunch.config.resolve import (
    KEEPS_GATHERED,
    REST,
    configured_axes,
    is_read_by_xla,
    node_range,
    runs_spmd,
    shards_models,
    split_world,
    strategy_named,
    uses_xla,
    world_size,
)
from fsdplaunch.config.rules.base import RuleContext, Violation, fsdp, mesh, note_rule, rule, shown_value
from fsdplaunch.config.schema.config import Config, KeyPath, KeySpec, all_keys, keys_by_path, value_at

_VERSION = fsdp("version")
AXES = ("dp_replicate", "dp_shard", "cp", "tp")
"""The mesh's axes, as parallelism_config names them."""


@rule("local-state-dict")
def _local_state_dict(context: RuleContext) -> Iterator[Violation]:
    """Refuse LOCAL_STATE_DICT under FSDP2."""
    if context.version != 1 and context.given.fsdp_config.fsdp_state_dict_type == "LOCAL_STATE_DICT":
        message = "LOCAL_STATE_DICT exists only under FSDP1"
        yield Violation(about=(fsdp("state_dict_type"), _VERSION), message=message, hint="use SHARDED_STATE_DICT")


@rule("local-state-dict-copies")
def _local_copies(context: RuleContext) -> Iterator[Violation]:
    """Refuse LOCAL_STATE_DICT with a strategy that makes replicas: torch cannot write their flat shards."""
    strategy = context.config.fsdp_config.fsdp_sharding_strategy or ""
    replicas = strategy.startswith("HYBRID") or strategy == "NO_SHARD"
    if context.version == 1 and replicas and context.given.fsdp_config.fsdp_state_dict_type == "LOCAL_STATE_DICT":
        message = f"LOCAL_STATE_DICT cannot hold a model with replicas, as {strategy} makes them"
        about = (fsdp("state_dict_type"), fsdp("sharding_strategy"))
        yield Violation(about=about, message=message, hint="use SHARDED_STATE_DICT")


@rule("reshard-value")
def _reshard_value(context: RuleContext) -> Iterator[Violation]:
    """Refuse a value of fsdp_reshard_after_forward that the other FSDP version has."""
    reshard = context.given.fsdp_config.fsdp_reshard_after_forward
    about = (fsdp("reshard_after_forward"), _VERSION)
    if reshard is None:
        return
    if context.version == 1 and not isinstance(reshard, bool) and strategy_named(reshard) is None:
        message = f"{shown_value(reshard)} is not a sharding strategy, which FSDP1 needs here"
        hint = "name one, as in fsdp_sharding_strategy; or use fsdp_version: 2"
        yield Violation(about=about, message=message, hint=hint)
    if context.version != 1 and isinstance(reshard, str):
        message = f"{reshard} is a strategy of FSDP1; FSDP2 needs true, false or a number of ranks"
        hint = f"write fsdp_sharding_strategy: {reshard}, or true or false here"
        yield Violation(about=about, message=message, hint=hint)


@rule("strategy-against-reshard")
def _strategy_against_reshard(context: RuleContext) -> Iterator[Violation]:
    """Refuse an fsdp_reshard_after_forward that contradicts fsdp_sharding_strategy."""
    given = context.given.fsdp_config
    strategy, reshard = given.fsdp_sharding_strategy, given.fsdp_reshard_after_forward
    if strategy is None or reshard is None:
        return
    about = (fsdp("reshard_after_forward"), fsdp("sharding_strategy"), _VERSION)
    if context.version == 1:
        named = strategy_named(reshard)
        if named is not None and named != strategy:
            message = f"means {named}, but fsdp_sharding_strategy is {strategy}"
            yield Violation(about=about, message=message, hint="keep one of the two")
        return
    keeps = strategy in KEEPS_GATHERED
    if isinstance(reshard, bool) and strategy != "NO_SHARD" and reshard is keeps:
        message = f"{shown_value(reshard)} contradicts fsdp_sharding_strategy {strategy}"
        yield Violation(about=about, message=message, hint="keep one of the two")


@rule("copies-without-hybrid")
def _copies(context: RuleContext) -> Iterator[Violation]:
    """Refuse mesh sizes that contradict the strategy."""
    strategy = context.config.fsdp_config.fsdp_sharding_strategy or ""
    sizes = context.given.parallelism_config
    about = (mesh("dp_replicate"), mesh("dp_shard"), fsdp("sharding_strategy"), _VERSION, ("distributed_type",))
    replicas, shards = sizes.parallelism_config_dp_replicate_size, sizes.parallelism_config_dp_shard_size
    if (
        context.version == 1
        and not strategy.startswith("HYBRID")
        and (replicas not in (None, 1) or shards is not None)
    ):
        message = f"a mesh under FSDP1 needs HYBRID_SHARD, not {strategy}"
        yield Violation(
            about=about, message=message, hint="use HYBRID_SHARD, HYBRID_SHARD_ZERO2, or fsdp_version: 2"
        )
    if context.version != 1 and strategy == "NO_SHARD" and shards not in (None, 1):
        message = f"{shards} contradicts fsdp_sharding_strategy NO_SHARD"
        yield Violation(about=(mesh("dp_shard"), *about), message=message, hint="leave one of the two out")


@rule("mesh-size")
def _mesh_size(context: RuleContext) -> Iterator[Violation]:
    """Refuse mesh sizes that do not multiply to the number of workers."""
    sizes, world = configured_axes(context.config), world_size(context.config)
    about = (*map(mesh, AXES), ("num_processes",), ("launch", "workers_per_node"))
    rest = [axis for axis, size in zip(AXES, sizes, strict=True) if size == REST]
    if len(rest) > 1:
        message = f"{' and '.join(f'{axis}_size' for axis in rest)} cannot both be the rest"
        yield Violation(about=tuple(map(mesh, rest)), message=message, hint="give one of them a number")
    elif world is not None and ((world % sizes.world) if REST in sizes else (sizes.world != world)):
        parts = str(sizes) if REST not in sizes else str(sizes.world)
        message = f"a mesh of {parts} does not fit {world} workers"
        yield Violation(about=about, message=message, hint="the sizes must multiply to the number of workers")


@rule("split-layers-of-fsdp1")
def _not_under_fsdp1(context: RuleContext) -> Iterator[Violation]:
    """Refuse tp_size or cp_size of more than one under FSDP1."""
    for axis, what in (("tp", "tensor"), ("cp", "context")) if context.version == 1 and context.shards else ():
        size = getattr(context.given.parallelism_config, mesh(axis)[-1])
        if size != 1:
            message = f"{size} needs FSDP2: FSDP1 joins parameters and cannot be combined with {what} parallelism"
            yield Violation(about=(mesh(axis), _VERSION), message=message, hint="set fsdp_version: 2")


@rule("split-layers-in-fp8")
def _not_in_fp8(context: RuleContext) -> Iterator[Violation]:
    """Refuse tp_size of more than one with mixed_precision: fp8."""
    if configured_axes(context.config).tensor != 1 and context.config.mixed_precision == "fp8" and context.shards:
        message = "float8 layers cannot be split by tensor parallelism here"
        about = (mesh("tp"), ("mixed_precision",))
        yield Violation(about=about, message=message, hint="use bf16, or leave tp_size out")


@rule("plan-without-tensor-parallel")
def _plan_alone(context: RuleContext) -> Iterator[Violation]:
    """Refuse sharding.tensor_parallel_plan without tp_size."""
    spec = keys_by_path()["sharding", "tensor_parallel_plan"]
    if context.sets(spec) and configured_axes(context.config).tensor == 1:
        message = "there are no ranks to split layers: tp_size is 1"
        yield Violation(
            about=(spec.path, mesh("tp")), message=message, hint="set parallelism_config_tp_size as well"
        )


@rule("attention-without-context-parallel")
def _attention_alone(context: RuleContext) -> Iterator[Violation]:
    """Refuse sharding.context_parallel_attention without cp_size."""
    alone = configured_axes(context.config).context == 1
    if alone and context.config.sharding.context_parallel_attention != "auto":
        about = (("sharding", "context_parallel_attention"), mesh("cp"))
        message = "there are no ranks to split sequences: cp_size is 1"
        yield Violation(about=about, message=message, hint="set parallelism_config_cp_size as well")


@rule("reshard-group")
def _reshard_group(context: RuleContext) -> Iterator[Violation]:
    """Refuse a group size in fsdp_reshard_after_forward that does not divide the ranks of a replica."""
    group = context.config.fsdp_config.fsdp_reshard_after_forward
    world = world_size(context.config)
    if context.version == 1 or isinstance(group, bool | str | None) or world is None:
        return
    sizes = split_world(world, configured_axes(context.config))
    ranks = sizes.shards * sizes.context
    if ranks % group:
        message = f"groups of {group} do not divide the {ranks} ranks a replica is sharded over"
        about = (fsdp("reshard_after_forward"), mesh("dp_shard"), ("num_processes",))
        yield Violation(about=about, message=message, hint="use true, false or a divisor")


@rule("ram-efficient-without-sync")
def _ram_efficient(context: RuleContext) -> Iterator[Violation]:
    """Refuse fsdp_cpu_ram_efficient_loading with fsdp_sync_module_states: false."""
    given = context.given.fsdp_config
    if given.fsdp_cpu_ram_efficient_loading and given.fsdp_sync_module_states is False:
        message = "false contradicts fsdp_cpu_ram_efficient_loading: true, under which rank 0 sends its weights"
        about = (fsdp("sync_module_states"), fsdp("cpu_ram_efficient_loading"))
        yield Violation(about=about, message=message, hint="leave fsdp_sync_module_states out")


@rule("offload-without-checkpointing")
def _checkpoint_offload(context: RuleContext) -> Iterator[Violation]:
    """Refuse fsdp_activation_checkpointing_offload without fsdp_activation_checkpointing."""
    given = context.config.fsdp_config
    if given.fsdp_activation_checkpointing_offload and not given.fsdp_activation_checkpointing:
        message = "there is nothing to offload without fsdp_activation_checkpointing"
        about = (fsdp("activation_checkpointing_offload"), fsdp("activation_checkpointing"))
        yield Violation(about=about, message=message, hint="set fsdp_activation_checkpointing: true as well")


@rule("every-without-checkpointing")
def _checkpoint_every(context: RuleContext) -> Iterator[Violation]:
    """Refuse sharding.checkpoint_every without fsdp_activation_checkpointing."""
    spec = keys_by_path()["sharding", "checkpoint_every"]
    if context.sets(spec) and not context.config.fsdp_config.fsdp_activation_checkpointing:
        message = "there is nothing to recompute without fsdp_activation_checkpointing"
        about = (spec.path, fsdp("activation_checkpointing"))
        yield Violation(about=about, message=message, hint="set fsdp_activation_checkpointing: true as well")


_BACKEND = ("fp8_config", "backend")
_FULLGRAPH = ("dynamo_config", "dynamo_use_fullgraph")
_REGIONAL = ("dynamo_config", "dynamo_use_regional_compilation")


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
        yield Violation(about=(_BACKEND, ("mixed_precision",)), message=message, hint="use AO, or leave it out")
    if context.version == 1:
        message = "fp8 needs FSDP2"
        yield Violation(about=(("mixed_precision",), fsdp("version")), message=message, hint="set fsdp_version: 2")


@rule("whole-graph-of-units")
def _whole_graph(context: RuleContext) -> Iterator[Violation]:
    """Refuse dynamo_use_fullgraph for the full forward of a model that is sharded in units."""
    dynamo = context.config.dynamo_config
    if dynamo.dynamo_backend == "NO" or not dynamo.dynamo_use_fullgraph or dynamo.dynamo_use_regional_compilation:
        return
    if context.shards and context.config.fsdp_config.fsdp_auto_wrap_policy != "NO_WRAP":
        value = shown_value(dynamo.dynamo_use_fullgraph)
        message = f"{value} cannot hold for a model sharded in units: the graph breaks where they are gathered"
        hint = "set dynamo_use_regional_compilation: true, which compiles each unit by itself"
        yield Violation(about=(_FULLGRAPH, _REGIONAL), message=message, hint=hint)


_LEFT_OVER: dict[KeyPath, str] = {
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
    for spec in all_keys():
        if context.version in spec.key.versions or not context.sets(spec) or spec.path in _LEFT_OVER:
            continue
        message = f"{shown_value(value_at(context.given, spec.path))} has no meaning under FSDP{context.version}"
        yield Violation(about=(spec.path, _VERSION), message=message, hint=_INSTEAD.get(spec.path))


@note_rule("key-of-fsdp1")
def _key_of_fsdp1(context: RuleContext) -> Iterator[Violation]:
    """Name a key of FSDP1 in a file for FSDP2, which decides for itself; accelerate drops it as well."""
    for path, what in _LEFT_OVER.items():
        value = value_at(context.given, path)
        if context.version != 1 and path in context.set_paths and value is not None:
            yield Violation(about=(path, _VERSION), message=f"{shown_value(value)} is left out: {what}")


@note_rule("reshard-under-fsdp1")
def _reshard_under_fsdp1(context: RuleContext) -> Iterator[Violation]:
    """Name fsdp_reshard_after_forward: true or false under FSDP1, which goes by the strategy, like accelerate."""
    reshard = context.given.fsdp_config.fsdp_reshard_after_forward
    if context.version != 1 or not isinstance(reshard, bool) or strategy_named(reshard) is not None:
        return
    strategy = context.config.fsdp_config.fsdp_sharding_strategy
    message = f"{shown_value(reshard)} is left out: FSDP1 goes by fsdp_sharding_strategy, here {strategy}"
    yield Violation(about=(fsdp("reshard_after_forward"), _VERSION), message=message)


_XLA = ("fsdp_config", "xla")
_SWITCHED = ("xla_fsdp_v2", "xla_fsdp_settings", "xla_fsdp_grad_ckpt")


@rule("xla-cannot")
def _cannot(context: RuleContext) -> Iterator[Violation]:
    """Refuse a key that asks for what there is not under PyTorch/XLA."""
    if uses_xla(context.config):
        for about, message, hint in _impossible(context):
            yield Violation(about=(about, _XLA, ("distributed_type",)), message=message, hint=hint)


def _impossible(context: RuleContext) -> Iterator[tuple[KeyPath, str, str]]:
    """Yield the keys of what there is not: where they stand, what is wrong, and what to do."""
    config = context.config
    least, most = node_range(config)
    if config.launch.shard == "always":
        message = "always is not possible under PyTorch/XLA: the script calls what shards"
        yield ("launch", "shard"), message, "use auto"
    if least != most:
        message = f"{config.launch.nodes}: a TPU slice has a fixed number of hosts"
        yield ("launch", "nodes"), message, "use num_machines"
    if config.tpu_use_cluster:
        hint = "run this command on every host, as gcloud's --worker=all does, or use --hosts"
        yield ("tpu_use_cluster",), "true is not supported: fsdplaunch does not call gcloud", hint
    if config.mixed_precision == "fp8":
        yield ("mixed_precision",), "fp8 is not possible under PyTorch/XLA", "use bf16"
    if config.dynamo_config.dynamo_backend != "NO":
        yield ("dynamo_config", "dynamo_backend"), "PyTorch/XLA compiles by itself", "leave it out"
    devices = context.given.xla.cpu_devices
    if devices not in (None, 1) and not runs_spmd(config):
        message = f"{devices}: without xla_fsdp_v2 a process has one device of a CPU"
        yield ("xla", "cpu_devices"), message, "set xla_fsdp_v2: true, or leave it out"
    if context.shards_on_xla:
        yield from _ways_to_shard(context)


def _ways_to_shard(context: RuleContext) -> Iterator[tuple[KeyPath, str, str]]:
    strategy = context.given.fsdp_config.fsdp_sharding_strategy or ""
    if strategy == "NO_SHARD" or strategy.startswith("HYBRID"):
        hint = "use FULL_SHARD or SHARD_GRAD_OP"
        yield fsdp("sharding_strategy"), f"{strategy} is not possible: PyTorch/XLA shards over all devices", hint
    if context.given.fsdp_config.fsdp_state_dict_type == "LOCAL_STATE_DICT":
        yield fsdp("state_dict_type"), "LOCAL_STATE_DICT is FSDP1's, not PyTorch/XLA's", "use SHARDED_STATE_DICT"
    if context.given.fsdp_config.fsdp_ignored_modules is not None:
        message = "PyTorch/XLA's FSDP takes all parameters"
        yield fsdp("ignored_modules"), message, "leave it out"
    for axis in ("tp", "cp"):
        if getattr(context.config.parallelism_config, mesh(axis)[-1]) > 1:
            yield mesh(axis), "layers and sequences are not split under PyTorch/XLA", "leave it out"
    if context.config.checkpoint.weights is not None:
        message = f"{context.config.checkpoint.weights} is not read under PyTorch/XLA"
        yield ("checkpoint", "weights"), message, "load the weights in the script, before prepare"


@note_rule("unread-by-xla")
def _unread(context: RuleContext) -> Iterator[Violation]:
    """Name keys of torch's FSDP that PyTorch/XLA does not read; all in one note."""
    if not context.shards_on_xla:
        return
    unread = [spec for spec in all_keys() if _is_set(context, spec) and not is_read_by_xla(spec.path)]
    if unread:
        others = ", ".join(spec.name for spec in unread[1:])
        message = "PyTorch/XLA decides this by itself" + (f", and {others}" if others else "")
        yield Violation(about=(unread[0].path, _XLA), message=message)


def _is_set(context: RuleContext, spec: KeySpec) -> bool:
    return spec.path in context.set_paths and value_at(context.given, spec.path) is not None


@note_rule("unused-xla-settings")
def _settings(context: RuleContext) -> Iterator[Violation]:
    """Name xla_fsdp_settings under xla_fsdp_v2, which is another class; keys and section without PyTorch/XLA."""
    for spec in () if uses_xla(context.config) else all_keys():
        if spec.path[0] == "xla" and context.sets(spec):
            yield Violation(about=(spec.path, _XLA), message="is read under PyTorch/XLA only")
    for name in _SWITCHED:
        path = ("fsdp_config", name)
        if not context.sets(keys_by_path()[path]):
            continue
        if not context.config.fsdp_config.xla:
            yield Violation(about=(path, _XLA), message="is read under xla: true only")
        elif name == "xla_fsdp_settings" and (message := _unused_settings(context.config)):
            yield Violation(about=(path, _XLA), message=message)


def _unused_settings(config: Config) -> str | None:
    """Return what is to be said of arguments that the class does not look at."""
    if runs_spmd(config):
        return "is not used: they are of the class that xla_fsdp_v2 replaces"
    settings = config.fsdp_config.xla_fsdp_settings
    alone = (
        [] if "sharding_groups" in settings else sorted({"sharding_rank", "sharding_world_size"} & set(settings))
    )
    verb = "is" if len(alone) == 1 else "are"
    return f"{' and '.join(alone)} {verb} not used: without sharding_groups all shard" if alone else None


@note_rule("xla-processes")
def _processes(context: RuleContext) -> Iterator[Violation]:
    """Name num_processes under PyTorch/XLA, which starts as many as there are hosts or devices."""
    number = context.given.num_processes
    if not uses_xla(context.config) or number in ("auto", 1):
        return
    message = f"{number} is left out: PyTorch/XLA has one process per device"
    if runs_spmd(context.config):
        message = f"{number} is for the devices of a CPU only: PyTorch/XLA has one process per host"
    yield Violation(about=(("num_processes",), _XLA), message=message)
