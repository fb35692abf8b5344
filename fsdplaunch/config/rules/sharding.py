"""Rules about how the model is sharded, computed and loaded."""

from collections.abc import Iterator

from fsdplaunch.config.resolve import KEEPS_GATHERED, REST, strategy_named
from fsdplaunch.config.rules.base import RuleContext, Violation, fsdp, mesh, rule, shown_value
from fsdplaunch.config.schema.walk import Path, all_keys, keys_by_path, value_at
from fsdplaunch.config.world_size import world_size

_INSTEAD: dict[Path, str] = {
    fsdp("backward_prefetch"): "FSDP2 always gathers the next unit ahead, as BACKWARD_PRE does; leave it out",
    fsdp("use_orig_params"): "FSDP2 always shows the model's own parameters; leave it out",
    ("precision", "buffer"): "FSDP2 leaves buffers in their own dtype; leave it out",
    fsdp("activation_checkpointing_offload"): "use fsdp_version: 2, or leave it out",
    ("precision", "output"): "use fsdp_version: 2, or leave it out",
}
_VERSION = fsdp("version")
_SHARDING = ("fsdp_config", "sharding", "parallelism_config")


@rule("sharding-not-asked-for")
def _not_asked_for(context: RuleContext) -> Iterator[Violation]:
    """Keys of fsdp_config, sharding or parallelism_config without distributed_type: FSDP."""
    set_paths = [
        spec.path
        for spec in all_keys()
        if spec.path[0] in _SHARDING and context.sets(spec) and not spec.key.pending
    ]
    if set_paths and not context.shards:
        message = f"{context.config.distributed_type} shards nothing, but {set_paths[0][0]} configures sharding"
        hint = f"use FSDP, or leave {set_paths[0][0]} out"
        yield Violation(about=(("distributed_type",), *set_paths), message=message, hint=hint)


@rule("wrong-version")
def _wrong_version(context: RuleContext) -> Iterator[Violation]:
    """A key of one FSDP version has a value that the other version cannot honour."""
    for spec in all_keys():
        if context.version in spec.key.versions or not context.sets(spec) or _same_anyway(context, spec.path):
            continue
        message = f"{shown_value(value_at(context.given, spec.path))} has no meaning under FSDP{context.version}"
        yield Violation(about=(spec.path, _VERSION), message=message, hint=_INSTEAD.get(spec.path))


def _same_anyway(context: RuleContext, path: Path) -> bool:
    """Tell whether FSDP2 does of its own accord what a key of FSDP1 asks for."""
    return path == fsdp("backward_prefetch") and context.given.fsdp_config.fsdp_backward_prefetch == "BACKWARD_PRE"


@rule("local-state-dict")
def _local_state_dict(context: RuleContext) -> Iterator[Violation]:
    """LOCAL_STATE_DICT under FSDP2."""
    if context.version != 1 and context.given.fsdp_config.fsdp_state_dict_type == "LOCAL_STATE_DICT":
        message = "LOCAL_STATE_DICT exists only under FSDP1"
        yield Violation(about=(fsdp("state_dict_type"), _VERSION), message=message, hint="use SHARDED_STATE_DICT")


@rule("local-state-dict-copies")
def _local_copies(context: RuleContext) -> Iterator[Violation]:
    """LOCAL_STATE_DICT with a strategy that makes replicas of the model: torch cannot write their flat shards."""
    strategy = context.config.fsdp_config.fsdp_sharding_strategy or ""
    replicas = strategy.startswith("HYBRID") or strategy == "NO_SHARD"
    if context.version == 1 and replicas and context.given.fsdp_config.fsdp_state_dict_type == "LOCAL_STATE_DICT":
        message = f"LOCAL_STATE_DICT cannot hold a model with replicas, as {strategy} makes them"
        about = (fsdp("state_dict_type"), fsdp("sharding_strategy"))
        yield Violation(about=about, message=message, hint="use SHARDED_STATE_DICT")


@rule("reshard-value")
def _reshard_value(context: RuleContext) -> Iterator[Violation]:
    """fsdp_reshard_after_forward has a value of the other FSDP version."""
    reshard = context.given.fsdp_config.fsdp_reshard_after_forward
    about = (fsdp("reshard_after_forward"), _VERSION)
    if reshard is None:
        return
    if context.version == 1 and strategy_named(reshard) is None:
        message = f"{shown_value(reshard)} is not a sharding strategy, which FSDP1 needs here"
        hint = "FULL_SHARD is what true means, SHARD_GRAD_OP what false means; or use fsdp_version: 2"
        yield Violation(about=about, message=message, hint=hint)
    if context.version != 1 and isinstance(reshard, str):
        message = f"{reshard} is a strategy of FSDP1; FSDP2 needs true, false or a number of ranks"
        hint = f"write fsdp_sharding_strategy: {reshard}, or true or false here"
        yield Violation(about=about, message=message, hint=hint)


@rule("strategy-against-reshard")
def _strategy_against_reshard(context: RuleContext) -> Iterator[Violation]:
    """fsdp_sharding_strategy and fsdp_reshard_after_forward contradict each other."""
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


@rule("hybrid-without-copies")
def _hybrid(context: RuleContext) -> Iterator[Violation]:
    """HYBRID_SHARD or HYBRID_SHARD_ZERO2 where there would be one replica only."""
    strategy = context.config.fsdp_config.fsdp_sharding_strategy or ""
    sizes = context.given.parallelism_config
    alone = context.config.num_machines == 1 and sizes.parallelism_config_dp_replicate_size in (None, 1)
    if strategy.startswith("HYBRID") and alone and sizes.parallelism_config_dp_shard_size in (None, REST):
        message = f"{strategy} on one node needs the number of replicas"
        hint = "set parallelism_config_dp_replicate_size, or use FULL_SHARD"
        about = (fsdp("sharding_strategy"), fsdp("reshard_after_forward"), mesh("dp_replicate"), ("num_machines",))
        yield Violation(about=about, message=message, hint=hint)


