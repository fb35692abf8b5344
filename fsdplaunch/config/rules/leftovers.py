"""Notes: keys that are set and change nothing of this run, here as under accelerate."""

from collections.abc import Iterator

from fsdplaunch.config.resolve import configured_axes, converts_to_bf16, node_range, uses_xla, workers_per_node
from fsdplaunch.config.rules.base import (
    SHARDING_SECTIONS,
    RuleContext,
    Violation,
    fsdp,
    mesh,
    note_rule,
)
from fsdplaunch.config.rules.nodes import starts_by_mpirun
from fsdplaunch.config.rules.sharding import leaves_float8_to_script
from fsdplaunch.config.schema.config import KeySpec, all_keys, keys_by_path

_TYPE = ("distributed_type",)
_POLICY = fsdp("auto_wrap_policy")


def _first_set(context: RuleContext, section: str) -> KeySpec | None:
    """Return the first key of a section that is set to another value than its default."""
    members = (spec for spec in all_keys() if spec.path[0] == section and not spec.key.leftover)
    return next((spec for spec in members if context.sets(spec)), None)


@note_rule("other-engine")
def _other_engine(context: RuleContext) -> Iterator[Violation]:
    """Name a key of an engine or a library that this run does not use."""
    for spec in all_keys():
        refused = spec.path == ("mpirun_config",) and starts_by_mpirun(context.config)
        passed = spec.path[0] == "fp8_config" and leaves_float8_to_script(context.config)
        if spec.key.leftover and context.sets(spec) and not refused and not passed:
            yield Violation(about=(spec.path, _TYPE), message=spec.key.leftover)


@note_rule("nothing-sharded")
def _nothing_sharded(context: RuleContext) -> Iterator[Violation]:
    """Name keys of fsdp_config, sharding or parallelism_config without distributed_type: FSDP."""
    for section in () if context.shards or context.shards_on_xla else SHARDING_SECTIONS:
        first = _first_set(context, section)
        if first is not None:
            kind = context.config.distributed_type
            message = f"{section} is not used: distributed_type {kind} shards nothing"
            if section == "parallelism_config" and kind == "MULTI_GPU":  # accelerate's variables are set, too
                message = f"only a script with Accelerator uses {section}: distributed_type {kind} shards nothing"
            yield Violation(about=(first.path, _TYPE), message=message)


@note_rule("one-worker")
def _one_worker(context: RuleContext) -> Iterator[Violation]:
    """Name num_processes of more than one under distributed_type: NO, which starts one worker."""
    given = context.given
    if given.distributed_type == "NO" and given.num_processes not in ("auto", 1) and given.num_machines == 1:
        message = f"{given.num_processes} is left out: distributed_type NO starts one worker"
        yield Violation(about=(("num_processes",), _TYPE), message=message)


@note_rule("one-replica")
def _one_replica(context: RuleContext) -> Iterator[Violation]:
    """Name HYBRID_SHARD or HYBRID_SHARD_ZERO2 where there is one replica only."""
    strategy = context.config.fsdp_config.fsdp_sharding_strategy or ""
    sizes = context.config.parallelism_config
    alone = context.config.num_machines == 1 and sizes.parallelism_config_dp_replicate_size == 1
    if strategy.startswith("HYBRID") and alone and sizes.parallelism_config_dp_shard_size in (None, -1):
        inside = "SHARD_GRAD_OP" if strategy.endswith("ZERO2") else "FULL_SHARD"
        message = f"{strategy} on one node shards over the node's workers, one replica, as {inside} does"
        about = (fsdp("sharding_strategy"), fsdp("reshard_after_forward"), mesh("dp_replicate"), ("num_machines",))
        yield Violation(about=about, message=message)


