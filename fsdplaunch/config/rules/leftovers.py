"""Notes: keys that are set and change nothing of this run, here as under accelerate."""

from collections.abc import Iterator

from fsdplaunch.config.resolve import (
    converts_to_bf16,
    node_range,
    shards_models,
    shards_on_xla,
    uses_xla,
    workers_per_node,
)
from fsdplaunch.config.rules.base import NOTES, SHARDING_SECTIONS, RuleContext, Violation, fsdp, mesh, rule
from fsdplaunch.config.rules.nodes import starts_by_mpirun
from fsdplaunch.config.rules.sharding import leaves_float8_to_script
from fsdplaunch.config.schema.config import KeyPath, all_keys

_TYPE: KeyPath = ("distributed_type",)
_POLICY = fsdp("auto_wrap_policy")


def _first_set(context: RuleContext, section: str) -> KeyPath | None:
    """Return the first key of a section that is set to another value than its default."""
    found = context.keys_set(lambda spec: spec.path[0] == section and not spec.key.leftover)
    return found[0].path if found else None


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
        first, kind = _first_set(context, section), context.config.distributed_type
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


@rule("layers-split-across-nodes", NOTES)
def _across_nodes(context: RuleContext) -> Iterator[Violation]:
    """Name tp_size that does not divide the workers of a node."""
    tensor, workers, nodes = context.axes.tensor, workers_per_node(context.config), node_range(context.config)[1]
    if tensor > 1 and nodes > 1 and workers is not None and workers % tensor and context.shards:
        message = f"groups of {tensor} do not divide the {workers} workers of a node"
        yield Violation((mesh("tp"), ("num_machines",)), f"{message}: some split layers over the network")


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
    first, precision = _first_set(context, "fp8_config"), context.config.mixed_precision
    if first and precision != "fp8":
        yield Violation((first, ("mixed_precision",)), f"fp8_config is not used: mixed_precision is {precision}")


@rule("unused-compile", NOTES)
def _unused_compile(context: RuleContext) -> Iterator[Violation]:
    """Name keys of dynamo_config without a backend."""
    first = _first_set(context, "dynamo_config")
    if first and context.config.dynamo_config.dynamo_backend == "NO":
        message = "dynamo_config is not used: dynamo_backend is NO, nothing is compiled"
        if uses_xla(context.config) and context.given.dynamo_config.dynamo_backend != "NO":
            message = "is not used: PyTorch/XLA compiles by itself"
        yield Violation((first, ("dynamo_config", "dynamo_backend")), message)


@rule("written-by-accelerate", NOTES)
def _noise(context: RuleContext) -> Iterator[Violation]:
    """Name keys that accelerate writes for other hardware than this, or reads nowhere; all in one note."""
    taken = {("downcast_bf16",)} if converts_to_bf16(context.config) else set()
    taken |= {("main_training_function",)} if uses_xla(context.config) else set()
    noise = [spec for spec in all_keys() if spec.key.noise and spec.path in context.set_paths - taken]
    if noise:
        others = ", ".join(spec.name for spec in noise[1:])
        yield Violation((noise[0].path,), "has no effect here" + (f", nor have {others}" if others else ""))