@rule("copies-without-hybrid")
def _copies(context: RuleContext) -> Iterator[Violation]:
    """Mesh sizes that contradict the strategy."""
    strategy = context.config.fsdp_config.fsdp_sharding_strategy or ""
    sizes = context.given.parallelism_config
    about = (mesh("dp_replicate"), mesh("dp_shard"), fsdp("sharding_strategy"), _VERSION)
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
    """Mesh sizes that do not multiply to the number of workers."""
    sizes = context.config.parallelism_config
    replicas, shards = (
        sizes.parallelism_config_dp_replicate_size or 1,
        sizes.parallelism_config_dp_shard_size or REST,
    )
    world = world_size(context.config)
    about = (mesh("dp_replicate"), mesh("dp_shard"), ("num_processes",), ("launch", "workers_per_node"))
    if replicas == REST and shards == REST:
        message = "dp_replicate_size and dp_shard_size cannot both be the rest"
        yield Violation(about=about, message=message, hint="give one of them a number")
    elif world is not None:
        product = max(replicas, 1) * max(shards, 1)
        open_end = REST in (replicas, shards)
        if (world % product) if open_end else (product != world):
            parts = f"{replicas} x {shards}" if not open_end else str(product)
            message = f"a mesh of {parts} does not fit {world} workers"
            yield Violation(about=about, message=message, hint="the sizes must multiply to the number of workers")


@rule("reshard-group")
def _reshard_group(context: RuleContext) -> Iterator[Violation]:
    """fsdp_reshard_after_forward names a group size that does not divide the ranks of a replica."""
    group = context.config.fsdp_config.fsdp_reshard_after_forward
    world = world_size(context.config)
    if context.version == 1 or isinstance(group, bool | str | None) or world is None:
        return
    sizes = context.config.parallelism_config
    replicas = max(sizes.parallelism_config_dp_replicate_size or 1, 1)
    shards = sizes.parallelism_config_dp_shard_size or REST
    ranks = shards if shards != REST else world // replicas
    if ranks % group:
        message = f"groups of {group} do not divide the {ranks} ranks a replica is sharded over"
        about = (fsdp("reshard_after_forward"), mesh("dp_shard"), ("num_processes",))
        yield Violation(about=about, message=message, hint="use true, false or a divisor")


@rule("ram-efficient-without-sync")
def _ram_efficient(context: RuleContext) -> Iterator[Violation]:
    """fsdp_cpu_ram_efficient_loading with fsdp_sync_module_states: false."""
    given = context.given.fsdp_config
    if given.fsdp_cpu_ram_efficient_loading and given.fsdp_sync_module_states is False:
        message = "false contradicts fsdp_cpu_ram_efficient_loading: true, under which rank 0 sends its weights"
        about = (fsdp("sync_module_states"), fsdp("cpu_ram_efficient_loading"))
        yield Violation(about=about, message=message, hint="leave fsdp_sync_module_states out")


@rule("offload-without-checkpointing")
def _checkpoint_offload(context: RuleContext) -> Iterator[Violation]:
    """fsdp_activation_checkpointing_offload without fsdp_activation_checkpointing."""
    given = context.config.fsdp_config
    if given.fsdp_activation_checkpointing_offload and not given.fsdp_activation_checkpointing:
        message = "there is nothing to offload without fsdp_activation_checkpointing"
        about = (fsdp("activation_checkpointing_offload"), fsdp("activation_checkpointing"))
        yield Violation(about=about, message=message, hint="set fsdp_activation_checkpointing: true as well")


@rule("every-without-checkpointing")
def _checkpoint_every(context: RuleContext) -> Iterator[Violation]:
    """sharding.checkpoint_every without fsdp_activation_checkpointing."""
    spec = keys_by_path()["sharding", "checkpoint_every"]
    if context.sets(spec) and not context.config.fsdp_config.fsdp_activation_checkpointing:
        message = "there is nothing to recompute without fsdp_activation_checkpointing"
        about = (spec.path, fsdp("activation_checkpointing"))
        yield Violation(about=about, message=message, hint="set fsdp_activation_checkpointing: true as well")


@rule("names-without-wrap")
def _unused_names(context: RuleContext) -> Iterator[Violation]:
    """Block names under a wrap policy that does not look at them."""
    config = context.config.fsdp_config
    policy = config.fsdp_auto_wrap_policy
    if config.fsdp_transformer_layer_cls_to_wrap and policy != "TRANSFORMER_BASED_WRAP":
        message = f"names blocks, but fsdp_auto_wrap_policy {policy} does not look at names"
        about = (fsdp("transformer_layer_cls_to_wrap"), fsdp("auto_wrap_policy"))
        yield Violation(about=about, message=message, hint="use TRANSFORMER_BASED_WRAP, or leave the names out")


@rule("size-without-wrap")
def _unused_size(context: RuleContext) -> Iterator[Violation]:
    """fsdp_min_num_params under a wrap policy that does not look at it."""
    policy = context.config.fsdp_config.fsdp_auto_wrap_policy
    spec = keys_by_path()[fsdp("min_num_params")]
    if context.sets(spec) and policy != "SIZE_BASED_WRAP":
        message = f"a size has no effect under fsdp_auto_wrap_policy {policy}"
        about = (spec.path, fsdp("auto_wrap_policy"))
        yield Violation(about=about, message=message, hint="use SIZE_BASED_WRAP, or leave the size out")
