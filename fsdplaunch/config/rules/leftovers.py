"""Notes: keys that are set and change nothing of this run, here as under accelerate."""

from collections.abc import Iterator

from fsdplaunch.config.resolve import converts_to_bf16, node_range, uses_xla, workers_per_node
from fsdplaunch.config.rules.base import SHARDING_SECTIONS, RuleContext, Violation, fsdp, mesh, note_rule
from fsdplaunch.config.rules.nodes import starts_by_mpirun
from fsdplaunch.config.rules.sharding import leaves_float8_to_script
from fsdplaunch.config.schema.config import KeyPath, all_keys

_TYPE: KeyPath = ("distributed_type",)
_POLICY = fsdp("auto_wrap_policy")


def _first_set(context: RuleContext, section: str) -> KeyPath | None:
    """Return the first key of a section that is set to another value than its default."""
    found = context.keys_set(lambda spec: spec.path[0] == section and not spec.key.leftover)
    return found[0].path if found else None


@note_rule("other-engine")
def _other_engine(context: RuleContext) -> Iterator[Violation]:
    """Name a key of an engine or a library that this run does not use."""
    for spec in context.keys_set(lambda spec: spec.key.leftover):
        refused = spec.path == ("mpirun_config",) and starts_by_mpirun(context.config)
        passed = spec.path[0] == "fp8_config" and leaves_float8_to_script(context.config)
        if not refused and not passed:
            yield Violation((spec.path, _TYPE), spec.key.leftover)


@note_rule("nothing-sharded")
def _nothing_sharded(context: RuleContext) -> Iterator[Violation]:
    """Name keys of fsdp_config, sharding or parallelism_config without distributed_type: FSDP."""
    for section in () if context.shards or context.shards_on_xla else SHARDING_SECTIONS:
        first, kind = _first_set(context, section), context.config.distributed_type
        # Under MULTI_GPU accelerate's variables of the mesh are set, too.
        by_script = section == "parallelism_config" and kind == "MULTI_GPU"
        unused = f"only a script with Accelerator uses {section}" if by_script else f"{section} is not used"
        if first:
            yield Violation((first, _TYPE), f"{unused}: distributed_type {kind} shards nothing")


@note_rule("one-worker")
def _one_worker(context: RuleContext) -> Iterator[Violation]:
    """Name num_processes of more than one under distributed_type: NO, which starts one worker."""
    given = context.given
    if given.distributed_type == "NO" and given.num_processes not in ("auto", 1) and given.num_machines == 1:
        message = f"{given.num_processes} is left out: distributed_type NO starts one worker"
        yield Violation((("num_processes",), _TYPE), message)


@note_rule("one-replica")
def _one_replica(context: RuleContext) -> Iterator[Violation]:
    """Name HYBRID_SHARD or HYBRID_SHARD_ZERO2 where there is one replica only."""
    sizes, strategy = context.config.parallelism_config, context.strategy
    alone = context.config.num_machines == 1 and sizes.parallelism_config_dp_replicate_size == 1
    if strategy.startswith("HYBRID") and alone and sizes.parallelism_config_dp_shard_size in (None, -1):
        inside = "SHARD_GRAD_OP" if strategy.endswith("ZERO2") else "FULL_SHARD"
        message = f"{strategy} on one node shards over the node's workers, one replica, as {inside} does"
        about = (fsdp("sharding_strategy"), fsdp("reshard_after_forward"), mesh("dp_replicate"), ("num_machines",))
        yield Violation(about, message)


@note_rule("layers-split-across-nodes")
def _across_nodes(context: RuleContext) -> Iterator[Violation]:
    """Name tp_size that does not divide the workers of a node."""
    tensor, workers, nodes = context.axes.tensor, workers_per_node(context.config), node_range(context.config)[1]
    if tensor > 1 and nodes > 1 and workers is not None and workers % tensor and context.shards:
        message = f"groups of {tensor} do not divide the {workers} workers of a node"
        yield Violation((mesh("tp"), ("num_machines",)), f"{message}: some split layers over the network")


@note_rule("unused-context-parallel")
def _unused_context(context: RuleContext) -> Iterator[Violation]:
    """Name cp_comm_strategy without cp_size."""
    path = ("parallelism_config", "parallelism_config_cp_comm_strategy")
    if context.sets(path) and context.axes.context == 1:
        yield Violation((path, mesh("cp")), "is not used: nothing splits the sequence in this run")


@note_rule("unused-block-names")
def _unused_names(context: RuleContext) -> Iterator[Violation]:
    """Name block names under a wrap policy that does not look at them."""
    names, policy = fsdp("transformer_layer_cls_to_wrap"), context.given.fsdp_config.fsdp_auto_wrap_policy
    if _makes_units(context) and context.sets(names) and policy != "TRANSFORMER_BASED_WRAP":
        message = f"is not used: fsdp_auto_wrap_policy {policy} does not look at names"
        yield Violation((names, _POLICY), message)


@note_rule("unused-block-size")
def _unused_size(context: RuleContext) -> Iterator[Violation]:
    """Name fsdp_min_num_params under a wrap policy that does not look at it, or 0, which makes no units."""
    path, given = fsdp("min_num_params"), context.given.fsdp_config
    size, policy = given.fsdp_min_num_params, given.fsdp_auto_wrap_policy
    if not _makes_units(context):
        return
    if policy == "SIZE_BASED_WRAP" and not size:
        yield Violation((path, _POLICY), "0 makes no units: the whole model is one, as under NO_WRAP")
    elif policy != "SIZE_BASED_WRAP" and size and context.sets(path):
        message = f"{size} is not used: fsdp_auto_wrap_policy {policy} does not look at sizes"
        yield Violation((path, _POLICY), message)


def _makes_units(context: RuleContext) -> bool:
    return context.shards or context.shards_on_xla


@note_rule("unused-fp8")
def _unused_fp8(context: RuleContext) -> Iterator[Violation]:
    """Name keys of fp8_config without mixed_precision: fp8."""
    first, precision = _first_set(context, "fp8_config"), context.config.mixed_precision
    if first and precision != "fp8":
        yield Violation((first, ("mixed_precision",)), f"fp8_config is not used: mixed_precision is {precision}")


@note_rule("unused-compile")
def _unused_compile(context: RuleContext) -> Iterator[Violation]:
    """Name keys of dynamo_config without a backend."""
    first = _first_set(context, "dynamo_config")
    if first and context.config.dynamo_config.dynamo_backend == "NO":
        message = "dynamo_config is not used: dynamo_backend is NO, nothing is compiled"
        if uses_xla(context.config) and context.given.dynamo_config.dynamo_backend != "NO":
            message = "is not used: PyTorch/XLA compiles by itself"
        yield Violation((first, ("dynamo_config", "dynamo_backend")), message)


@note_rule("written-by-accelerate")
def _noise(context: RuleContext) -> Iterator[Violation]:
    """Name keys that accelerate writes for other hardware than this, or reads nowhere; all in one note."""
    taken = {("downcast_bf16",)} if converts_to_bf16(context.config) else set()
    taken |= {("main_training_function",)} if uses_xla(context.config) else set()
    noise = [spec for spec in all_keys() if spec.key.noise and spec.path in context.set_paths - taken]
    if noise:
        others = ", ".join(spec.name for spec in noise[1:])
        yield Violation((noise[0].path,), "has no effect here" + (f", nor have {others}" if others else ""))