@note_rule("layers-split-across-nodes")
def _across_nodes(context: RuleContext) -> Iterator[Violation]:
    """Name tp_size that does not divide the workers of a node."""
    tensor, workers = configured_axes(context.config).tensor, workers_per_node(context.config)
    several = node_range(context.config)[1] > 1
    if tensor > 1 and several and workers is not None and workers % tensor and context.shards:
        message = (
            f"groups of {tensor} do not divide the {workers} workers of a node: some split layers over the network"
        )
        yield Violation(about=(mesh("tp"), ("num_machines",)), message=message)


@note_rule("unused-context-parallel")
def _unused_context(context: RuleContext) -> Iterator[Violation]:
    """Name cp_comm_strategy without cp_size."""
    spec = keys_by_path()["parallelism_config", "parallelism_config_cp_comm_strategy"]
    if context.sets(spec) and configured_axes(context.config).context == 1:
        message = "is not used: nothing splits the sequence in this run"
        yield Violation(about=(spec.path, mesh("cp")), message=message)


@note_rule("unused-block-names")
def _unused_names(context: RuleContext) -> Iterator[Violation]:
    """Name block names under a wrap policy that does not look at them."""
    if not (context.shards or context.shards_on_xla):
        return
    names, policy = fsdp("transformer_layer_cls_to_wrap"), context.given.fsdp_config.fsdp_auto_wrap_policy
    if context.sets(keys_by_path()[names]) and policy != "TRANSFORMER_BASED_WRAP":
        message = f"is not used: fsdp_auto_wrap_policy {policy} does not look at names"
        yield Violation(about=(names, _POLICY), message=message)


@note_rule("unused-block-size")
def _unused_size(context: RuleContext) -> Iterator[Violation]:
    """Name fsdp_min_num_params under a wrap policy that does not look at it, or 0, which makes no units."""
    if not (context.shards or context.shards_on_xla):
        return
    path, given = fsdp("min_num_params"), context.given.fsdp_config
    size, policy = given.fsdp_min_num_params, given.fsdp_auto_wrap_policy
    if policy == "SIZE_BASED_WRAP":
        if not size:
            message = "0 makes no units: the whole model is one, as under NO_WRAP"
            yield Violation(about=(path, _POLICY), message=message)
    elif size and context.sets(keys_by_path()[path]):
        message = f"{size} is not used: fsdp_auto_wrap_policy {policy} does not look at sizes"
        yield Violation(about=(path, _POLICY), message=message)


@note_rule("unused-fp8")
def _unused_fp8(context: RuleContext) -> Iterator[Violation]:
    """Name keys of fp8_config without mixed_precision: fp8."""
    first = _first_set(context, "fp8_config")
    if first is not None and context.config.mixed_precision != "fp8":
        message = f"fp8_config is not used: mixed_precision is {context.config.mixed_precision}"
        yield Violation(about=(first.path, ("mixed_precision",)), message=message)


@note_rule("unused-compile")
def _unused_compile(context: RuleContext) -> Iterator[Violation]:
    """Name keys of dynamo_config without a backend."""
    first = _first_set(context, "dynamo_config")
    if first is not None and context.config.dynamo_config.dynamo_backend == "NO":
        message = "dynamo_config is not used: dynamo_backend is NO, nothing is compiled"
        if uses_xla(context.config) and context.given.dynamo_config.dynamo_backend != "NO":
            message = "is not used: PyTorch/XLA compiles by itself"
        yield Violation(about=(first.path, ("dynamo_config", "dynamo_backend")), message=message)


@note_rule("written-by-accelerate")
def _noise(context: RuleContext) -> Iterator[Violation]:
    """Name keys that accelerate writes for other hardware than this, or reads nowhere; all in one note."""
    taken = {("downcast_bf16",)} if converts_to_bf16(context.config) else set()
    taken |= {("main_training_function",)} if uses_xla(context.config) else set()
    noise = [spec for spec in all_keys() if spec.key.noise and spec.path in context.set_paths - taken]
    if noise:
        others = ", ".join(spec.name for spec in noise[1:])
        message = "has no effect here" + (f", nor have {others}" if others else "")
        yield Violation(about=(noise[0].path,), message=message)
